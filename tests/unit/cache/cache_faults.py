"""System calls that fail on purpose, in this process: the n-th call of a function, or every one from there on."""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import mmap
import os
import pickle
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import legroom
from legroom.cache import drop_and_gc, list_and_verify, mapped_files_and_checksums, source_digest_records
from legroom.cache import store_directories as store_module
from legroom.cache.manifest import is_key
from legroom.errors import LegroomError
from legroom.system.processes_and_threads import MAP_FAILED
from open_descriptors import open_descriptors, opened_since

ERRNOS = ("EMFILE", "ENFILE", "ENOMEM", "EACCES", "EPERM", "EIO", "ENOSPC", "EROFS", "EINTR", "EFBIG", "EDQUOT", "ELOOP")  # fmt: skip
CALLS = (
    "open", "mkdir", "rename", "unlink", "rmdir", "stat", "fstat", "lstat", "listdir", "scandir", "read", "pread", "preadv",
    "pwrite", "pwritev", "write", "ftruncate", "posix_fallocate", "fsync", "utime", "fchmod", "statvfs", "readlink",
)  # fmt: skip
FROZEN = {"a": [(1, "x")] * 2000, "b": [{"c": 1.5}], 3: None}
ARRAY = np.arange(3000, dtype=np.int32).reshape(300, 10)


@dataclass(slots=True)
class Faults:
    """Which call fails, and what was called."""

    name: str = ""
    at: int = -1
    number: int = 0
    lasting: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    hit: bool = False
    _lock: Any = field(default_factory=threading.Lock)

    def failing(self, name: str) -> bool:
        with self._lock:
            index = self.calls.get(name, 0)
            self.calls[name] = index + 1
            if name != self.name or not (index >= self.at if self.lasting else index == self.at):
                return False
            self.hit = True
            return True

    def around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if self.failing(name):
                raise OSError(self.number, os.strerror(self.number), arguments[0] if arguments else None)
            return real(*arguments, **more)

        return call


class _Libc:
    """The C library with maps that can be refused."""

    def __init__(self, real: Any, faults: Faults) -> None:
        self._real, self._faults = real, faults

    def mmap(self, *arguments: Any) -> Any:
        if self._faults.failing("mmap"):
            ctypes.set_errno(self._faults.number)
            return MAP_FAILED
        return self._real.mmap(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextmanager
def failing(faults: Faults) -> Iterator[None]:
    """Have them within the block."""
    import fcntl

    places: list[tuple[Any, str, str]] = [(os, name, name) for name in CALLS if hasattr(os, name)]
    places += [(fcntl, "flock", "flock"), (builtins, "open", "file"), (io, "open", "file"), (mmap, "mmap", "mmap.mmap")]  # fmt: skip
    kept = [(module, attribute, getattr(module, attribute)) for module, attribute, _ in places]
    libc = mapped_files_and_checksums.libc
    for module, attribute, name in places:
        setattr(module, attribute, faults.around(name, getattr(module, attribute)))
    real = libc()
    mapped_files_and_checksums.libc = lambda: _Libc(real, faults)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, attribute, function in kept:
            setattr(module, attribute, function)
        mapped_files_and_checksums.libc = libc


class Wrong(AssertionError):
    """Something that no failing call may lead to."""


class Sweep:
    """Stores of its own, in which operations are tried under faults."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "a.npz"
        np.savez(self.path, array=ARRAY, other=np.arange(5))
        np.save(folder / "plain.npy", ARRAY)
        self.reset()

    def reset(self) -> None:
        """Empty stores."""
        for name in ("shm", "disk"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir(mode=0o700)

    @contextmanager
    def alone(self) -> Iterator[Sweep]:
        """Only these stores, no other of this user's; stamps are believed at once, as of files that were quiet."""
        mine = [
            store_module.StoreCandidate(self.folder / "shm", "shm", True),
            store_module.StoreCandidate(self.folder / "disk", "disk", True),
        ]
        before = store_module.candidates, source_digest_records.QUIET_NS
        store_module.candidates, source_digest_records.QUIET_NS = lambda env: iter(mine), 0  # type: ignore[assignment]
        try:
            yield self
        finally:
            store_module.candidates, source_digest_records.QUIET_NS = before  # type: ignore[assignment]

    @property
    def store(self) -> Path:
        return self.folder / "shm" / f"legroom-{os.geteuid()}"

    def inodes(self) -> dict[str, int]:
        """The data files of entries that are there."""
        found = {}
        for folder in self.store.iterdir() if self.store.exists() else ():
            if is_key(folder.name) and (folder / "array.npy").exists():
                found[folder.name] = (folder / "array.npy").stat().st_ino
        return found

    def prepare(self, operation: str) -> None:
        """The state in which an operation begins."""
        if operation in ("open", "freeze", "disabled", "inplace"):
            self.reset()
        elif operation == "list" or not self.inodes():  # a frozen object would be listed too
            self.reset()  # an entry that a fault before sent to the disk would be attached to there
            legroom.open(self.path).close()
        if operation == "refreeze":
            legroom.freeze(FROZEN)
        if operation == "gc":
            for folder in ("work/", "."):
                for name in ("building-0000000000000000", "trash-0000000000000000"):
                    Path(f"{self.store}/{folder}{name}").mkdir(exist_ok=True)

    def run(self, operation: str, loop: bool = False) -> None:
        """One operation; Wrong where its answer is. With ``loop`` a name said to be a link (ELOOP) counts as damage."""
        if operation in ("open", "warm", "batches"):
            with legroom.open(self.path) as data:
                _same(data["array"])
                if operation == "batches":
                    rows = [batch["array"] for batch in data.batches(64, format="numpy", keys="array")]
                    _same(np.concatenate(rows))
        elif operation in ("freeze", "refreeze"):
            view = legroom.freeze(FROZEN)
            if view != FROZEN or pickle.loads(pickle.dumps(view))["a"] != FROZEN["a"]:
                raise Wrong("wrong data")
        elif operation == "disabled":
            os.environ["LEGROOM_DISABLE"] = "1"
            try:
                _same(legroom.open(self.path)["array"])
            finally:
                del os.environ["LEGROOM_DISABLE"]
        elif operation == "inplace":
            with legroom.open(self.folder / "plain.npy", backing="inplace") as data:
                _same(data["array"])
        elif operation == "list":
            listing = list_and_verify.listing()
            found, findings = listing.entries, listing.findings
            if (not loop and any(entry.damaged for entry in found)) or (
                len(found) != 1 and not any(one.severity == "warning" for one in findings)
            ):
                raise Wrong(found, findings)
        elif operation == "info":
            list_and_verify.info(self.path)
        elif operation == "verify":
            results = list_and_verify.verify()
            if not loop and not all(not one.damaged and one.source in ("same", "not-checked") for one in results):
                raise Wrong(results)
        elif operation == "drop":
            drop_and_gc.drop(self.path)
        elif operation == "gc":
            drop_and_gc.gc()
        else:
            raise ValueError(operation)

    def calls(self, operation: str) -> dict[str, int]:
        """How often it calls what."""
        self.prepare(operation)
        self.run(operation)
        self.prepare(operation)
        faults = Faults()
        with failing(faults):
            self.run(operation)
        return {name: count for name, count in faults.calls.items() if count}

    def attempt(self, operation: str, faults: Faults) -> str:
        """The operation under a fault; the outcome, or Wrong."""
        self.prepare(operation)
        before, open_before = self.inodes(), open_descriptors()
        try:
            with failing(faults):
                self.run(operation, loop=faults.number == errno.ELOOP)
            outcome = "fine"
        except LegroomError as problem:
            str(problem)
            outcome = problem.code
        if left := opened_since(open_before):
            raise Wrong(f"descriptors were left open: {sorted(left)}")
        after = self.inodes()
        if (
            operation not in ("drop", "open", "freeze", "disabled", "inplace")
            and faults.number != errno.ELOOP
            and before != after
        ):
            raise Wrong(f"an entry that was whole is gone: {before} {after}")
        with legroom.open(self.path) as data:  # whatever happened, it works again
            _same(data["array"])
        return outcome


def _same(array: Any) -> None:
    if not np.array_equal(array, ARRAY):
        raise Wrong("wrong data")


OPERATIONS = (
    "freeze",
    "refreeze",
    "open",
    "warm",
    "batches",
    "list",
    "info",
    "verify",
    "drop",
    "gc",
    "disabled",
    "inplace",
)


def cases(calls: dict[str, int], chance: random.Random, most: int) -> list[Faults]:
    """At most so many faults, spread over calls, errnos and both ways to fail."""
    every = [
        Faults(name, at, getattr(errno, code), lasting)
        for name, count in sorted(calls.items())
        for at in range(min(count, 60))
        for code in ERRNOS
        for lasting in (False, True)
    ]
    return every if len(every) <= most else chance.sample(every, most)
