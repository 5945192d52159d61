"""GPU memory made of memfds, with the interface of the driver: it can be shared between real processes and killed."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

from legroom.cache import list_gpu_copies
from legroom.gpu.cuda_driver_api import READ, CudaRefused
from legroom.loader import shared_gpu_memory
from legroom.loader.shared_gpu_memory import share

GRAIN = 1 << 16


class FakeMemory:
    """Stands in for DriverApi; ``refuse`` names the calls that fail."""

    def __init__(self, *refuse: str, uuid: str = "gpu-0") -> None:
        self.refuse = set(refuse)
        self.maps: dict[int, mmap.mmap] = {}
        self.handles: set[int] = set()
        self._uuid = uuid

    def _may(self, call: str) -> None:
        if call in self.refuse:
            raise CudaRefused(f"{call}: refused")

    def enter(self) -> None:
        return

    def uuid(self) -> str:
        return self._uuid

    def why_no_shared_memory(self) -> str | None:
        return "the driver cannot export" if "share" in self.refuse else None

    def granularity(self) -> int:
        return GRAIN

    def create(self, size: int) -> int:
        self._may("create")
        handle = os.memfd_create("fake-gpu-memory")
        os.ftruncate(handle, size)
        self.handles.add(handle)
        return handle

    def export(self, handle: int) -> int:
        self._may("export")
        return os.dup(handle)

    def adopt(self, fd: int) -> int:
        self._may("adopt")
        handle = os.dup(fd)
        self.handles.add(handle)
        return handle

    def map(self, handle: int, size: int, access: int) -> int:
        self._may("map")
        if access == READ:
            self._may("map read-only")
        # Private where reading only: ctypes needs a writable buffer to tell the address.
        flags = mmap.MAP_PRIVATE if access == READ else mmap.MAP_SHARED
        found = mmap.mmap(handle, size, flags=flags)
        address = ctypes.addressof(ctypes.c_char.from_buffer(found))
        self.maps[address] = found
        return address

    def set_access(self, address: int, size: int, access: int) -> None:
        self._may("set_access")

    def unmap(self, address: int, size: int) -> None:
        del self.maps[address]

    def release(self, handle: int) -> None:
        self.handles.remove(handle)
        os.close(handle)


def content(name: str, nbytes: int) -> bytes:
    """What the copy of that name holds."""
    return (hashlib.sha256(name.encode()).digest() * (nbytes // 32 + 1))[:nbytes]


def take_all(store: Path, names: list[str], nbytes: int, slow: float, out: TextIO) -> None:
    """Take the copies and check every byte; one line for each."""
    api = FakeMemory()
    for name in names:

        def fill(address: int, name: str = name) -> None:
            data = content(name, nbytes)
            half = nbytes // 2
            ctypes.memmove(address, data[:half], half)
            time.sleep(slow)
            ctypes.memmove(address + half, data[half:], nbytes - half)

        copy = share(api, store, name, nbytes, fill, check_room=lambda: None)
        right = ctypes.string_at(copy.address, nbytes) == content(name, nbytes)
        out.write(f"{'made' if copy.made_here else 'got'} {name} {'right' if right else 'WRONG'}\n")
        out.flush()


def storm(store: Path, names: list[str], nbytes: int, slow: float, kills: int) -> None:
    """Processes that take the copies, killed at random times: about half while they make or get one.

    On a busy machine few come so far before they are killed: it continues until a third of the kills have answered.
    """
    dice = random.Random(kills)
    alive: list[int] = []
    answers = store / "answers"
    answers.touch()
    killed, until = 0, time.monotonic() + 180
    while killed < kills or (answers.read_text().count("\n") <= kills // 3 and time.monotonic() < until):
        killed += 1
        child = os.fork()
        if child == 0:
            try:
                with answers.open("a") as out:
                    take_all(store, names, nbytes, slow, out)
                time.sleep(60)
            finally:
                os._exit(0)
        alive.append(child)
        time.sleep(dice.choice([0.001, 0.01, 0.03, 0.06]))
        if len(alive) > 3:
            victim = alive.pop(dice.randrange(len(alive)))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
    for child in alive:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    sys.stdout.write(answers.read_text())


def main() -> None:
    """A process that takes copies and lives until it is killed or its input ends; or a storm of them."""
    list_gpu_copies.PATIENCE_S, shared_gpu_memory._LOCK_S = 60.0, 120.0  # a busy machine is not a stopped process
    store, names, nbytes, slow = (Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), float(sys.argv[4]))
    if len(sys.argv) > 5:
        storm(store, names, nbytes, slow, int(sys.argv[5]))
        return
    take_all(store, names, nbytes, slow, sys.stdout)
    sys.stdin.read()


if __name__ == "__main__":
    main()
