"""A file in /dev/shm is enlarged beyond the free space, mapped and written to: SIGBUS."""

import mmap
import os
import tempfile

print("epoch 1", flush=True)
with tempfile.TemporaryFile(dir="/dev/shm") as file:
    os.ftruncate(file.fileno(), 256 << 20)
    area = mmap.mmap(file.fileno(), 256 << 20)
    for at in range(0, len(area), 1 << 20):
        area[at : at + (1 << 20)] = bytes(1 << 20)
