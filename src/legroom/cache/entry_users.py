"""Which processes map an entry of the cache, and how much of it they have written to: for display, from /proc."""

from __future__ import annotations

import re
from pathlib import Path

from legroom.cache.manifest import is_key
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import process_at
from legroom.records.cache_entry import EntryUser

_AREA = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ \S+ [0-9]+ +(/.*)$")


def entry_users(root: Path, host: Host | None = None) -> dict[str, tuple[EntryUser, ...]] | None:
    """By key, the processes that map an entry of the store at ``root``. None without /proc.

    For display only: the entry's lock decides whether it is in use, also across namespaces.
    """
    host = host or Host()
    pids = sorted(int(name) for name in host.names("/proc") if name.isascii() and name.isdecimal())
    if not pids:
        return None
    found: dict[str, list[EntryUser]] = {}
    for pid in pids:
        text = host.text(f"/proc/{pid}/maps")
        if text is None or f" {root}/" not in text:
            continue
        process = process_at(host, pid)
        if process is None:
            continue
        keys = {key for line in text.split("\n") if (key := _key(line, root)) is not None}
        private = private_bytes(host.text(f"/proc/{pid}/smaps"), root)
        for key in keys:
            own = None if private is None else private.get(key, 0)
            found.setdefault(key, []).append(EntryUser(pid, process.command, own))
    return {key: tuple(everybody) for key, everybody in found.items()}


def private_bytes(smaps: str | None, root: Path) -> dict[str, int] | None:
    """By key, the bytes of copy-on-write pages in the text of a smaps file. None if it is unreadable."""
    if not smaps:
        return None
    sums: dict[str, int] = {}
    key: str | None = None
    for line in smaps.split("\n"):
        if _AREA.match(line) or re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            key = _key(line, root)
        elif key is not None and line.startswith("Anonymous:"):
            sums[key] = sums.get(key, 0) + int(line.split()[1]) * 1024
    return sums


def _key(line: str, root: Path) -> str | None:
    match = _AREA.match(line)
    if match is None or not match[1].startswith(f"{root}/"):
        return None
    key = match[1].removeprefix(f"{root}/").partition("/")[0]
    return key if is_key(key) else None
