"""The trial run: a real DataLoader with the given settings and a loop without a model, in a child process.

Two epochs, or as much of them as the time allows, with pauses in which the queues fill; more epochs if they are short.
If its workers may run a full garbage collection in a longer run, a second loader follows in which they do.
measure_in_child.py starts, watches and stops it. It imports little, because its own memory is measured too.

Run as ``python -m legroom.loader.measure.dataloader_trial REQUEST ANSWER``. The answer is a line of JSON for each
step, so that the progress of a killed child is known.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legroom.loader.measure.import_dataset import FoundDataset
    from legroom.loader.measure.memory_copied_by_gc import ForkedCollections
    from legroom.probe.copy_on_write import CopiedMemory

_STILL_S, _POLL_S = 0.1, 0.01  # without CPU time until a worker counts as waiting; between two checks
_SOCKET_FOLDER = 80  # bytes: the path of a socket in it has at most 107
_PEAK_READ_S = 0.05  # by then the guard has read the kernel's peak
_COMPARED = 2048  # pages that a worker copied, compared at each reading
_JUDGED = 256  # samples that show whether reading them copies; twice as many pages
_MORE_EPOCHS, _MORE_S = 16, 2.0  # after two short epochs: memory rises for the first dozens of batches
# Frames of Legroom, of Python's import and of argparse, where a script ends that parses its command line at import
_NOT_USERS = (os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep,
              str(importlib.__file__), "<frozen importlib",
              os.path.join(os.path.dirname(os.__file__), "argparse.py"))  # fmt: skip
_HEADING = "Traceback (most recent call last):"
_TAIL = 5  # lines of a traceback that show where it came from
_FILES = ("too many open files", "ancdata")
_SHM = ("bus error", "unable to allocate shared memory", "unable to open shared memory object", "</torch_",
        "unable to resize file")  # fmt: skip
_NO_SPACE = "no space left on device"
_RAM = ("signal: killed", "sigkill", "not enough memory", "can't allocate memory", "cannot allocate memory")

Note = Callable[..., None]


def main(request: str, answer: str) -> None:
    """Run the loop that the request describes."""
    faulthandler.enable()
    with open(request, encoding="utf-8") as file:
        settings = json.load(file)
    del sys.argv[1:]  # ours: a script that parses its command line while it is imported must find none
    if os.getcwd() not in sys.path:  # absent under PYTHONSAFEPATH
        sys.path.insert(0, os.getcwd())
    from legroom.loader.measure.import_dataset import FoundDataset, find_dataset

    def make() -> FoundDataset:
        measured = settings.pop("measured")
        if sizes := settings.pop("sizes", None):
            settings.pop("spec"), settings.pop("collate")
            return FoundDataset(TensorsOfSize(sizes, settings.pop("samples")), None)
        named = find_dataset(settings.pop("spec"), settings.pop("collate"))
        # Measuring ran out of memory before it had read these settings; a trial of others answers another question.
        if named.loader is not None and not measured:
            raise MemoryError
        return named

    run(make, answer, settings, caller=False)
    os._exit(0)  # threads or atexit hooks of a dataset may hang


class TensorsOfSize:
    """Samples of which only the bytes are known: tensors of these sizes."""

    def __init__(self, sizes: list[int], samples: int) -> None:
        self._sizes, self._samples = sizes, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        import torch

        return tuple(torch.ones(size, dtype=torch.uint8) for size in self._sizes)


def run(make: Callable[[], FoundDataset], answer: str, settings: dict[str, Any], *, caller: bool = True) -> None:
    """In the child: run the loop and write every step to the file ``answer``; ``caller``: a fork of the caller."""
    prepare_to_be_killed(os.path.dirname(answer))
    sink = os.open(answer, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(**what: Any) -> None:
        os.write(sink, (json.dumps({**what, "time": time.monotonic()}) + "\n").encode())

    try:
        found = make()
        taken_over = found.trial_arguments(settings["batch_size"], settings["loader_kind"])
        _loop(found.dataset, found.collate_fn, note, caller=caller, taken_over=taken_over, **settings)
    except BaseException as problem:  # SystemExit too: a script may exit while it is imported
        note(
            error=f"{type(problem).__name__}: {problem}"[:4000], pool=_pool(problem), lost=_lost(problem),
            semaphore=_innermost(problem).endswith("synchronize.py"), tail=traceback_tail(problem),
        )  # fmt: skip


def prepare_to_be_killed(folder: str) -> None:
    """Let the OOM killer take this process and its workers first, and end it with its guard.

    Sockets of the workers are made in ``folder``, which is removed afterwards: multiprocessing's own directory in /tmp
    stays if they are killed.
    """
    from multiprocessing.process import current_process

    from legroom.system.processes_and_threads import die_with_parent, prefer_oom_kill

    prefer_oom_kill()
    die_with_parent(signal.SIGKILL)
    if len(os.fsencode(folder)) < _SOCKET_FOLDER:
        current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]  # multiprocessing.util.get_temp_dir


def _loop(
    dataset: Any,
    collate_fn: Any,
    note: Note,
    *,
    caller: bool,
    loader_kind: str,
    batch_size: int,
    num_workers: int,
    prefetch_factor: int,
    persistent_workers: bool,
    multiprocessing_context: str | None,
    seconds: float,
    batch_seconds: float,
    pause_seconds: float,
    longer_seconds: float,
    taken_over: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    options: dict[str, Any] = {}
    if num_workers:
        options = {
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
        }
    module = "legroom.loader.dataloader.dataloader" if loader_kind == "legroom" else "torch.utils.data"

    # A batch sampler makes whole batches; a sampler decides the order.
    order: dict[str, Any] = {} if "batch_sampler" in taken_over else {"batch_size": batch_size}
    if not taken_over.keys() & {"sampler", "batch_sampler"}:
        order["shuffle"] = _shuffled(dataset)

    def new_loader() -> Any:
        return import_module(module).DataLoader(
            dataset, num_workers=num_workers, collate_fn=collate_fn, **order, **taken_over, **options
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking with threads, and of more workers than cores
        loader = new_loader()
        # First: it sees the state of a training script.
        collections = _collections(num_workers, multiprocessing_context, caller)
        shm = _ShmUse()
        pauses = _Pauses(max(_STILL_S, 2 * batch_seconds), pause_seconds)
        copies = _Copies(dataset, num_workers, batch_size) if num_workers else None
        note(step="start", process=_anonymous(), workers=num_workers)
        least = num_workers * (prefetch_factor + 2) + 3  # by then every worker has made several batches
        whole, total = True, 0
        batch = None  # stays alive from one epoch to the next, as in a training loop
        for epoch, share in enumerate((0.6, 0.4)):
            done, until = 0, 0.0
            enough = least * (2 - epoch)  # twice in the first epoch: its second half shows whether memory grows
            wanted = copies.batches_wanted if copies is not None and epoch == 0 else 0  # if time allows
            source = iter(loader)
            if epoch == 0 and collections is not None:
                collections.forked()
            if epoch == 0 and copies is not None:
                copies.forked()
            for batch in source:  # noqa: B007  kept alive
                done += 1
                if done == 1:  # without the start of the workers
                    until = time.monotonic() + share * seconds
                if done == least or done & (done - 1) == 0:  # early ones fill the queues, later ones show growth
                    full = None
                    if num_workers:
                        full = pauses.wait(source if loader_kind == "torch" else None)
                    note(step="batch", epoch=epoch, batches=done, fds=_open_files(), full=full, shm=shm.now())
                    if copies is not None and epoch == 0:
                        copies.read(done)
                if done >= enough and time.monotonic() > until + (longer_seconds if done < wanted else 0.0):
                    whole = False
                    break
            if copies is not None and epoch == 0:
                copies.read(done)
            total += done
            del source  # its workers end before those of the next epoch start
            note(step="epoch", epoch=epoch, batches=done, fds=_open_files())
        if whole:
            for batch in _more_batches(loader, min(_MORE_S, seconds)):  # noqa: B007  the last one is dropped by then
                total += 1
        del batch, loader
        # The workers of legroom.DataLoader freeze what they inherit.
        collects = collections is not None and collections.go_on(
            workers=loader_kind == "torch", restarted=not persistent_workers
        )
        expected = collections is not None and collects and collections.expected(num_workers)
        time.sleep(_PEAK_READ_S)
        note(step="end", whole=whole, collects=collects, expected=expected)  # what follows is not the loop's need
        if collections is not None and collects:
            note(step="collecting")
            in_time = _with_full_collections(
                new_loader(), collections, pauses, workers=num_workers, torch=loader_kind == "torch", least=least,
                most=total, seconds=seconds,
            )  # fmt: skip
            time.sleep(_PEAK_READ_S)
            note(step="collected", whole=in_time)
        if copies is not None:
            copies.note(note)


def _collections(workers: int, method: str | None, caller: bool) -> ForkedCollections | None:
    """Postpones full garbage collections, if workers share the memory of this process: one would copy it."""
    from multiprocessing import get_start_method

    if not workers or (method or get_start_method()) != "fork" or not gc.isenabled():
        return None
    from legroom.loader.measure.memory_copied_by_gc import ForkedCollections

    collections = ForkedCollections(caller=caller)
    collections.postpone()
    return collections


def _more_batches(loader: Any, seconds: float) -> Iterator[Any]:
    """Batches of further epochs, for a moment: workers and the process copy more of the memory that they share.

    A generator, so that the caller holds one batch as a training loop does, and not one more in a frame below it.
    """
    until = time.monotonic() + seconds
    for _ in range(_MORE_EPOCHS):
        for batch in loader:
            yield batch
            if time.monotonic() > until:
                return


def _with_full_collections(
    loader: Any, collections: ForkedCollections, pauses: _Pauses, *, workers: int, torch: bool, least: int, most: int,
    seconds: float,
) -> bool:  # fmt: skip
    """Run batches in which a process runs a full collection as soon as it collects; whether time was enough.

    Persistent workers live for all epochs, others for one.
    """
    done, until = 0, time.monotonic() + seconds
    batch = None
    collections.expedite()
    while done < most:
        before, source = done, iter(loader)
        collections.forked()
        for batch in source:  # noqa: B007  kept alive
            done += 1
            enough = done >= most or (done >= least and collections.full(workers))
            if done == 1 or enough:
                pauses.wait(source if torch else None)
            if enough:
                return True
            if time.monotonic() > until:
                return False
        del source
        if not loader.persistent_workers or done == before:
            break
    return True


class _Copies:
    """What a forked worker copies of the dataset in the first epoch, by attribute.

    No garbage is collected meanwhile: a full collection after the fork would copy the objects of this process, which
    the loop of a training script does not do. Made before the fork, because it imports what it needs.
    """

    def __init__(self, dataset: Any, workers: int, batch_size: int) -> None:
        from legroom.probe.copy_on_write import CopyReader
        from legroom.probe.host_files_and_syscalls import Host

        self._dataset, self._number, self._batch_size = dataset, workers, batch_size
        self._reader = CopyReader(Host(), os.getpid(), compare=True, pages=_COMPARED, since_fork=True)
        self._workers: list[int] = []
        self._copied: tuple[CopiedMemory, ...] = ()
        self._samples = 0

    def forked(self) -> None:
        """The workers have been started."""
        with _no_collection():
            self._workers = [int(pid) for pid in _children()][:1]  # one: they all read the same dataset
            self._copied = self._reader.read(self._workers, time.monotonic())

    @property
    def batches_wanted(self) -> int:
        """After so many the worker has read enough."""
        return -(-_JUDGED // self._batch_size) * self._number

    def read(self, batches: int) -> None:
        """Read it after so many batches, if the worker still exists: it ends with the epoch."""
        with _no_collection():
            copied = self._reader.read(self._workers, time.monotonic())
            if any(one.copied is not None for one in copied):
                self._copied = copied
                self._samples = batches // self._number * self._batch_size

    def note(self, note: Note) -> None:
        """Write it, after the loop: looking up attributes writes to every object, and takes memory of its own."""
        for one in self._copied:
            if one.copied:
                from legroom.cache.freeze import copied_parts

                note(step="copied", attributes=copied_parts(self._dataset, one, self._samples))


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _shuffled(dataset: Any) -> bool:
    """Whether to shuffle, which touches most of what the dataset holds: if it has indices and a length."""
    from legroom.loader.measure.import_dataset import is_iterable, length

    return not is_iterable(dataset) and bool(length(dataset))


class _Pauses:
    """Waits until the workers have filled the queues, within a limit for all pauses together."""

    def __init__(self, still: float, together: float) -> None:
        # Before the fork: what is imported after it is not shared with the workers, and starts garbage collections.
        from legroom.loader.dataloader import torch_internals

        self._still, self._left, self._torch = still, together, torch_internals

    def wait(self, source: Any) -> bool | None:
        """Wait until no worker has used a CPU for a while, and every requested batch is in the queue.

        Returns whether all were; None if unknown. A worker that waits for a disk uses no CPU either. A worker whose
        stream has ended answers no request: if all have taken theirs and none is busy for longer than a batch takes,
        all that there are have been made. Without a source (legroom.DataLoader) that is all there is to go by.
        """
        all_batches_queued, all_requests_taken = self._torch.all_batches_queued, self._torch.all_requests_taken
        began = since = time.monotonic()
        last, full = _activity(), all_batches_queued(source)
        while (now := time.monotonic()) < began + self._left:
            if now > since + self._still and full is not False:
                full = full or source is None or all_requests_taken(source) or None
                break
            time.sleep(_POLL_S)
            full = all_batches_queued(source)
            if (current := _activity()) is None or current != last:
                last, since = current, time.monotonic()
        self._left = max(self._still, self._left - (now - began))
        return full


def _activity() -> list[tuple[str, str]] | None:
    """CPU time of each child; None while one runs or waits for a CPU: on a busy machine that can take long."""
    found = []
    for pid in _children():
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] in "RD":
            return None
        found.append((fields[11], fields[12]))
    return found


def _children() -> list[str]:
    found = []
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                found += file.read().split()
    except OSError:  # the kernel lacks the file: the pause has a fixed length
        pass
    return found


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return 0


class _ShmUse:
    """Bytes in /dev/shm that the loop has added.

    If other processes use it too, they may free some meanwhile. So the least is what this process and its workers have
    open or mapped, without the files that existed before, such as a cached dataset.
    """

    def __init__(self) -> None:
        self._before = self._used()
        self._earlier: set[int] = set()
        if self._before:
            from legroom.probe.host_files_and_syscalls import Host
            from legroom.probe.shm_segments import files_below

            self._earlier = {file.inode for file in files_below(Host(), "/dev/shm").files} | self._files().keys()

    def now(self) -> int:
        added = self._used() - self._before
        return max(added, self.held()) if self._before else added

    def held(self) -> int:
        """Of that, what this process and its workers have open or mapped."""
        return sum(size for inode, size in self._files().items() if inode not in self._earlier)

    def _used(self) -> int:
        try:
            space = os.statvfs("/dev/shm")
        except OSError:
            return 0
        return (space.f_blocks - space.f_bfree) * space.f_frsize

    def _files(self) -> dict[int, int]:
        """By inode, the sizes of the files that this process and its workers have open or mapped."""
        from legroom.probe.host_files_and_syscalls import Host
        from legroom.probe.shm_segments import Segments

        segments, inodes = Segments.of(Host()), set[int]()
        for pid in (os.getpid(), *map(int, _children())):
            if (found := segments.of_process(pid)) is not None:
                inodes |= found.inodes
        return {inode: segments.sizes.get(inode, 0) for inode in inodes}


def _anonymous() -> int:
    """Anonymous memory of this process: forked workers copy at most that."""
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
    except (OSError, StopIteration, ValueError):
        return 0


def _pool(problem: BaseException | None) -> str | None:
    """The memory pool that ran out, according to an error; None: the error has another reason."""
    while problem is not None:
        number = getattr(problem, "errno", None)
        if number in (errno.EMFILE, errno.ENFILE):
            return "fds"
        if isinstance(problem, MemoryError) or number == errno.ENOMEM:
            return "ram"
        if getattr(problem, "code", None) == "budget-too-small":
            return "ram"
        text = str(problem).lower()
        for pool, marks in (("fds", _FILES), ("shm", _SHM), ("ram", _RAM)):
            if any(mark in text for mark in marks):
                return pool
        if _NO_SPACE in text:
            return "shm" if _is_of_shm(problem) else None
        problem = problem.__cause__ or problem.__context__
    return None


def _is_of_shm(problem: BaseException) -> bool:
    """Whether an error of a full file system is one of /dev/shm, and not of a disk that the dataset writes to.

    It names the file, or none: for a semaphore, or where a program writes to a file that is open.
    """
    named = re.search(_NO_SPACE + r": '([^']*)'", str(problem), re.IGNORECASE)
    path = getattr(problem, "filename", None) or (named and named[1])
    if path is not None:
        path = os.fsdecode(path)
        return path.startswith("/dev/shm/") or (path.startswith("/") and path.count("/") == 1)  # shm_open: "/psm_1"
    # A worker's error has its traceback in its text.
    frames = re.findall(r'File "([^"]+)", line', str(problem)) or [_innermost(problem)]
    return not frames[-1] or "multiprocessing" in frames[-1] or frames[-1].startswith(_NOT_USERS)


def _lost(problem: BaseException) -> bool:
    """Whether a worker closed the connection by which it sends a batch: it crashed, or could not open a file."""
    return isinstance(problem, EOFError | ConnectionError) and "multiprocessing" in _innermost(problem)


def _innermost(problem: BaseException) -> str:
    """The file of the code that raised it."""
    frames = traceback.extract_tb(problem.__traceback__)
    return frames[-1].filename if frames else ""


def traceback_tail(problem: BaseException) -> list[str]:
    """The last lines of a traceback, without the frames of Legroom and of Python's import."""
    shown = traceback.TracebackException.from_exception(problem)
    one: traceback.TracebackException | None = shown
    while one is not None:
        users = [frame for frame in one.stack if not frame.filename.startswith(_NOT_USERS)]
        one.stack = traceback.StackSummary.from_list(users)
        one = one.__cause__ or one.__context__
    lines = (line.strip() for line in "".join(shown.format()).splitlines())
    return [line for line in lines if line.strip("^~ ") and line != _HEADING][-_TAIL:]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
