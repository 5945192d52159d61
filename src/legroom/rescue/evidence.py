"""Gathering what is known about a death: reads, decides nothing.

Covers: marks before the start, one look at everything after the end. Does not cover: looking while it lives
(readings.py), judging (classify.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from legroom.model.death import Evidence, Level, LogFacts, OomCount
from legroom.probe.host import Host
from legroom.rescue.cgroup_home import Home
from legroom.rescue.disk_levels import DiskLevels
from legroom.rescue.kernel_log import KernelLog, killed_in
from legroom.rescue.readings import Readings, recent_rate, since_look, thinned, worst_stall
from legroom.system.child_processes import ExitStatus


@dataclass
class Witness:
    """What has to be known before a job starts in order to say afterwards what happened to it."""

    host: Host
    home: Home
    readings: Readings
    folders: Sequence[str] = ()  # of its checkpoints
    disks: DiskLevels = field(init=False)
    log: KernelLog = field(default_factory=KernelLog)
    since: float = 0.0

    def __post_init__(self) -> None:
        temporary = self.host.env.get("TMPDIR", "/tmp")
        self.disks = DiskLevels(
            self.host, (*self.folders, os.getcwd(), temporary), lambda: self.readings.present
        )

    def begin(self) -> None:
        """Set the marks."""
        self.disks.start()
        self.since = time.time()
        self.log = KernelLog.mark() if self.host.platform == "linux" else KernelLog(reason=self.host.platform)
        self.readings.begin()

    def close(self) -> None:
        """Let go of what is held open."""
        self.disks.finish(0.0)
        self.log.close()

    def evidence(
        self,
        ending: ExitStatus,
        log: LogFacts,
        shm_at_end: Level | None,
        *,
        asked_to_stop: int | None = None,
        stalled_on: str | None = None,
        held_shm: int | None = None,
        keyboard: bool = False,
    ) -> Evidence:
        """All of it, after the end."""
        seen = self.readings
        pids = seen.victims.job_pids
        unknown = [reason for reason in (self.home.reason, self.log.reason) if reason]
        kernel = self.log.kills(pids, self._group())
        killers = list(self.log.killers(pids, self.since))
        if (oomd := self.home.killed_by_oomd()) is not None and self.home.own:
            killers.append(oomd)
        return Evidence(
            ending=ending,
            asked_to_stop=asked_to_stop,
            stalled_on=stalled_on,
            held_shm=held_shm,
            log=log,
            oom=self._count(kernel),
            kernel=kernel,
            killers=tuple(killers),
            readings=thinned(seen.history),
            peaks=dict(seen.peaks),
            ram_peak=seen.ram_peak(),
            ram_unseen=since_look(seen.history, "ram"),
            shm_at_end=shm_at_end,
            keyboard=keyboard,
            disks=self.disks.finish(),
            swapped_back=recent_rate(seen.history),
            stalled=worst_stall(seen.history),
            unknown=tuple(unknown),
        )

    def _group(self) -> str | None:
        """The end of the job's cgroup path, as the kernel's log has it; only of one that is the job's own."""
        if not self.home.own or self.home.path is None:
            return None
        return "/" + self.home.path.rpartition("/")[2]

    def _count(self, kernel: tuple[str, ...] | None) -> OomCount | None:
        seen = self.readings.victims
        if seen.kills is None:
            return None
        ours, others = seen.taken()
        victims = seen.victims()
        if kernel:  # it names the process, and what that held
            named = killed_in(kernel)
            victims = tuple(replace(one, rss=named.get(one.pid) or one.rss) for one in victims)
            victims = tuple(one for one in victims if one.pid in named) or victims
            ours = len(named)
        elif self.log.killed & seen.other_pids:
            ours, others = 0, len(self.log.killed & seen.other_pids)
        end = self.readings.age
        return OomCount(
            kills=seen.kills,
            own=self.home.own,
            source=self.home.counters(self.host)[1],
            before_end=seen.before_end(end),
            ours=ours,
            others=others,
            victims=victims,
            beside=seen.beside(),
            went_on=seen.went_on(end),
        )
