"""The machine in a few words, for whoever reads the figures later.

Covers: what bears on the figures. Does not cover: judging it (doctor does).
"""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from legroom.probe.host import Host
from legroom.probe.limits import cpu
from legroom.probe.memory import memory
from legroom.units import format_size
from legroom.words import say

_PACKAGES = ("torch", "numpy", "h5py")
_BUSY = 0.5  # of a load


def machine(host: Host) -> dict[str, Any]:
    """Where this is measured, and how busy it is now."""
    lines = (host.text("/proc/cpuinfo") or "").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(named, platform.processor()),
        "cpus": cpu(host).affinity,
        "memory": memory(host).total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _installed(name)) is not None},
        "load": os.getloadavg()[0],
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def in_words(found: dict[str, Any]) -> str:
    """One line of it."""
    packages = ", ".join(f"{name} {number}" for name, number in found["packages"].items())
    ram = say("unknown") if found["memory"] is None else format_size(found["memory"])
    return say("{cpus} x {cpu}, {ram} of RAM, Python {python}, {packages}",
               cpus=found["cpus"], cpu=found["cpu"], ram=ram, python=found["python"], packages=packages)  # fmt: skip


def how_busy(found: dict[str, Any]) -> str | None:
    """A warning where others are at work."""
    if found["load"] < _BUSY:
        return None
    return say("the machine is not quiet (load {load:.1f}): take the figures with care", load=found["load"])


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
