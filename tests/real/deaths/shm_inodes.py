"""/dev/shm has free space but no free inode: "No space left on device" at a level of 0%."""

from multiprocessing.shared_memory import SharedMemory

kept = []
for step in range(1000):
    kept.append(SharedMemory(create=True, size=4096))
    print(f"step {step}", flush=True)
