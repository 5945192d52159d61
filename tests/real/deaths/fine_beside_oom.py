"""A job that finishes while another one in the same cgroup is OOM-killed."""

import subprocess
import time

print("epoch 1", flush=True)
subprocess.run(["true"], check=True)
time.sleep(3)
print("finished")
