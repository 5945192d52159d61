"""A full /dev/shm kills by SIGBUS; the OOM killer has no part in it, and memory need not be short.

Covers: a process and a torch loader's worker that touch more of a tmpfs than it has, in a cgroup with room to
spare. Does not cover: bus errors of other origin (a mapped file that was truncated, broken hardware).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import experiment as ex
import rigs

ASKED = 32 * ex.MB  # of a /dev/shm of 16
LIMIT = 2048 * ex.MB


def touch(index: int = 0) -> int:
    """Write to all of a segment larger than /dev/shm."""
    from multiprocessing.shared_memory import SharedMemory

    segment = SharedMemory(create=True, size=ASKED)
    assert segment.buf is not None
    segment.buf[:] = bytes(ASKED)
    return index


class Rows:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return touch(index)


def loader() -> None:
    from torch.utils.data import DataLoader

    try:
        list(DataLoader(Rows(), num_workers=1))
    except RuntimeError as problem:
        print(str(problem.__cause__ or problem).splitlines()[0])
        raise SystemExit(3) from None


def most_used(group: rigs.Cgroup) -> int | None:
    """The most memory the group ever used; None where the kernel does not keep it."""
    path = group.path / ("memory.max_usage_in_bytes" if group.version == "v1" else "memory.peak")
    return int(path.read_text()) if path.exists() else None


def main() -> None:
    ex.need("mount", "cgroup")
    ex.need_module("torch")
    rows, seen = [], {}
    for what in ("touch", "loader"):
        with rigs.memory_cgroup(LIMIT) as group:
            child = ex.run(group.command(rigs.small_shm(ex.role(__file__, what), "16m")))
            seen[what] = (ex.ending(child.returncode), child.stdout.strip(), group.oom_kills(), most_used(group))
        ended, said, kills, peak = seen[what]
        rows.append((what, ended, kills, "unknown" if peak is None else ex.mb(peak), said.split(". ")[0]))
    limit = ex.mb(LIMIT)
    ex.table(("32 MiB touched of 16", "ended by", "oom_kill", f"peak (limit {limit})", "message"), rows)
    ex.verdict(
        {
            "the process dies of SIGBUS": seen["touch"][0] == "SIGBUS",
            "the loader names a bus error": "Bus error" in seen["loader"][1],
            "nobody was OOM-killed": all(kills == 0 for _, _, kills, _ in seen.values()),
            "memory was not short": all(peak is None or peak < LIMIT // 2 for *_, peak in seen.values()),
        }
    )


if __name__ == "__main__":
    roles: dict[str, Callable[[], object]] = {"touch": touch, "loader": loader}
    roles[sys.argv[1]]() if len(sys.argv) > 1 else main()
