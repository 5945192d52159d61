"""A bug, beside a /dev/shm that another process filled."""

import time

time.sleep(2)
print({}["label"])
