"""A child process is OOM-killed in a cgroup with its own limit, below the job's."""

import os
import subprocess
import sys
import time

with open("/proc/self/cgroup") as file:
    lines = dict(line.strip().split(":", 2)[1:] for line in file)
root = "/sys/fs/cgroup/memory" if "memory" in lines else "/sys/fs/cgroup"
inner = f"{root}{lines.get('memory', lines.get(''))}/trial"
os.mkdir(inner)
name = "memory.limit_in_bytes" if "memory" in lines else "memory.max"
with open(f"{inner}/{name}", "w") as file:
    file.write(str(48 << 20))
grow = f"open('{inner}/cgroup.procs', 'w').write('0')\nkept = []\nwhile True: kept.append(bytearray(4 << 20))"
status = subprocess.run([sys.executable, "-c", grow]).returncode
time.sleep(0.3)
os.rmdir(inner)
sys.exit(f"trial ended with {status}")
