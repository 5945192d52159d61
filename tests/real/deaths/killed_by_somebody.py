"""SIGKILL from another process; memory is not involved."""

import os
import subprocess
import time

print("epoch 1", flush=True)
subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {os.getpid()}"])
time.sleep(60)
