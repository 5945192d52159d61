"""Ctrl-C."""

import os
import signal
import subprocess
import time

signal.signal(signal.SIGINT, signal.default_int_handler)
print("epoch 1", flush=True)
subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -INT {os.getpid()}"])
time.sleep(60)
