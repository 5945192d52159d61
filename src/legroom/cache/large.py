"""Large pages for files in memory.

Covers: taking a file's room in pages of 2 MB where the kernel has them. Does not cover: maps of them (maps.py lays
maps so that large pages stay large there).

A tmpfs gives single pages unless it was mounted otherwise, and the kernel clears, counts and maps each by itself.
MADV_COLLAPSE (Linux 6.1) makes a large page of a range that has at least one, for anybody and whatever the mount says.
Writing to such a file takes half the time, and reading it for the first time no longer than reading it again.

It may have to move other memory out of the way, or a hypervisor may have to find the memory first. So it is watched:
once a few megabytes have taken twice as long as small pages would, or are refused, the build does with small ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from legroom.cache.maps import LARGE, Map
from legroom.probe.host import Host
from legroom.system.libc import libc

_COLLAPSE = 25
_PIECE = 2 * LARGE  # taken between two looks at the clock
_DEAR = 0.8e-9  # seconds per byte: twice what small pages take
_SETTINGS = "/sys/kernel/mm/transparent_hugepage/"


class LargePages:
    """The large pages of one build, for as long as they are worth it."""

    def __init__(self) -> None:
        self._worth_it = wanted(os.environ) and known()

    def take(self, fd: int, offset: int, length: int) -> bool:
        """Take a range of a file in memory, save a tail that no large page fits; False where small ones must do."""
        end = offset + length - length % LARGE
        if offset % LARGE or end == offset:
            return False
        return all(self._take(fd, place, min(_PIECE, end - place)) for place in range(offset, end, _PIECE))

    def _take(self, fd: int, offset: int, length: int) -> bool:
        if not self._worth_it:
            return False
        worked, begun = time.thread_time(), time.monotonic()
        for place in range(offset, offset + length, LARGE):
            # The one page that there must be. It also says on which node the large one will lie.
            os.pwrite(fd, b"\0", place)
        made = _collapse(fd, offset, length)
        # Others who run on this core do not count; waiting for memory to be moved does in the end.
        cost = max(time.thread_time() - worked, (time.monotonic() - begun) / 8)
        self._worth_it = made and cost <= _DEAR * length
        return made


def _collapse(fd: int, offset: int, length: int) -> bool:
    try:
        mapped = Map(fd, length, offset=offset)
    except OSError:  # no addresses left
        return False
    return bool(libc().madvise(mapped.address, mapped.length, _COLLAPSE) == 0)


def wanted(env: Mapping[str, str]) -> bool:
    """Whether ``LEGROOM_LARGE_PAGES`` lets large pages be used: unless it says 0."""
    return env.get("LEGROOM_LARGE_PAGES", "").strip().lower() not in ("0", "no", "false", "off")


def known(host: Host | None = None) -> bool:
    """Whether this kernel has large pages of the expected size, and nobody has switched them off."""
    host = host or Host()
    size = (host.text(_SETTINGS + "hpage_pmd_size") or "").strip()
    return size == str(LARGE) and "[never]" not in (host.text(_SETTINGS + "enabled") or "")
