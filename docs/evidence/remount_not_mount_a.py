"""An edited fstab and `mount -a` leave a mounted /dev/shm as it is; `mount -o remount,size=` enlarges it.

Covers: `mount -a` with the same and with another source name, and remounting, with an fstab of our own and in
a mount namespace of our own. Does not cover: containers without CAP_SYS_ADMIN, where neither is allowed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import experiment as ex
import rigs

OLD, NEW = "64m", "128m"
SEGMENT = Path("/dev/shm/segment-in-use")


def size() -> int:
    room = os.statvfs("/dev/shm")
    return room.f_blocks * room.f_frsize


def mounts() -> int:
    """How many filesystems lie one over the other at /dev/shm."""
    return Path("/proc/self/mountinfo").read_text().count(" /dev/shm ")


def inside(fstab: str, *command: str) -> None:
    """One command on a fresh /dev/shm of 64 MiB that holds a segment."""
    SEGMENT.touch()
    before = mounts()
    child = subprocess.run([word.replace("FSTAB", fstab) for word in command], capture_output=True, text=True)
    print(child.returncode, size() // ex.MB, mounts() - before, int(SEGMENT.exists()))


def main() -> None:
    ex.need("mount")
    rows, seen = [], []
    with tempfile.TemporaryDirectory(prefix="legroom-evidence-") as folder:
        fstab = Path(folder) / "fstab"
        for source, command in (
            ("tmpfs", "mount -a -T FSTAB"),  # -T: this file, not the machine's /etc/fstab
            ("shm", "mount -a -T FSTAB"),
            ("tmpfs", "mount -T FSTAB -o remount /dev/shm"),
            ("tmpfs", f"mount -o remount,size={NEW} /dev/shm"),
        ):
            fstab.write_text(f"{source} /dev/shm tmpfs defaults,size={NEW} 0 0\n")
            child = ex.run(rigs.small_shm(ex.role(__file__, str(fstab), *command.split()), OLD))
            if child.returncode:
                raise SystemExit(child.stderr)
            status, megabytes, more, kept = map(int, child.stdout.split())
            seen.append((status, megabytes, more, kept))
            held = "still there" if kept else "hidden"
            rows.append((command, f"{source} … size={NEW}", status, f"{megabytes} MiB", 1 + more, held))
    head = ("command, /dev/shm mounted as tmpfs with 64 MiB", "fstab", "exit", "size", "layers", "old segments")
    ex.table(head, rows)
    ex.verdict(
        {
            "mount -a succeeds and changes nothing": seen[0] == (0, 64, 0, 1),
            "with another source name it covers the old one": seen[1] == (0, 128, 1, 0),
            "remount takes the size from fstab": seen[2] == (0, 128, 0, 1),
            "remount takes a size given to it": seen[3] == (0, 128, 0, 1),
        }
    )


if __name__ == "__main__":
    inside(*sys.argv[1:]) if len(sys.argv) > 1 else main()
