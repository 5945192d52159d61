"""A child process is OOM-killed in a cgroup with its own limit, below the job's."""

import os
import subprocess
import sys
import time

with open("/proc/self/cgroup") as file:
    lines = dict(line.strip().split(":", 2)[1:] for line in file)
inner = f"/sys/fs/cgroup/memory{lines['memory']}/trial"  # cgroup v2 allows no such limit beside a job's processes
os.mkdir(inner)
with open(f"{inner}/memory.limit_in_bytes", "w") as file:
    file.write(str(48 << 20))
grow = f"open('{inner}/cgroup.procs', 'w').write('0')\nkept = []\nwhile True: kept.append(bytearray(4 << 20))"
status = subprocess.run([sys.executable, "-c", grow]).returncode
time.sleep(0.3)
os.rmdir(inner)
sys.exit(f"trial ended with {status}")
