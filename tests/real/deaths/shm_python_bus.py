"""Python's SharedMemory, larger than /dev/shm: SIGBUS when it is written to."""

from multiprocessing.shared_memory import SharedMemory

print("epoch 1", flush=True)
segment = SharedMemory(create=True, size=256 << 20)
for at in range(0, 256 << 20, 1 << 20):
    segment.buf[at : at + (1 << 20)] = bytes(1 << 20)
