"""A GPU in RAM for the tests of shared batches: its memory is shared by real processes, and can be killed with them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from legroom.loader.dataloader.sharing.copy_batches_to_gpu import extent

sys.path.append(str(Path(__file__).parent))
from fake_gpu_memory import FakeMemory


class SharedFakeMemory(FakeMemory):
    """Every map may be written, as after set_access."""

    def map(self, handle: int, size: int, access: int) -> int:
        self._may("map")
        found = mmap.mmap(handle, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(found))
        self.maps[address] = found
        return address


class FakeGpu:
    """Copies in RAM; writes a line for each batch that comes from the host, and by which way."""

    def __init__(self, log: Path, *refuse: str, uuid: str = "gpu-0", before_upload: Callable[[], None] | None = None):
        self.name, self.api = "fake", SharedFakeMemory(*refuse, uuid=uuid)
        self._log, self._before_upload = log, before_upload
        self.free = 1 << 40
        self.marks: list[list[int]] = []

    def _note(self, what: str) -> None:
        fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, f"{what} {os.getpid()}\n".encode())
        os.close(fd)

    def why_no_ring(self) -> str | None:
        return self.api.why_no_shared_memory()

    def upload(self, source: Any, address: int) -> None:
        self._note("upload")
        if self._before_upload is not None:
            self._before_upload()
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def private(self, like: Any, address: int) -> Any:
        raw = torch.frombuffer(bytearray(ctypes.string_at(address, extent(like))), dtype=like.dtype)
        made = torch.empty_like(like)
        made.copy_(raw.as_strided(like.size(), like.stride()))
        self._note("ring")
        return made

    def mark(self) -> Any:
        return time.monotonic()

    def done(self, mark: Any) -> bool:
        return True

    def own(self, tensor: Any) -> Any:
        self._note("own")
        return tensor.clone()

    def wait(self) -> None:
        return

    def memory(self) -> tuple[int, int]:
        return self.free, 1 << 41
