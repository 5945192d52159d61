"""Calls of the C library that Python does not offer, through ctypes. They run without the interpreter's lock."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Any

MAP_FAILED = ctypes.c_void_p(-1).value


@cache
def libc() -> Any:
    """The C library, with the argument types of the calls that take addresses or sizes."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long)
    if sys.platform == "linux":
        library.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def last_error() -> OSError:
    """The error of this thread's last failed call."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def malloc_trim() -> None:
    """Return freed memory to the system. The allocator keeps it otherwise, and it counts as used."""
    trim = (
        getattr(libc(), "malloc_trim", None) if sys.platform == "linux" else None
    )  # glibc has it, musl has not
    if trim is not None:
        trim(0)
