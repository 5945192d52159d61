"""A full /dev/shm is handled and freed; a bug ends the run later."""

import os
import time
import traceback

try:
    with open("/dev/shm/cache", "wb") as file:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
except OSError:
    traceback.print_exc()
    os.unlink("/dev/shm/cache")
for step in range(40):
    print(f"step {step} loss {1 / (step + 1):.3f}", flush=True)
    time.sleep(0.05)
print({}["label"])
