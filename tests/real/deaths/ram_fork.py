"""fork fails with ENOMEM: the kernel does not overcommit a second copy of the parent's memory."""

import mmap
import os

total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
with open("/proc/meminfo") as file:
    total += next(int(line.split()[1]) * 1024 for line in file if line.startswith("SwapTotal"))
piece = (total * 3 // 4) & ~((2 << 20) - 1)
# Two that each could be promised; side by side the kernel makes one of them.
maps = [mmap.mmap(-1, piece, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
print("starting workers", flush=True)
os.fork()
