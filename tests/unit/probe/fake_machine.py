"""A machine staged below a directory: processes, what they map, what lies in /dev/shm."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legroom.probe.host_files_and_syscalls import Host

MB = 1 << 20
NOW = 1_760_000_000.0
BOOTED = 1_750_000_000
DEVICE = "00:1a"  # of the staged /dev/shm, as maps writes it
TMPFS = "28 25 0:26 / /dev/shm rw,nosuid,nodev shared:6 - tmpfs tmpfs rw,inode64"


@dataclass
class FakeMachine:
    """Change it, then ask for its ``host``."""

    root: Path
    uid: int = 1000
    mountinfo: str = f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n{TMPFS}\n"
    size: int = 64 * MB
    used: int = 0
    mode: int = 0o1777
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    platform: str = "linux"

    def text(self, path: str, text: str) -> None:
        """A file of the machine."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8", newline="")

    def process(
        self,
        pid: int,
        parent: int = 1,
        command: Sequence[str] = ("python", "train.py"),
        *,
        shmem: int = 0,
        uid: int = 1000,
        maps: Sequence[str] | None = (),
        smaps: str | None = None,
        fds: Mapping[int, str] | None = None,
        pss: int | None = None,
        started: float = NOW - 3600,
        status: str = "",
    ) -> None:
        """One process; ``maps=None`` is one that may not be looked into. ``shmem`` and ``pss`` in kB."""
        here = f"/proc/{pid}"
        self.text(
            f"{here}/status",
            f"Name:\t{Path(command[0]).name if command else 'python'}\nState:\tS (sleeping)\nPPid:\t{parent}\n"
            f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nVmLck:\t0 kB\nVmPin:\t0 kB\nVmRSS:\t{5000 + shmem} kB\n"
            f"RssShmem:\t{shmem} kB\nVmSwap:\t7 kB\n{status}",
        )
        self.text(f"{here}/cmdline", "".join(word + "\0" for word in command))
        ticks = int((started - BOOTED) * 100)
        self.text(f"{here}/stat", f"{pid} (a) b) S {parent} " + "0 " * 17 + f"{ticks} 0 0\n")
        self.text(f"{here}/limits", "Limit  Soft Limit  Hard Limit  Units\nMax open files   1024   4096   files\n")
        if maps is not None:
            self.text(f"{here}/maps", "".join(line + "\n" for line in maps))
            (self.root / f"proc/{pid}/fd").mkdir()
            for number, target in (fds or {}).items():
                os.symlink(target, self.root / f"proc/{pid}/fd/{number}")
        if smaps is not None:
            self.text(f"{here}/smaps", smaps)
        if pss is not None:
            self.text(f"{here}/smaps_rollup", f"0-1 ---p 0 00:00 0 [rollup]\nRss: 9999 kB\nPss: {pss} kB\n")

    def file(self, path: str, inode: int, size: int, *, age: float = 60.0, uid: int = 1000) -> None:
        """A file in /dev/shm, or (``/proc/7/fd/3``) one without a name that is open there."""
        path = path if path.startswith("/") else f"/dev/shm/{path}"
        self.files[path] = {"inode": inode, "blocks": size // 512, "uid": uid, "mtime": NOW - age}

    @property
    def host(self) -> Host:
        """The machine, recorded as it stands."""
        self.text("/proc/self/mountinfo", self.mountinfo)
        self.text("/proc/stat", f"cpu 1 2 3\nbtime {BOOTED}\n")
        recording = {
            "platform": self.platform,
            "uid": self.uid,
            "now": NOW,
            "statvfs": {"/dev/shm": [self.size, self.size - self.used]},
            "stat": {"/dev/shm": [self.mode, 0]},
            "files": self.files,
        }
        (self.root / "recording.json").write_text(json.dumps(recording))
        return Host.at(self.root)


def area(inode: int, path: str, size: int = MB, *, start: int = 0x7F0000000000, device: str = DEVICE) -> str:
    """A line of maps."""
    return f"{start:x}-{start + size:x} rw-s 00000000 {device} {inode}                         {path}"
