"""SIGTERM from another process: a scheduler's time limit."""

import os
import subprocess
import time

print("epoch 1", flush=True)
subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -TERM {os.getpid()}"])
time.sleep(60)
