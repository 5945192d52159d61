"""A working set larger than the cgroup's limit, in swap, until a watchdog times out."""

import ctypes
import os
import threading
import time

SIZE = 160 << 20
PATIENCE = 6.0


def watchdog():
    time.sleep(PATIENCE)
    os.write(2, b"watchdog: no progress for 6 s, giving up\n")
    os.abort()


threading.Thread(target=watchdog, daemon=True).start()
memory = (ctypes.c_char * SIZE)()
value = 0
while True:
    value = (value + 1) % 100
    ctypes.memset(memory, value, SIZE)
