"""RssShmem says more than what a process holds in /dev/shm: it counts other shared memory too, and once a process.

Covers: shared anonymous memory, a segment mapped by two processes, a segment that was never touched. Does not cover:
pinned memory, which needs CUDA (pin_memory.py).
"""

from __future__ import annotations

import mmap
import os
import re
import sys
from pathlib import Path

import experiment as ex
import rigs

SEGMENT, ANONYMOUS = 6 * ex.MB, 10 * ex.MB


def rss_shmem() -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(r"^RssShmem:\s+(\d+) kB$", text, re.M)
    assert found is not None
    return int(found[1]) * 1024


def case(name: str) -> tuple[int, int]:
    """RssShmem of all processes together, and what /dev/shm has in use."""
    before = ex.shm_used()
    if name == "anonymous":
        area = mmap.mmap(-1, ANONYMOUS)
    else:
        file = os.open("/dev/shm/segment", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(file, 0, SEGMENT)
        area = mmap.mmap(file, SEGMENT)
    if name != "untouched":
        area[:] = b"x" * len(area)
    told = rss_shmem()
    if name == "two processes":
        receive, send = os.pipe()
        if os.fork() == 0:
            for place in range(0, len(area), 4096):
                area[place]
            os.write(send, str(rss_shmem()).encode())
            os._exit(0)
        told += int(os.read(receive, 64))
        os.wait()
    taken = ex.shm_used() - before
    if name != "anonymous":
        os.unlink("/dev/shm/segment")
    return told, taken


def main() -> None:
    if len(sys.argv) > 1:
        print(*case(sys.argv[1]))
        return
    ex.need("mount")
    rows, seen = [], {}
    for name in ("one process", "two processes", "anonymous", "untouched"):
        child = ex.run(rigs.small_shm(ex.role(__file__, name)))
        told, taken = seen[name] = tuple(int(word) for word in child.stdout.split())
        rows.append((name, ex.mb(told), ex.mb(taken)))
    ex.table(("shared memory of", "RssShmem, summed", "in use in /dev/shm"), rows)
    ex.verdict(
        {
            "one segment of one process counts alike": seen["one process"] == (SEGMENT, SEGMENT),
            "a segment of two processes counts twice": seen["two processes"] == (2 * SEGMENT, SEGMENT),
            "anonymous shared memory is not in /dev/shm": seen["anonymous"] == (ANONYMOUS, 0),
            "what nobody touched fills /dev/shm all the same": seen["untouched"] == (0, SEGMENT),
        }
    )


if __name__ == "__main__":
    main()
