"""Is OOM-killed after a second."""

import time

time.sleep(1.0)
kept = []
while True:
    kept.append(bytearray(8 << 20))
