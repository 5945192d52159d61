"""Exit status 137 means SIGKILL or `exit 137`; the cgroup's counter shows an OOM kill.

Covers: an OOM kill, a kill -9 and a plain `exit 137`, each seen as a shell sees it. Does not cover: kills by
systemd-oomd, earlyoom or a kubelet, which are kill -9 to the kernel and leave the counter alone.
"""

from __future__ import annotations

import sys

import experiment as ex
import rigs

LIMIT = 64 * ex.MB
# `exit $?` keeps the shell alive as the parent: it turns the signal into 128 + 9, as a container runtime does.
DEATHS = {
    "the kernel's OOM killer": [sys.executable, "-c", "bytearray(200 << 20)"],
    "kill -9 by another process": ["sh", "-c", "kill -9 $$"],
    "a program that exits with 137": ["sh", "-c", "exit 137"],
}


def main() -> None:
    ex.need("cgroup")
    rows, seen = [], []
    for what, command in DEATHS.items():
        with rigs.memory_cgroup(LIMIT) as group:
            before = group.oom_kills()
            child = ex.run(group.command(["sh", "-c", '"$@"; exit $?', "sh", *command]))
            seen.append((child.returncode, group.oom_kills() - before))
            rows.append((what, *seen[-1]))
    ex.table(("what ended it", "exit status", "rise of oom_kill"), rows)
    ex.verdict(
        {
            "the three have one status": [status for status, _ in seen] == [137, 137, 137],
            "the counter rises for the OOM kill alone": [kills > 0 for _, kills in seen] == [True, False, False],
        }
    )


if __name__ == "__main__":
    main()
