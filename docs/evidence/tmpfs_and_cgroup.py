"""tmpfs and memfd memory belongs to the cgroup that touched it first, whose limit kills and does not refuse.

Covers: on whose account the pages are, what a kill leaves, posix_fallocate beyond a limit, a /dev/shm larger
than the limit. Does not cover: which size /dev/shm should have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import experiment as ex
import rigs

FILE = Path("/dev/shm/room")
LIMIT = 100 * ex.MB


def reserve(kind: str, megabytes: str, then: str = "leave") -> None:
    """Take room; then leave, or be killed with SIGKILL, or say where it is and wait."""
    descriptor = os.memfd_create("room") if kind == "memfd" else os.open(FILE, os.O_CREAT | os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, int(megabytes) * ex.MB)
    except OSError as problem:
        print(problem.strerror)
        raise SystemExit(3) from None
    if then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "wait":
        print(f"/proc/{os.getpid()}/fd/{descriptor}", flush=True)
        sys.stdin.read()


def shmem(group: rigs.Cgroup) -> int:
    """Bytes of tmpfs and memfd on the group's account."""
    for line in (group.path / "memory.stat").read_text().splitlines():
        if line.startswith("shmem "):
            return int(line.split()[1])
    raise SystemExit(f"{group.path}/memory.stat has no shmem")


def accounts() -> dict[str, bool]:
    """Which cgroup is charged for 60 MiB that a process of one writes and one of another reads."""
    rows, paid = [], []
    with rigs.memory_cgroup(LIMIT) as writer, rigs.memory_cgroup(LIMIT) as reader:

        def note(when: str) -> None:
            # Generous bounds: the kernel keeps up to 64 pages a CPU off these books for a while.
            paid.append((shmem(writer) > 45 * ex.MB, shmem(reader) < 15 * ex.MB))
            rows.append((when, ex.mb(shmem(writer)), ex.mb(shmem(reader))))

        ex.run(writer.command(ex.role(__file__, "tmpfs", 60, "die")))
        ex.run(reader.command(["cat", str(FILE)]))
        note("tmpfs: writer killed, file read")
        FILE.unlink()
        note("tmpfs: file removed")
        command = writer.command(ex.role(__file__, "memfd", 60, "wait"))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            ex.run(reader.command(["cat", child.stdout.readline().strip()]))
            note("memfd: writer alive, memory read")
            child.communicate()
        note("memfd: writer gone")
    ex.table(("60 MiB, written in one group, read in another", "charged to writer", "charged to reader"), rows)
    return {
        "a killed writer is still charged for its tmpfs file": paid[0] == (True, True),
        "until the file is removed": paid[1] == (False, True),
        "memfd is the writer's while it lives": paid[2:] == [(True, True), (False, True)],
    }


def limits() -> dict[str, bool]:
    """What asking for 200 MiB does where the group's limit is 100."""
    rows, ended = [], []
    tmpfs, memfd = ex.role(__file__, "tmpfs", 200), ex.role(__file__, "memfd", 200)
    for what, command in (
        ("tmpfs, /dev/shm of 64 MiB", rigs.small_shm(tmpfs, "64m")),
        ("tmpfs, /dev/shm of 1 GiB", tmpfs),
        ("memfd", memfd),
    ):
        with rigs.memory_cgroup(LIMIT) as group:
            child = ex.run(group.command(command))
            ended.append((ex.ending(child.returncode), group.oom_kills()))
            rows.append((what, ended[-1][0], child.stdout.strip() or "nothing", ended[-1][1]))
        FILE.unlink(missing_ok=True)
    ex.table(("posix_fallocate of 200 MiB, limit 100 MiB", "ended by", "message", "oom_kill"), rows)
    return {
        "a /dev/shm below the limit refuses": ended[0] == ("exit 3", 0),
        "one above it gets the process killed": ended[1][0] == "SIGKILL" and ended[1][1] > 0,
        "and so does memfd": ended[2][0] == "SIGKILL" and ended[2][1] > 0,
    }


def main() -> None:
    ex.need("mount", "cgroup")
    raise SystemExit(ex.run(rigs.small_shm(ex.role(__file__, "inside"), "1g"), show=True).returncode)


if __name__ == "__main__":
    if sys.argv[1:] == ["inside"]:
        ex.verdict({**accounts(), **limits()})
    reserve(*sys.argv[1:]) if len(sys.argv) > 1 else main()
