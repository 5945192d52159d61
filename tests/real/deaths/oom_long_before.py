"""Rank 1 is OOM-killed at the start; rank 0 waits for it until its timeout, 40 s later."""

import subprocess
import sys
from datetime import timedelta

import torch.distributed as dist

rank1 = subprocess.Popen([sys.executable, "-c", "kept = []\nwhile True: kept.append(bytearray(8 << 20))"])
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=40))
store.get("rank1/ready")
