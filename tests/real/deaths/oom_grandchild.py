"""A grandchild process exceeds the cgroup's limit, and its parents report it in their own words."""

import subprocess
import sys

GROW = "held = []\nwhile True: held.append(bytearray(8 << 20))"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {GROW!r}], check=True)"
print("epoch 1", flush=True)
subprocess.run([sys.executable, "-c", CHILD], check=True)
