"""Memory pressure: the share of time that tasks stood still waiting for memory (PSI).

Covers: the machine's /proc/pressure/memory and the cgroup's own memory.pressure; both can be read without rights.
Does not cover: kernels before 4.20 and those with PSI switched off, where there is simply nothing to say.
"""

from __future__ import annotations

import math

from legroom.model import Pressure
from legroom.probe.cgroup import UNIFIED, cgroup
from legroom.probe.host import Host

_MACHINE = "/proc/pressure/memory"


def pressure(host: Host, pid: str = "self") -> tuple[Pressure, ...]:
    """The machine's pressure and that of ``pid``'s cgroup, as far as each can be read."""
    found = [_read(host, "machine", _MACHINE)]
    group = cgroup(host, UNIFIED, pid)
    if group.chain and not group.is_root and group.reason is None:  # the root's file repeats the machine's
        found.append(_read(host, "cgroup", f"{group.chain[0]}/memory.pressure"))
    return tuple(record for record in found if record is not None)


def _read(host: Host, scope: str, file: str) -> Pressure | None:
    text = host.text(file)
    rows = parse(text) if text is not None else {}
    some, full = rows.get("some"), rows.get("full")
    if some is None or full is None:
        return None
    return Pressure(scope, *some, *full, source=file)


def parse(text: str) -> dict[str, tuple[float, float]]:
    """The 10 and 60 second averages, in percent, of each line that has both."""
    rows: dict[str, tuple[float, float]] = {}
    for line in text.split("\n"):
        name, _, rest = line.partition(" ")
        pairs = dict(word.split("=", 1) for word in rest.split() if "=" in word)
        try:
            averages = float(pairs["avg10"]), float(pairs["avg60"])
        except (KeyError, ValueError):
            continue
        if all(math.isfinite(average) and average >= 0 for average in averages):
            rows[name] = averages
    return rows
