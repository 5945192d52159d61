"""Find which process an OOM kill took: one of the job, another in the same cgroup, or unknown.

A container usually may not create cgroups, so its OOM counter covers every process in it. Its processes can be listed
with one system call per sample. If the counter rises while only the job loses a process, the victim is the job's; if
only another loses one, it is the other's. Otherwise it is unknown.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from legroom.model.death import Role, Victim
from legroom.probe.host import Host
from legroom.probe.process import arguments, command_text, is_ending
from legroom.rescue.job_cgroup import JobCgroup

_DYING = 0.5  # seconds after the counter rose in which a process goes that was killed
_SIGKILL = 1 << 8  # in a mask of pending signals
_MOST = 1000  # processes of a shared group; of a larger one only the job's own are followed
_MOST_KEPT = 100_000  # ids of processes that are gone
_ANSWER = 0.3  # seconds after a kill in which output is about the kill
_LAST_WORDS = 1.0  # seconds before the end in which output is about the end
_LONGEST = 160
_MOST_BESIDE = 4
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # of torchrun, Slurm, MPI
_PAGE = 4096
_TORCH_WORKER = "pt_data_worker"  # what torch's loader names its workers
_FORKSERVER = "multiprocessing.forkserver"


@dataclass(slots=True)
class _Seen:
    """A process in the group."""

    pid: int
    parent: int
    ours: bool
    name: str
    command: str = ""
    rss: int | None = None
    role: Role | None = None
    rank: int | None = None

    def as_victim(self) -> Victim:
        return Victim(self.pid, (self.command or self.name)[:_LONGEST], self.rss, self.role, self.rank)


@dataclass(slots=True)
class _Rise:
    """The counter rose."""

    when: float
    count: int
    ours: list[_Seen] = field(default_factory=list)
    others: list[_Seen] = field(default_factory=list)
    there: list[Victim] = field(default_factory=list)  # the job's largest processes when it rose

    def open(self, now: float) -> bool:
        """Whether a process that goes now may be the one that was killed."""
        return len(self.ours) + len(self.others) < self.count and now - self.when <= _DYING


@dataclass
class OomVictims:
    """The OOM kills of one attempt, and who they took."""

    host: Host
    home: JobCgroup
    root: int | None = None  # the job's first process, which leads its process group
    job_pids: set[int] = field(default_factory=set)  # every process of the job that was ever seen
    other_pids: set[int] = field(default_factory=set)  # and of the rest of the group
    _known: dict[int, _Seen] = field(default_factory=dict)
    _rises: list[_Rise] = field(default_factory=list)
    _first: int | None = None
    _last: int | None = None
    _listed: bool = True  # the whole group can be followed
    _written: int = 0
    _wrote: deque[float] = field(default_factory=lambda: deque(maxlen=1000))  # since the last rise

    def begin(self) -> None:
        """Take the counter before the job starts, and who is in the group already."""
        self._first = self._last = self.home.counters(self.host)[0]
        self._list(0.0)

    @property
    def kills(self) -> int | None:
        """OOM kills since the start, in the whole group."""
        return None if self._last is None or self._first is None else max(0, self._last - self._first)

    def look(self, now: float, written: int) -> None:
        """One reading; ``written`` is how much the job has written by now."""
        # Processes before the counter: whoever is missing was counted before it went.
        gone = self._list(now)
        count = self.home.counters(self.host)[0]
        if count is not None and self._last is not None and count > self._last:
            ours = [seen.as_victim() for seen in (*self._known.values(), *gone) if seen.ours and seen.rss]
            largest = sorted(ours, key=lambda one: -(one.rss or 0))[:_MOST_BESIDE]
            self._rises.append(_Rise(now, count - self._last, there=largest))
            self._wrote.clear()
        if count is not None:
            self._last = count
        if written != self._written:
            self._written = written
            self._wrote.append(now)
        rise = next((rise for rise in self._rises if rise.open(now)), None)
        if rise is None:
            return
        # All that went or are going at once: which of several was the victim is not known then.
        going = [seen for seen in self._known.values() if self._is_going(seen.pid)]
        for seen in (*gone, *going):
            (rise.ours if seen.ours else rise.others).append(seen)

    def measure(self, pids: list[int]) -> None:
        """The slower reading: what the job's processes hold, and what each of them is."""
        for pid in pids:
            seen = self._known.get(pid) or self._add(pid, ours=True)
            if seen is None:
                continue
            seen.ours = True
            self._keep(seen)
            words = (self.host.text(f"/proc/{pid}/statm") or "").split()
            if len(words) > 1:
                seen.rss = int(words[1]) * _PAGE
            seen.name = (self.host.text(f"/proc/{pid}/comm") or seen.name).strip()
            command = command_text(arguments(self.host, pid)) or seen.command
            if command != seen.command:  # it is new, or has called exec
                seen.command, seen.rank = command, _rank(self.host.text(f"/proc/{pid}/environ") or "")
        self._find_roles()

    @property
    def loader(self) -> bool:
        """Whether the job has a data loader with workers of its own."""
        return any(seen.role == "worker" for seen in self._known.values() if seen.ours)

    def taken(self) -> tuple[int, int]:
        """(kills that took a process of the job, kills that took another process)."""
        ours = others = 0
        for rise in self._rises:
            if self.home.own or (rise.ours and not rise.others and self._listed):
                ours += rise.count
            elif rise.others and not rise.ours:
                others += rise.count
        return ours, others

    def victims(self) -> tuple[Victim, ...]:
        """The job's processes that went when the counter rose, the largest first."""
        found = {seen.pid: seen for rise in self._rises for seen in rise.ours}
        ordered = sorted(found.values(), key=lambda seen: -(seen.rss or 0))
        return tuple(seen.as_victim() for seen in ordered)

    def beside(self) -> tuple[Victim, ...]:
        """The job's largest processes when the counter last rose, without those that went."""
        gone = {seen.pid for rise in self._rises for seen in rise.ours}
        return tuple(one for one in self._rises[-1].there if one.pid not in gone) if self._rises else ()

    def before_end(self, end: float) -> float | None:
        """Seconds from the last kill that may be the job's to the end."""
        mine = [rise.when for rise in self._rises if self.home.own or rise.ours or not rise.others]
        return end - mine[-1] if mine else None

    def went_on(self, end: float) -> bool:
        """Whether the job kept on writing after the last kill, beyond what is about the kill and about its end."""
        if not self._rises:
            return False
        since, until = self._rises[-1].when + _ANSWER, end - _LAST_WORDS
        return sum(since < when < until for when in self._wrote) >= 3

    def _is_going(self, pid: int) -> bool:
        """Whether SIGKILL is on its way to a process, or it is ending: one with gigabytes to free takes seconds."""
        for line in (self.host.text(f"/proc/{pid}/status") or "").splitlines():
            if line.startswith(("SigPnd:", "ShdPnd:")) and int(line.split()[1], 16) & _SIGKILL:
                return True
        return is_ending(self.host, pid)

    def _list(self, now: float) -> list[_Seen]:
        """Take in who is new in the group; those that are gone."""
        members = self.home.members()
        if members is None:
            self._listed = False
            return []
        if len(members) > _MOST and not self.home.own:
            self._listed = False
            members = {pid for pid in members if pid in self.job_pids}
        if members == self._known.keys():
            return []
        gone = [seen for pid, seen in self._known.items() if pid not in members]
        for seen in gone:
            del self._known[seen.pid]
        for pid in members - self._known.keys():
            self._add(pid)
        return gone

    def _add(self, pid: int, *, ours: bool = False) -> _Seen | None:
        name, _, rest = (self.host.text(f"/proc/{pid}/stat") or "").rpartition(")")
        fields = rest.split()
        if len(fields) < 3:
            return None
        parent, group = int(fields[1]), int(fields[2])
        above = self._known.get(parent)
        mine = ours or self.home.own or pid == self.root or (above is not None and above.ours)
        mine = mine or (self.root is not None and group == self.root)
        seen = self._known[pid] = _Seen(pid, parent, mine, name.partition("(")[2])
        self._keep(seen)
        return seen

    def _keep(self, seen: _Seen) -> None:
        """Ids are used again: each belongs to whom it was last."""
        here, there = (self.job_pids, self.other_pids) if seen.ours else (self.other_pids, self.job_pids)
        there.discard(seen.pid)
        if len(here) < _MOST_KEPT:
            here.add(seen.pid)

    def _find_roles(self) -> None:
        """A worker is named so by torch, or is a fork of its parent; a process that has workers trains."""
        ours = {pid: seen for pid, seen in self._known.items() if seen.ours}
        trainers = set()
        for seen in ours.values():
            above = ours.get(seen.parent)
            forked = above is not None and above.command == seen.command and "python" in seen.command
            if seen.name != _TORCH_WORKER and not forked:
                continue
            seen.role = "worker"
            if above is not None and _FORKSERVER in above.command:
                above = ours.get(above.parent)
            if above is not None:
                trainers.add(above.pid)
        for pid in trainers:
            if ours[pid].role is None:
                ours[pid].role = "main"


def _rank(environment: str) -> int | None:
    """The rank that a launcher gave a process, from its environment."""
    found = dict(entry.split("=", 1) for entry in environment.split("\0") if "=" in entry)
    text = next((found[name] for name in _RANKS if name in found), "")
    return int(text) if text.isdecimal() else None
