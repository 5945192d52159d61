"""A bug, while another job in the same cgroup is OOM-killed."""

import time

print("epoch 1", flush=True)
time.sleep(3)
{}["label"]
