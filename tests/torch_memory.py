"""What an interpreter takes that has imported torch: a build for CUDA takes twice as much as one for CPUs.

Covers: the limit of a memory cgroup, said as what is left beside such interpreters. Does not cover: making one
(rigs.py).
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

MB = 1 << 20
_ASK = """
import legroom, numpy, torch
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")))
"""


@cache
def torch_bytes() -> int:
    """148 MB with torch 2.13 for CPUs, 290 with 2.11 for CUDA."""
    asked = subprocess.run([sys.executable, "-W", "ignore", "-c", _ASK], capture_output=True, check=True)
    return int(asked.stdout) << 10


def beside_torch(megabytes: int, interpreters: int = 1) -> int:
    """Bytes for that many interpreters with torch, and so much more."""
    return interpreters * torch_bytes() + megabytes * MB
