"""Takes 100 MB and keeps it."""

import time

kept = bytearray(b"x") * (100 << 20)
time.sleep(100)
