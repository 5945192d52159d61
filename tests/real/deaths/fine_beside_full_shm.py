"""A job that waits for a long time beside a /dev/shm that another process filled, and finishes."""

import time

print("waiting for the queue", flush=True)
time.sleep(10)
print("finished")
