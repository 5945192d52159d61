"""The pools as a watch reads them: the cheap ones at every sample, the others as their ration allows.

Covers: shm, ram, swap and its rates, pressure, the cgroup's counters, disk, cards. Does not cover: processes
(sampler.py), judging (alarms.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from legroom.model import Gpus, Memory, Pool, Pressure
from legroom.monitor.ration import Ration
from legroom.probe.disk import disk_pool, disks
from legroom.probe.gpu import gpu_pools, gpus
from legroom.probe.host import Host
from legroom.probe.memory import memory, ram_pool
from legroom.probe.nvml_hold import NvmlHold
from legroom.probe.pressure import pressure
from legroom.probe.segments import SHM, shm_mount
from legroom.probe.shm import shm_room
from legroom.probe.swap import Counters, start, swap, swap_pool
from legroom.words import say

_SPARING = 0.003  # of the time: cards, disks


@dataclass(frozen=True, slots=True)
class Look:
    """One reading of all pools."""

    pools: tuple[Pool, ...]
    swap_in: float | None
    swap_out: float | None
    pressure: tuple[Pressure, ...]
    ram: Memory  # with the counters of the cgroup
    cards: Gpus
    gpu_at: float


@dataclass
class Pools:
    """What is kept from one reading to the next."""

    host: Host
    _counters: Counters = field(default_factory=lambda: Counters(0.0, None, None))  # none yet: no rates
    _disk: Pool | None = None
    _cards: Gpus | None = None
    _gpu_at: float = 0.0
    _shm_path: str | None = None
    _scope: str = ""
    _disk_ration: Ration = field(default_factory=lambda: Ration(_SPARING, least_gap=5.0))
    _gpu_ration: Ration = field(default_factory=lambda: Ration(_SPARING))
    _hold: NvmlHold = field(default_factory=NvmlHold)

    def look(self, clock: float, scope: str) -> Look:
        """All pools from the point of view of process ``scope``."""
        ram = memory(self.host, scope)
        swapped = swap(self.host, ram, self._counters)
        self._counters = start(self.host)
        cards = self._look_at_cards(clock)
        return Look(
            pools=(
                self._shm(scope),
                ram_pool(ram),
                swap_pool(swapped),
                self._look_at_disk(clock),
                *gpu_pools(cards),
            ),
            swap_in=swapped.in_rate,
            swap_out=swapped.out_rate,
            pressure=pressure(self.host, scope),
            ram=ram,
            cards=cards,
            gpu_at=self._gpu_at,
        )

    def close(self) -> None:
        """Let go of the driver."""
        self._hold.release()

    def _shm(self, scope: str) -> Pool:
        if self.host.platform != "linux":
            why = say("{platform} has no /dev/shm", platform=self.host.platform)
            return Pool("shm", None, None, None, SHM, why)
        if self._shm_path is None or scope != self._scope:
            self._scope, self._shm_path = scope, self._shm_of(scope)
        size, used, free, reason = shm_room(self.host, self._shm_path)
        return Pool("shm", size, used, free, say("statvfs({path})", path=self._shm_path), reason)

    def _shm_of(self, scope: str) -> str:
        """The /dev/shm that process sees: a container's is another one than ours."""
        namespace = self.host.link(f"/proc/{scope}/ns/mnt")
        if namespace is not None and namespace != self.host.link("/proc/self/ns/mnt"):
            theirs = f"/proc/{scope}/root{shm_mount(self.host, scope)[0]}"
            if self.host.room(theirs) is not None:  # else its root may not be entered
                return theirs
        return shm_mount(self.host)[0]

    def _look_at_disk(self, clock: float) -> Pool:
        if self._disk is None or self._disk_ration.due(clock):
            began = time.perf_counter()
            self._disk = disk_pool(disks(self.host))
            self._disk_ration.spent(clock, time.perf_counter() - began)
        return self._disk

    def _look_at_cards(self, clock: float) -> Gpus:
        if self._cards is None or self._gpu_ration.due(clock):
            began = time.perf_counter()
            self._cards = gpus(self.host)
            self._gpu_at = clock
            if self._cards.cards and self.host.live:
                self._hold.take()
            self._gpu_ration.spent(clock, time.perf_counter() - began)
        return self._cards
