"""A child process is OOM-killed and restarted with lower settings; the run continues, and a bug ends it later."""

import subprocess
import sys
import time

subprocess.run([sys.executable, "-c", "kept = []\nwhile True: kept.append(bytearray(8 << 20))"])
subprocess.run([sys.executable, "-c", "print('evaluated in smaller parts')"], check=True)
for step in range(40):
    print(f"step {step} loss {1 / (step + 1):.3f}", flush=True)
    time.sleep(0.05)
print({}["label"])
