"""What is mounted where, as one process sees it.

Covers: /proc/<pid>/mountinfo, parsed. Does not cover: what a mount means (shm.py, cgroup.py, disk.py) or
how much room it has (Host.room).

Order is the kernel's and matters: of several mounts at one point the last is the one that is seen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from legroom.probe.host import Host

_ESCAPE = re.compile(r"\\([0-3][0-7]{2})")  # the kernel writes space, tab, newline and backslash so


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    point: str  # where it is seen
    root: str  # which directory of the filesystem is seen there
    kind: str  # tmpfs, overlay, cgroup2, …
    source: str
    options: tuple[str, ...]  # of this mount: ro, nosuid, …
    super_options: tuple[str, ...]  # of the filesystem: size=65536k, memory (a v1 controller), …
    device: str = ""  # "major:minor" in decimal


def mounts(host: Host, pid: int | str = "self") -> list[Mount]:
    """Every mount that process sees, in the kernel's order; empty where it cannot be read."""
    return parse(host.text(f"/proc/{pid}/mountinfo") or "")


def mounted_at(found: list[Mount], point: str) -> Mount | None:
    """The mount that is seen at exactly ``point``: the last one made there."""
    return next((mount for mount in reversed(found) if mount.point == point), None)


def parse(text: str) -> list[Mount]:
    """The lines of a mountinfo file; what is no such line is skipped."""
    # Only "\n" ends a line: a path may hold characters at which str.splitlines() would also break.
    return [mount for line in text.split("\n") if (mount := _line(line)) is not None]


def _line(line: str) -> Mount | None:
    # A number of optional fields ends at a lone "-". Split at single spaces: a source may be empty.
    ahead, dash, behind = line.partition(" - ")
    front, back = ahead.split(" "), behind.split(" ")
    if not dash or len(front) < 6 or len(back) < 3 or not front[4].startswith("/"):
        return None
    return Mount(
        point=_plain(front[4]),
        root=_plain(front[3]),
        kind=back[0],
        source=_plain(back[1]),
        options=_options(front[5]),
        super_options=_options(back[2]),
        device=front[2],
    )


def _options(text: str) -> tuple[str, ...]:
    return tuple(_plain(option) for option in text.split(",") if option)


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
