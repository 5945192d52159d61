"""Swap that is in use and does not move costs nothing; a working set larger than the memory costs everything.

Covers: one loop over a working set, with room to spare, with cold memory in swap, and larger than its limit.
Does not cover: how fast this machine's disk is, on which the last ratio depends.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import resource
import sys
import time
from pathlib import Path

import experiment as ex
import rigs

PAGE = mmap.PAGESIZE
LIMIT, SWAP = 96 * ex.MB, 256 * ex.MB
CASES = {  # cold bytes (touched once), hot bytes (touched again and again), with the limit or without
    "no limit, hot 32 MiB": (0, 32, False),
    "cold 128 MiB in swap, hot 32 MiB": (128, 32, True),
    "hot 160 MiB, limit 96 MiB": (0, 160, True),
}


def swap_pages() -> int:
    """Pages the whole machine has read from and written to swap."""
    lines = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return sum(int(value) for name, value in lines if name in ("pswpin", "pswpout"))


def in_swap() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmSwap:"):
            return int(line.split()[1]) * 1024
    return 0


def inside(cold: str, hot: str) -> None:
    """Write the cold memory once, the hot memory for 1.5 seconds and at least twice; print what it cost."""
    # memset and no Python loop: a pass costs what the memory costs
    cold_memory = (ctypes.c_char * (int(cold) * ex.MB))()
    hot_memory = (ctypes.c_char * (int(hot) * ex.MB))()
    pages, passes = len(hot_memory) // PAGE, 0
    ctypes.memset(cold_memory, 1, len(cold_memory))
    for value in range(3):  # the hot pages settle, the cold ones leave
        ctypes.memset(hot_memory, value, len(hot_memory))
    faults, moved, start = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, swap_pages(), time.monotonic()
    while passes < 2 or time.monotonic() - start < 1.5:
        passes += 1
        ctypes.memset(hot_memory, passes % 128, len(hot_memory))
    seconds = time.monotonic() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
    found = {"ns": 1e9 * seconds / passes / pages, "faults": faults / passes / pages, "in_swap": in_swap()}
    print(json.dumps({**found, "moved": (swap_pages() - moved) / seconds}))


def main() -> None:
    ex.need("cgroup", "swap")
    rows, found = [], []
    with rigs.swap_file(SWAP), rigs.memory_cgroup(LIMIT, swap=SWAP) as group:
        for what, (cold, hot, limited) in CASES.items():
            command = ex.role(__file__, cold, hot)
            child = ex.run(group.command(command) if limited else command)
            if child.returncode == -9:  # swap is the machine's: somebody else may have filled it meanwhile
                child = ex.run(group.command(command) if limited else command)
            if child.returncode:
                raise SystemExit(f"{what}: {ex.ending(child.returncode)} {child.stderr}")
            found.append(one := json.loads(child.stdout))
            ratio = one["ns"] / found[0]["ns"]
            cells = f"{one['moved']:.0f}", f"{one['faults']:.3f}", f"{one['ns']:.0f} ns", f"{ratio:.1f}"
            rows.append((what, ex.mb(one["in_swap"]), *cells))
    head = ("swap in use", "pages/s to and from swap", "major faults a page touched", "a page takes", "times as long")
    ex.table(("case", *head), rows)
    still, moving = found[1], found[2]
    ex.verdict(
        {
            "swap was in use while it did not move": still["in_swap"] > 32 * ex.MB,
            "and no page of the loop came from it": still["faults"] < 0.001,
            "a larger working set moves": moving["faults"] > 0.01,
            "and is slower": moving["ns"] > 2 * found[0]["ns"],
        }
    )


if __name__ == "__main__":
    inside(*sys.argv[1:]) if len(sys.argv) > 1 else main()
