"""Errors of a DataLoader's constructor and of the start of its workers, each with a reason and what to do.

Arguments that torch rejects, a dataset or function that cannot be pickled, a TMPDIR whose path is too long for the
workers' sockets, and a /dev/shm without a page for the semaphores of their queues.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import get_all_start_methods
from multiprocessing.reduction import ForkingPickler
from operator import index
from typing import Any

from legroom.advice.fix_commands import check_room, use_less_shm
from legroom.errors import BadArgument, BadArgumentType, LoaderError, NoLength, Unpicklable
from legroom.formats.base_reader import names_shown
from legroom.loader.dataloader.collate import SlotCollate
from legroom.messages import listed, phrase, say, step_indent, step_label
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import SOCKET_TAIL, longest_socket
from legroom.probe.shm import shm_space
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.units import size_or_unknown

_log = logging.getLogger("legroom")
_SOCKET_NAME = len("/listener-12345678")
_SHORT_FOLDERS = ("/tmp", "/var/tmp")
_NAMES_SHOWN = 3
_VALUE_SHOWN = 100  # characters
_SEMAPHORES = 1 << 20  # bytes: more than those of all workers of a loader need
_Explanation = tuple[str, tuple[str, ...]]


def refuse_types(given: Mapping[str, Any]) -> None:
    """Refuse arguments of a type with which torch fails later, in a comparison, or in the first epoch.

    BadArgumentType is a TypeError, as torch's error is.
    """
    for name, (accepts, wanted) in _TYPES.items():
        value = given.get(name)
        if (value is None and name not in _REQUIRED) or (name == "prefetch_factor" and given["num_workers"] == 0):
            continue
        if not accepts(value):
            shown = repr(value)
            raise BadArgumentType(
                say("{name} must be {wanted} (got {value})", name=name, wanted=say(wanted),
                    value=shown if len(shown) <= _VALUE_SHOWN else shown[:_VALUE_SHOWN] + "…"),
                why=say("a value of type {kind} cannot be used for it", kind=type(value).__name__),
                fix=(say("pass {wanted}", wanted=say(wanted)),),
            )  # fmt: skip
    if given.get("prefetch_factor") == 0 and given["num_workers"]:
        raise BadArgument(
            say("prefetch_factor must be an integer ≥ 1 (got {value!r})", value=given["prefetch_factor"]),
            why=say("a worker that prefetches no batch is never asked for one"),
            fix=(say("pass prefetch_factor of 1 or more"), say("or omit {name}", name="prefetch_factor")),
        )


def refuse_no_length(dataset: Any) -> None:
    """Refuse a dataset without ``len()`` whose samples torch's own samplers would number; a TypeError, as torch's."""
    from torch.utils.data import IterableDataset

    if hasattr(type(dataset), "__len__") or isinstance(dataset, IterableDataset):
        return
    raise NoLength(
        say("the dataset has no len(): {kind} does not define __len__", kind=type(dataset).__name__),
        why=say("without a sampler, samples are numbered from 0 to len(dataset) - 1"),
        fix=(
            say("define __len__ in the dataset"),
            say("or subclass torch.utils.data.IterableDataset, if the dataset can only be iterated"),
            say("or pass a sampler: sampler=range(1000)"),
        ),
    )


def refuse_no_length_of(loader: Any) -> None:
    """The same for a loader, if it uses one of torch's samplers of its dataset."""
    from torch.utils.data import RandomSampler, SequentialSampler

    batches, sampler = loader.batch_sampler, loader.sampler
    used = batches is None or getattr(batches, "sampler", None) is sampler
    if used and type(sampler) in (RandomSampler, SequentialSampler) and sampler.data_source is loader.dataset:
        refuse_no_length(loader.dataset)


def _is_integer(value: Any) -> bool:
    try:
        return index(value) is not None  # True too, as for torch
    except TypeError:
        return False


def _is_iterable(value: Any) -> bool:
    return hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")


def _is_generator(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Generator)


_REQUIRED = ("num_workers", "timeout")  # None is not their default
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_workers": (_is_integer, phrase("an integer ≥ 0")),
    "prefetch_factor": (_is_integer, phrase("an integer ≥ 1")),
    "timeout": (lambda value: isinstance(value, (int, float)) or hasattr(type(value), "__float__"),
                phrase("a number of seconds ≥ 0")),
    "sampler": (_is_iterable, phrase("an iterable of indices")),
    "batch_sampler": (_is_iterable, phrase("an iterable of lists of indices")),
    "collate_fn": (callable, phrase("a function")),
    "worker_init_fn": (callable, phrase("a function")),
    "generator": (_is_generator, phrase("a torch.Generator")),
}  # fmt: skip


def explain_argument(problem: ValueError | TypeError, given: Mapping[str, Any]) -> BadArgument | BadArgumentType | None:
    """torch's error as BadArgument, a ValueError, or BadArgumentType, a TypeError; None if there is nothing to add.

    torch's own sentence stays the first, because people search for it.
    """
    text = str(problem)
    for words, explain in _KNOWN.items():
        if words in text:
            why, fix = explain(given)
            kind = BadArgumentType if isinstance(problem, TypeError) else BadArgument
            return kind(text, why=why, fix=fix)
    return None


def _row(name: str, why: str, *fix: str) -> Callable[[Mapping[str, Any]], _Explanation]:
    """An explanation of that argument from templates."""

    def explain(given: Mapping[str, Any]) -> _Explanation:
        value = given.get(name)
        known = {"name": name, "value": value, "size": value, "count": value, "kind": type(value).__name__}
        return say(why, **known), tuple(say(one, **known) for one in fix)

    return explain


def _needs_workers(name: str) -> Callable[[Mapping[str, Any]], _Explanation]:
    return _row(
        name, phrase("{name}={value!r} with num_workers=0"), phrase("pass num_workers of 1 or more"),
        phrase("or omit {name}"),
    )  # fmt: skip


def _context(given: Mapping[str, Any]) -> _Explanation:
    methods, shown = get_all_start_methods(), repr(given["multiprocessing_context"])
    return say("start methods of this system: {names} (got {value})", names=listed(methods), value=shown), (
        f"multiprocessing_context={methods[0]!r}",
        say("or omit {name}", name="multiprocessing_context"),
    )


def _drop_last(given: Mapping[str, Any]) -> _Explanation:
    value = given["drop_last"]
    return say("a value of type {kind} cannot be used for it", kind=type(value).__name__), (f"drop_last={bool(value)}",)


def _batch_sampler(given: Mapping[str, Any]) -> _Explanation:
    beside = [name for name in ("shuffle", "sampler", "drop_last") if given[name]]
    beside = [*(["batch_size"] if given["batch_size"] != 1 else []), *beside]
    return say("the batch_sampler makes the batches; also given: {names}", names=listed(beside)), (
        say("omit {name}", name=listed(beside)),
        say("or omit {name}", name="batch_sampler"),
    )


def _stream_order(name: str) -> Callable[[Mapping[str, Any]], _Explanation]:
    def explain(given: Mapping[str, Any]) -> _Explanation:
        kind = type(given["dataset"]).__name__
        return say("{kind} is an IterableDataset, which determines the order of its samples itself", kind=kind), (
            say("omit {name}", name=name),
        )

    return explain


_KNOWN = {  # words of torch's sentence
    "batch_size should be a positive integer value": _row(
        "batch_size", phrase("batch_size must be an integer ≥ 1 or None (got {size!r})"),
        phrase("pass a batch_size of 1 or more"), phrase("or batch_size=None, to get single samples without batches"),
    ),
    "num_workers option should be non-negative": _row(
        "num_workers", phrase("num_workers must be an integer ≥ 0 (got {count})"),
        phrase("num_workers=0 makes batches in this process"),
    ),
    "prefetch_factor option could only be specified in multiprocessing": _needs_workers("prefetch_factor"),
    "persistent_workers option needs num_workers > 0": _needs_workers("persistent_workers"),
    "timeout option should be non-negative": _row(
        "timeout", phrase("timeout must be a number of seconds ≥ 0 (got {value})"),
        phrase("timeout=0 waits for a batch without a limit"),
    ),
    "prefetch_factor option should be non-negative": _row(
        "prefetch_factor", phrase("prefetch_factor must be an integer ≥ 1 (got {value!r})"),
        phrase("pass prefetch_factor of 1 or more"), phrase("or omit {name}"),
    ),
    "multiprocessing_context option should specify a valid start method": _context,
    "multiprocessing_context option should be a valid context": _context,
    "multiprocessing_context can only be used with": _needs_workers("multiprocessing_context"),
    "drop_last should be a boolean value": _drop_last,
    "batch_sampler option is mutually exclusive": _batch_sampler,
    "disables auto-batching": _row(
        "drop_last", phrase("without batches there is no last one that is smaller"), phrase("omit {name}"),
        phrase("or pass a batch_size of 1 or more"),
    ),
    "expected unspecified shuffle option": _stream_order("shuffle"),
    "expected unspecified sampler option": _stream_order("sampler"),
    "expected unspecified batch_sampler option": _stream_order("batch_sampler"),
    # Last: the sentence about batch_sampler contains "sampler option is mutually exclusive" too.
    "sampler option is mutually exclusive with shuffle": _row(
        "sampler", phrase("both determine the order, and the sampler is a {kind}"), phrase("omit shuffle"),
        phrase("or omit the sampler"),
    ),
}  # fmt: skip


def refuse_data(dataset: Any) -> None:
    """Raise if the dataset is what legroom.open returns: a mapping of names to arrays, of which torch asks item 0.

    It is not replaced by ``data.dataset()``: which arrays make a sample, and in which order, is the caller's choice.
    """
    if not isinstance(dataset, Mapping):
        return
    with import_lock:
        from legroom.cache.cached_arrays_and_tables import CachedData

    if not isinstance(dataset, CachedData):
        return
    names = [*dataset][:_NAMES_SHOWN]
    raise BadArgument(
        say("legroom.open() returns a mapping of names to arrays, which is not a torch Dataset"),
        why=say("it holds {shown}", shown=names_shown([*dataset])),
        fix=(
            say("make a Dataset of the arrays that you need: {code}",
                code=f"legroom.DataLoader(data.dataset({', '.join(map(repr, names))}), …)"),
            say("or iterate over batches without workers: data.batches(32)"),
        ),
    )  # fmt: skip


def explain_pickling(dataset: Any, collate_fn: Any, worker_init_fn: Any) -> Unpicklable | None:
    """The error for the first of these that cannot be pickled; None if all can."""
    function = collate_fn.fn if isinstance(collate_fn, SlotCollate) else collate_fn
    parts = {"dataset": dataset, "collate_fn": function, "worker_init_fn": worker_init_fn}
    for name, part in parts.items():
        try:
            ForkingPickler.dumps(part)
        except Exception as problem:
            return Unpicklable(
                say("the {name} cannot be sent to worker processes", name=name),
                why=say(
                    "{kind} must be pickled for every worker, which fails: {problem}", kind=type(part), problem=problem
                ),
                fix=(
                    say("define it at the top level of a module: no lambda, no function inside a function"),
                    say("open files and connections in worker_init_fn or at first use, not in __init__"),
                    say("multiprocessing_context='fork' pickles nothing"),
                ),
            )
    return None


def use_short_tmpdir(*, required: bool) -> None:
    """Let multiprocessing put its sockets in /tmp if the path of the temporary directory is too long for them.

    Newer Python versions do so themselves. Workers that are started by forkserver need sockets, and so does torch's
    transport. LoaderError if no directory is short enough and sockets are ``required``.
    """
    given = tempfile.gettempdir()
    if sys.platform == "win32" or _short_enough(given):
        return
    from multiprocessing.util import get_temp_dir

    short = next((path for path in _SHORT_FOLDERS if _short_enough(path) and os.access(path, os.W_OK | os.X_OK)), given)
    before = tempfile.tempdir
    tempfile.tempdir = short
    try:
        # The folder is made once, for the first socket; workers get it from this process with any start method.
        folder = get_temp_dir()
    finally:
        tempfile.tempdir = before
    longest = longest_socket(sys.platform)
    length = len(os.fsencode(folder)) + _SOCKET_NAME
    if length <= longest:
        _log.info(say("{path} is too long for sockets: the workers' sockets are in {short}", path=given, short=short))
    elif required:
        raise LoaderError(
            say("the path of the temporary directory is too long for the workers' sockets"),
            why=say(
                "a socket in {path} has a path of {length} bytes, the limit is {longest}",
                path=folder, length=length, longest=longest,
            ),
            fix=(
                say("set a short writable path before Python starts, for example:\nexport TMPDIR=/tmp"),
            ),
        )  # fmt: skip


def _short_enough(folder: str) -> bool:
    return len(os.fsencode(folder)) + SOCKET_TAIL <= longest_socket(sys.platform)


def explain_full_shm(problem: BaseException | None) -> _Explanation | None:
    """The reason and what to do if semaphores found no space in /dev/shm; None if that is not what happened.

    The error of Python's names neither /dev/shm nor a file.
    """
    while problem is not None:
        if isinstance(problem, OSError) and problem.errno == errno.ENOSPC and problem.filename is None:
            break
        problem = problem.__cause__ or problem.__context__
    space = shm_space(Host(), "/dev/shm")
    if problem is None or space.free is None or space.free >= _SEMAPHORES:
        return None
    why = say("/dev/shm has {free} of {size} free, and the queues of workers need semaphores there, one page each",
              free=size_or_unknown(space.free), size=size_or_unknown(space.size))  # fmt: skip
    return why, (use_less_shm()[0], check_room("/dev/shm"))


def note_full_shm(problem: BaseException) -> None:
    """Add that to the error, which stays as it is: programs catch OSError."""
    if (found := explain_full_shm(problem)) is not None:
        steps = (step_label(step) + step.replace("\n", "\n" + step_indent()) for step in found[1])
        problem.add_note("\n".join((f"legroom: {found[0]}", *steps)))
