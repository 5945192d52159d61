"""A file on disk is truncated while it is mapped: a bus error unrelated to /dev/shm."""

import mmap
import os
import tempfile

print("epoch 1", flush=True)
with tempfile.TemporaryFile(dir=".") as file:
    os.ftruncate(file.fileno(), 1 << 20)
    area = mmap.mmap(file.fileno(), 1 << 20)
    os.ftruncate(file.fileno(), 0)
    print(area[5000])
