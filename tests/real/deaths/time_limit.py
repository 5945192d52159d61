"""A scheduler's time limit: SIGTERM, which the job ignores, and SIGKILL."""

import os
import signal
import subprocess
import time

signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM: saving", flush=True))
subprocess.Popen(["sh", "-c", f"sleep 1; kill {os.getpid()}; sleep 2; kill -9 {os.getpid()}"])
while True:
    time.sleep(0.1)
