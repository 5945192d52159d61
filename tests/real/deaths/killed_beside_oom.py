"""SIGKILL from another process, after another job in the same cgroup was OOM-killed."""

import os
import subprocess
import time

print("epoch 1", flush=True)
subprocess.Popen(["sh", "-c", f"sleep 3; kill -9 {os.getpid()}"])
time.sleep(60)
