"""Fills /dev/shm and stays."""

import time

with open("/dev/shm/neighbour", "wb") as file:
    try:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    except OSError:
        pass
    time.sleep(100)
