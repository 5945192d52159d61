"""kernel.shmmax and shmall bound System V segments; /dev/shm is a tmpfs and has a size of its own.

Covers: both bounds set the opposite way round, in an IPC namespace and a /dev/shm of our own; what ipcs shows.
Does not cover: programs that do use System V segments (some databases); for those the limits count.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import experiment as ex
import rigs

ASKED = 32 * ex.MB
SHMMAX, SHMALL = Path("/proc/sys/kernel/shmmax"), Path("/proc/sys/kernel/shmall")


def system_v() -> str:
    """A System V segment of 32 MiB, all of it written."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0, ctypes.c_size_t(ASKED), 0o600 | 0o1000)
    if segment < 0:
        return os.strerror(ctypes.get_errno())
    address = libc.shmat(segment, None, 0)
    ctypes.memset(address, 1, ASKED)
    listed = len(ipcs())
    libc.shmctl(segment, 0, None)  # IPC_RMID
    return f"works, ipcs lists {listed}"


def posix() -> str:
    """A POSIX segment of 32 MiB: a file in /dev/shm, reserved so that a lack of room is an error."""
    path = "/dev/shm/segment"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, ASKED)
        return f"works, ipcs lists {len(ipcs())}"
    except OSError as problem:
        return str(problem.strerror)
    finally:
        os.close(descriptor)
        os.unlink(path)


def ipcs() -> list[str]:
    lines = subprocess.run(["ipcs", "-m"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if line.startswith("0x")]


def inside(shmmax: str, shmall: str) -> None:
    SHMMAX.write_text(shmmax)
    SHMALL.write_text(shmall)
    print(system_v(), posix(), sep="\n")


def main() -> None:
    ex.need("mount")
    if ex.run(["unshare", "--ipc", "ipcs", "-m"]).returncode:
        ex.not_shown("no IPC namespace, or no ipcs: the machine's own limits must stay as they are")
    machine, rows, said = SHMMAX.read_text(), [], {}
    tight, wide = ("1048576", "256"), (str(1 << 40), str(1 << 28))
    for what, limits, size in (
        ("shmmax 1 MiB, /dev/shm 64 MiB", tight, "64m"),
        ("shmmax 1 TiB, /dev/shm 16 MiB", wide, "16m"),
    ):
        command = ["unshare", "--ipc", *rigs.small_shm(ex.role(__file__, *limits), size)]
        said[size] = ex.run(command).stdout.splitlines()
        rows.append((what, *said[size]))
    ex.table(("limits", "System V segment of 32 MiB", "POSIX segment of 32 MiB (/dev/shm)"), rows)
    ex.verdict(
        {
            "tight shmmax stops System V alone": said["64m"] == ["Invalid argument", "works, ipcs lists 0"],
            "a small /dev/shm stops POSIX alone": said["16m"] == ["works, ipcs lists 1", "No space left on device"],
            "the machine's own limit is as it was": SHMMAX.read_text() == machine,
        }
    )


if __name__ == "__main__":
    inside(*sys.argv[1:]) if len(sys.argv) > 1 else main()
