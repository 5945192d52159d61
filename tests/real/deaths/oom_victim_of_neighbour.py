"""Another job in the same cgroup takes the memory, and a process of this job is OOM-killed."""

import time

with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
kept = []
for step in range(1000):
    print(f"step {step}", flush=True)
    kept.append(bytearray(b"x") * (1 << 20))
    time.sleep(0.02)
