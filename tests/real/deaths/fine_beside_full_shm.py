"""A job that waits for a long time while /dev/shm is full of another process's files, and finishes."""

import time

print("waiting for the queue", flush=True)
time.sleep(10)
print("finished")
