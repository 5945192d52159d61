"""Returns to the kernel what earlier tests have freed and an allocator still keeps.

Every later fork would copy the page tables of it, and a test that measures this process would see it go.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path


def return_freed_memory() -> None:
    """Collect garbage, then empty the allocators of the C library and, where it is imported, of Arrow."""
    gc.collect()
    if arrow := sys.modules.get("pyarrow"):
        arrow.default_memory_pool().release_unused()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def anonymous_bytes() -> int:
    """How much memory of this process is not that of a file; 0 where it cannot be read."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:")), 0)
