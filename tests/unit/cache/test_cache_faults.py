"""Every system call of the cache failing with every errno: the right answer or an error with a code, nothing lost."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cache_faults import OPERATIONS, Faults, Sweep, cases
from doc_runner import Runner

import legroom
from legroom.cache import drop_and_gc, list_and_verify, locks
from legroom.cache.lease_and_map_entry import lock_name
from legroom.cache.store_directories import open_stores, store_lock
from legroom.errors import LegroomError, NotLoaded

MOST = {"open": 300, "freeze": 60, "refreeze": 30}  # of each operation; `make soak` takes more, by a seed of its own


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    logging.disable(logging.CRITICAL)
    with Sweep(tmp_path).alone() as made:
        yield made
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(600)  # a hundred operations and more
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_that_fails_gives_the_right_answer_or_a_code(sweep: Sweep, operation: str) -> None:
    chance = random.Random(operation)
    calls = sweep.calls(operation)
    outcomes = set()
    for faults in cases(calls, chance, MOST.get(operation, 100)):
        try:
            outcomes.add(sweep.attempt(operation, faults))
        except Exception as problem:
            case = (operation, faults.name, faults.at, errno.errorcode[faults.number], faults.lasting)
            raise AssertionError(case) from problem
    assert len(outcomes) > 1 or operation in ("disabled", "inplace"), outcomes  # some of them did fail


def test_the_injector_lets_calls_fail(sweep: Sweep) -> None:
    sweep.prepare("warm")
    faults = Faults("flock", 0, errno.EIO)
    assert sweep.attempt("warm", faults) == "entry-unreadable" and faults.hit


def test_a_store_that_cannot_be_looked_into_is_not_called_empty(sweep: Sweep) -> None:
    legroom.open(sweep.path).close()
    os.rename(sweep.store / "locks", sweep.folder / "kept")
    (sweep.store / "locks").symlink_to(sweep.folder / "kept")
    listing = list_and_verify.listing()
    assert not listing.entries and [one.severity for one in listing.findings] == ["warning"]
    for ask in (list_and_verify.info, drop_and_gc.drop):
        with pytest.raises(NotLoaded) as caught:
            ask(sweep.path)
        assert "symbolic link" in caught.value.why


def test_a_store_that_vanishes_while_it_is_listed_is_an_error_in_words(sweep: Sweep) -> None:
    legroom.open(sweep.path).close()
    with pytest.raises(LegroomError), open_stores():
        raise FileNotFoundError(errno.ENOENT, "No such file", "locks")


def test_asking_who_uses_an_entry_is_not_a_use(sweep: Sweep) -> None:
    """The moment in which a lock is taken to find out is not seen by other processes: those that would misread it wait."""
    with legroom.open(sweep.path) as data:
        key = data.info.key
    assert key is not None
    child = subprocess.Popen(
        [sys.executable, "-c",
         "import sys\nfrom legroom.cache.store_directories import Path, StoreCandidate, is_locked, open_store\n"
         f"store = open_store(StoreCandidate(Path({str(sweep.folder / 'shm')!r}), 'shm', True), make=False)\n"
         "print('ready', flush=True)\n"
         f"while True: is_locked(store, {lock_name(key)!r})\n"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        with open_stores() as places:
            store = places.found[0]
            for _ in range(2000):
                with store_lock(store):  # as whoever drops an entry does
                    lock = locks.acquire(store.locks, lock_name(key))
                    assert lock is not None
                    lock.release()
    finally:
        child.kill()
        child.communicate()


ODD = ("fifo", "link", "directory", "socket")
EACH = """
import sys, numpy, legroom
from legroom.cache import drop_and_gc, list_and_verify
from legroom.errors import LegroomError
what = {"open": lambda: legroom.open(sys.argv[2]), "list": list_and_verify.listing,
        "info": lambda: list_and_verify.info(sys.argv[2]), "verify": list_and_verify.verify,
        "drop": lambda: drop_and_gc.drop(sys.argv[2]), "gc": drop_and_gc.gc}
for name in sys.argv[1].split(","):
    try:
        result = what[name]()
        if name == "open":
            assert result["array"].sum() == numpy.load(sys.argv[2]).sum()
            result.close()
        print(name, "fine")
    except LegroomError as problem:
        print(name, problem.code)
"""


def _put(path: Path, odd: str) -> None:
    import socket

    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name("away"))
    else:
        path.unlink()
    if odd == "fifo":
        os.mkfifo(path)
    elif odd == "link":
        path.symlink_to("/etc/passwd")
    elif odd == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as made:
            os.chdir(path.parent)
            made.bind(path.name)


@pytest.fixture(scope="module")
def forks() -> Iterator[Runner]:
    """Runs scripts in forks of a process that has imported the cache."""
    process = Runner(
        "numpy",
        "legroom.cache.find_or_build_entry",
        "legroom.cache.elect_builder_and_publish",
        "legroom.cache.drop_and_gc",
    )
    yield process
    process.close()


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", ["locks/store.lock", "locks/KEY.lock", "locks/SRC", "sources/RECORD", "KEY",
                                   "KEY/manifest.json", "KEY/array.npy", "locks/building-0.lock",
                                   "work/building-0.lock", "work/building-0", "work/used"])  # fmt: skip
def test_something_else_where_a_file_belongs_is_an_error_or_built_anew(
    shm: Path, npy, old_files: None, place: str, odd: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    forks: Runner,
) -> None:  # fmt: skip
    path = npy()
    with legroom.open(path) as data:
        key = data.info.key
    (record,) = os.listdir(shm / "sources")
    name = place.replace("KEY", str(key)).replace("RECORD", record).replace("SRC", f"src-{record}.lock")
    target = shm / name
    if not target.exists():
        target.touch()
    monkeypatch.chdir(tmp_path)
    _put(target, odd)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "each.py").write_text(EACH)
    arguments = ("list,info,verify,open,gc,drop", str(path))
    status, output = forks.run(tmp_path / "each.py", tmp_path, dict(os.environ), *arguments)
    assert status == 0, output


def test_foreign_files_in_the_store_do_not_stop_gc(shm: Path, npy) -> None:
    legroom.open(npy()).close()
    (shm / "locks" / "stranger").mkdir()
    (shm / "sources" / "stranger").mkdir()
    os.mkfifo(shm / "fifo")
    drop_and_gc.gc()
    with legroom.open(npy("b.npy", np.arange(7))) as data:
        assert data["array"].tolist() == list(range(7))


def test_foreign_files_in_the_store_are_not_entries(shm: Path, npy) -> None:
    with legroom.open(npy()) as data:
        key = str(data.info.key)
    for folder in (shm, shm / "locks", shm / "sources", shm / "work", shm / key):
        for name in (".lock", ".nfs000000000000001", ".DS_Store", f".{key}", f"{key}.lock", "notes.txt"):
            (folder / name).touch()
        (folder / ".snapshot").mkdir()
    assert [entry.key for entry in list_and_verify.entries()] == [key]
    (result,) = list_and_verify.verify()
    assert result.whole and result.entry.key == key


@pytest.mark.parametrize("rebuilt", [False, True])
def test_an_entry_removed_while_it_is_listed_is_not_damaged(
    shm: Path, npy, rebuilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = npy()
    legroom.open(path).close()
    read = list_and_verify.read_manifest

    def removed_before(folder: int, key: str) -> object:
        monkeypatch.setattr(list_and_verify, "read_manifest", read)
        drop_and_gc.drop()
        if rebuilt:
            legroom.open(path).close()
        return read(folder, key)

    monkeypatch.setattr(list_and_verify, "read_manifest", removed_before)
    assert list_and_verify.entries() == ()


LIMITS = [("RLIMIT_FSIZE", 8192), ("RLIMIT_AS", 1 << 20), ("RLIMIT_AS", 40 << 20)]
LIMITED = """
import json, os, resource, sys
import h5py, numpy, pyarrow, pyarrow.parquet, legroom
from legroom.cache import elect_builder_and_publish, open_without_cache
from legroom.formats import hdf5_reader, npy_reader, parquet_reader
path, limits = sys.argv[1], json.loads(sys.argv[2])
for which, limit, disabled in limits:
    pid = os.fork()  # libraries are loaded once; nothing else has happened in this process
    if pid:
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print("ended", which, limit, repr(disabled), ended, flush=True)
        continue
    os.environ["LEGROOM_DISABLE"] = disabled
    if which == "RLIMIT_AS":  # what is taken already, and a little more
        limit += int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(getattr(resource, which), (limit, limit))
    try:
        data = legroom.open(path)
        print("fine", sorted(data))
    except legroom.LegroomError as problem:
        print(problem.code)
    break
"""


@pytest.mark.parametrize("kind", ["npy", "npz", "h5", "parquet"])
def test_limits_of_the_process_are_errors_in_words(shm: Path, tmp_path: Path, kind: str) -> None:
    """Each limit in a process of its own, with the cache and without."""
    import h5py
    import pyarrow
    import pyarrow.parquet

    path, array = tmp_path / f"a.{kind}", np.arange(2_000_000)
    if kind == "npy":
        np.save(path, array)
    elif kind == "npz":
        np.savez_compressed(path, a=array)
    elif kind == "h5":
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=array, chunks=(100_000,), compression="gzip", compression_opts=1)
    else:
        pyarrow.parquet.write_table(pyarrow.table({"a": array}), path)
    limits = [(which, at, disabled) for disabled in ("", "1") for which, at in LIMITS]
    ended = subprocess.run([sys.executable, "-c", LIMITED, str(path), json.dumps(limits)], capture_output=True,
                           text=True, timeout=200, check=False)  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = ended.stdout.splitlines()
    assert len(lines) == 2 * len(limits), (ended.stdout, ended.stderr[-2000:])
    for outcome, end in zip(lines[::2], lines[1::2], strict=True):
        assert end.startswith("ended") and end.endswith(" 0"), (ended.stdout, ended.stderr[-2000:])
        codes = ("fine", "no-room", "store-error", "entry-unreadable", "unreadable-source")
        assert outcome.split()[0] in codes, (outcome, end)


MAPPED = """
import json, mmap, os, sys
import h5py, numpy, legroom
from legroom.cache import elect_builder_and_publish, open_without_cache
from legroom.formats import hdf5_reader, npy_reader
for path, left, disabled in json.loads(sys.argv[1]):
    if os.fork():
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, (path, left, disabled)
        continue
    os.environ["LEGROOM_DISABLE"] = disabled
    held = []
    try:
        while True:
            held.append(mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE, len(held) % 2))  # no two become one
    except OSError:
        pass
    del held[len(held) - left:]
    try:
        legroom.open(path)
        said = ["fine", ""]
    except legroom.LegroomError as problem:
        del held[:]
        said = [problem.code, " ".join(problem.fix)]
    print(json.dumps(said), flush=True)
    os._exit(0)
"""


many_maps = pytest.mark.skipif(
    sys.platform != "linux" or int(Path("/proc/sys/vm/max_map_count").read_text()) > 200_000,
    reason="it takes too long to reach this machine's vm.max_map_count",
)


@many_maps
@pytest.mark.timeout(600)
def test_the_limit_of_memory_maps_is_an_error_in_words(shm: Path, tmp_path: Path) -> None:
    """An entry that is there and one that is not; with no map left to take, and with a few."""
    import h5py

    array = np.arange(100_000)
    for name in ("new", "there"):
        np.save(tmp_path / f"{name}.npy", array if name == "new" else array + 1)
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=array, chunks=(1000,), compression="gzip", shuffle=name == "new")
    keys = []
    for path in (tmp_path / "there.npy", tmp_path / "there.h5"):
        with legroom.open(path) as data:
            keys.append(data.info.key)
    names = ("new.npy", "new.h5", "there.npy", "there.h5")
    tried = [(str(tmp_path / name), left, "") for name in names for left in (0, 8)]
    tried += [(str(tmp_path / "new.h5"), 0, "1")]
    ended = subprocess.run([sys.executable, "-c", MAPPED, json.dumps(tried)], capture_output=True, text=True,
                           timeout=500, check=False)  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    outcomes = [json.loads(line) for line in ended.stdout.splitlines()]
    for (path, left, _), (code, fix) in zip(tried, outcomes, strict=True):
        assert code in ("fine", "no-room", "store-error", "entry-unreadable", "unreadable-source"), (path, left, code)
        assert code == "fine" or left or "max_map_count" in fix, (path, fix)
    assert all((shm / key / "manifest.json").exists() for key in keys)  # no proof of damage


EXHAUSTED = """
import mmap, sys
import numpy, legroom
from legroom.cache import find_or_build_entry

held, eaten = [], [None] * 1_000_000

def attached(*_):
    # Every map that the kernel allows, and then every byte of the heap, which does not grow any more.
    try:
        while True:
            held.append(mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE, len(held) % 2))  # no two become one
    except OSError:
        pass
    count = 0
    for size in (4000, 400, 40, 1):
        try:
            while True:
                eaten[count] = bytes(size)
                count += 1
        except MemoryError:
            pass
    raise MemoryError

find_or_build_entry._attached = attached
try:
    legroom.open(sys.argv[1])
except legroom.LegroomError as problem:
    held.clear(), eaten.clear()
    print(problem.code, *problem.fix)
"""


@many_maps
@pytest.mark.timeout(600)
def test_a_process_without_any_memory_left_gets_the_error_in_words(shm: Path, npy) -> None:
    command = [sys.executable, "-c", EXHAUSTED, str(npy())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.stdout.startswith("no-room") and "max_map_count" in ended.stdout, ended
