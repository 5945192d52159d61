"""A bug, while /dev/shm is full of another process's files."""

import time

time.sleep(2)
print({}["label"])
