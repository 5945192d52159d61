# One rank of two grows beyond the cgroup's limit under torchrun.
cat > "$DEATH_DISK/rank.py" <<'PY'
import os
import time

import torch

print(f"rank {os.environ['RANK']} started", flush=True)
if os.environ["RANK"] == "1":
    kept = []
    while True:
        kept.append(torch.ones(4 << 20))
time.sleep(100)
PY
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 2 "$DEATH_DISK/rank.py"
