"""This process's own memory on the host, and the room its cgroup leaves.

Covers: resident bytes now and at the peak, without files' pages; the room; the kernel's count of OOM kills.
Does not cover: other processes (probe.process).
"""

from __future__ import annotations

import os

from legroom.probe.host import Host
from legroom.probe.memory import memory, ram_pool

_STATUS = "/proc/self/status"


def room() -> tuple[int | None, str]:
    """What may still be allocated before RAM or a cgroup's limit is met, and where that was read."""
    pool = ram_pool(memory(Host()))
    return pool.free, pool.source if pool.free is not None else pool.reason or pool.source


def oom_kills() -> int | None:
    """The kernel's count for our own group."""
    return memory(Host()).events.oom_kills


def reset_peak() -> None:
    """The peak counts from now, where the kernel lets us say so."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # then it is the peak since the start: never too low


def resident() -> int:
    """Bytes of this process in RAM, without the pages of files, which the kernel can drop."""
    table = Host().table(_STATUS)
    if "RssAnon" in table:
        return table["RssAnon"] + table.get("RssShmem", 0)
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_resident() -> int:
    """The same at its highest."""
    table = Host().table(_STATUS)
    if "VmHWM" in table:
        return max(table["VmHWM"] - table.get("RssFile", 0), 0)
    import psutil

    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", info.rss))


def first_to_go() -> None:
    """If the kernel must kill somebody for memory, let it be this process."""
    try:
        with open(f"/proc/{os.getpid()}/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # not Linux: the largest goes, which is most likely this one too
