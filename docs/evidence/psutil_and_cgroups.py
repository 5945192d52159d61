"""psutil.virtual_memory() reports the machine's memory, whatever the cgroup's limit is.

Covers: total and available as psutil sees them in a group of 256 MiB, and what becomes of a process that
believes them. Does not cover: containers whose /proc/meminfo is rewritten (lxcfs); there psutil sees that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import experiment as ex
import rigs

LIMIT = 256 * ex.MB


def inside(what: str) -> None:
    import psutil

    memory = psutil.virtual_memory()
    print(json.dumps([memory.total, memory.available]), flush=True)
    if what == "believe":
        # An eighth of what is said to be available, and never more than a gigabyte.
        bytearray(min(memory.available // 8, 1024 * ex.MB)).replace(b"\0", b"\1")


def main() -> None:
    ex.need("cgroup")
    ex.need_module("psutil")
    line = Path("/proc/meminfo").read_text().splitlines()[0]
    machine = int(line.split()[1]) * 1024
    with rigs.memory_cgroup(LIMIT) as group:
        child = ex.run(group.command(ex.role(__file__, "look")))
        total, available = json.loads(child.stdout)
        believer = ex.run(group.command(ex.role(__file__, "believe")))
        kills = group.oom_kills()
    asked = min(available // 8, 1024 * ex.MB)
    ex.table(
        ("what", "size"),
        (
            ("the machine's MemTotal", ex.mb(machine)),
            ("the cgroup's limit", ex.mb(LIMIT)),
            ("psutil in the group: total", ex.mb(total)),
            ("psutil in the group: available", ex.mb(available)),
        ),
    )
    print(f"a process in the group that took {ex.mb(asked)}: {ex.ending(believer.returncode)}, oom_kill {kills}\n")
    if asked <= LIMIT:
        ex.not_shown("an eighth of this machine's free memory fits the limit")
    ex.verdict(
        {
            "psutil's total is the machine's": total == machine,
            "available is above the limit": available > LIMIT,
            "who believes it is killed": believer.returncode == -9 and kills > 0,
        }
    )


if __name__ == "__main__":
    inside(sys.argv[1]) if len(sys.argv) > 1 else main()
