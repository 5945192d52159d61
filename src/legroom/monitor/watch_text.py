"""A watch as plain lines: for pipes, files, screen readers, and terminals without the full-screen view.

One line per sample and per alarm, the largest processes every ten seconds, a summary at the end. Lines fit the
terminal, where there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from legroom.messages import cells, counted, cut, fill, listed, phrase, right, say
from legroom.monitor.history_and_trend import History
from legroom.records.finding_and_alarm import heading
from legroom.records.machine import Pool
from legroom.records.watch_sample import GpuCopyRow, GroupRow, Moment, ProcessRow, Sample, TrainerRow
from legroom.units import format_duration, format_size, size_or_unknown


class _Detail(NamedTuple):
    """How much a line shows."""

    sizes: bool  # of the pools, besides their shares
    command: int  # columns; 0: nothing about processes
    components: bool


# The least useful is dropped first: sizes do not change, and the beginning identifies a command.
_DETAILS = (
    _Detail(sizes=True, command=40, components=True),
    _Detail(sizes=False, command=40, components=True),
    _Detail(sizes=False, command=24, components=True),
    _Detail(sizes=False, command=12, components=True),
    _Detail(sizes=False, command=12, components=False),
    _Detail(sizes=False, command=0, components=False),
)
_LARGEST_EVERY = 10.0  # seconds between two lists of the largest processes


class TextOutput:
    """Calls ``write`` for each line; ``history`` is for the summary; ``columns`` returns the width, None if unlimited.

    Lists the ``top`` largest processes with the first sample, every ten seconds, and when an alarm begins.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        history: History,
        columns: Callable[[], int | None] = lambda: None,
        top: int = 5,
    ) -> None:
        self._write_line = write
        self._columns = columns
        self._history = history
        self._first: Sample | None = None
        self._last: Sample | None = None
        self._alarms = 0
        self._top = top
        self._listed: float | None = None  # the clock of the last list of processes
        self._notes: set[str] = set()  # that were written
        self._groups: list[str] = []
        self._groups_listed: float | None = None
        self._gpu_copies: tuple[GpuCopyRow, ...] = ()

    def show(self, moment: Moment) -> None:
        if self._first is None:
            self._first = moment.sample
            self._write(say("watching {what}", what=moment.sample.watched))
        for note in moment.sample.notes:
            if note not in self._notes:
                self._notes.add(note)
                self._write(say("note: {note}", note=note))
        self._last = moment.sample
        self._alarms += len(moment.begun)
        stamp = time.strftime("%H:%M:%S", time.localtime(moment.sample.when))
        for mark in moment.sample.said.marks:
            self._write(f"-- {mark.text}", stamp)
        self._write_line(f"{stamp}  {self._line(moment.sample, cells(stamp) + 2)}")
        for alarm in moment.begun:
            self._write(f"{heading(alarm.level)} {alarm.code}: {alarm.message}", stamp)
        for alarm in moment.ended:
            lasted = format_duration(max(0.0, moment.sample.when - alarm.since))
            self._write(say("ended after {time}: {code}", time=lasted, code=alarm.code), stamp)
        self._list_largest(moment)
        self._list_groups(moment.sample)
        self._list_gpu_copies(moment.sample)

    def close(self) -> None:
        first, last = self._first, self._last
        if first is None or last is None or last is first:
            return
        sizes = {pool.name: pool.size for pool in last.pools if pool.size}
        peaks = [
            say("{pool} {used} of {size}", pool=name, used=format_size(peak.used), size=format_size(sizes[name]))
            for name, peak in self._history.peaks.items()
            if name in sizes
        ]
        self._write(
            say(
                "watched for {time}; peaks: {peaks}; {alarms}",
                time=format_duration(max(0.0, last.when - first.when)),
                peaks=listed(peaks) or say("none known"),
                alarms=counted(self._alarms, phrase("{count} alarm"), phrase("{count} alarms")),
            )
        )

    def _list_largest(self, moment: Moment) -> None:
        sample = moment.sample
        if not (_due(sample, self._listed) or moment.begun) or len(sample.processes) < 2:
            return  # the line of the sample shows a single one
        self._listed = sample.clock
        columns = self._columns()
        for row in sorted(sample.processes, key=_host, reverse=True)[: self._top]:
            line = f"    {right(size_or_unknown(row.host), 9)}  {row.pid:>7}  "
            if columns is None:
                self._write_line(line + row.command)
            else:
                self._write_line(cut(line + short_command(row.command, columns - cells(line)), columns))

    def _list_groups(self, sample: Sample) -> None:
        """The groups that share batches: with the first sample, every ten seconds, and when one comes or goes."""
        names = [group.name for group in sample.groups or ()]
        if names == self._groups and not (names and _due(sample, self._groups_listed)):
            return
        self._groups, self._groups_listed = names, sample.clock
        for group in sample.groups or ():
            for line in group_lines(group):
                self._write("    " + line)

    def _list_gpu_copies(self, sample: Sample) -> None:
        """The copies in GPU memory that processes share, when they or their users change."""
        if (sample.gpu_copies or ()) == self._gpu_copies:
            return
        for gone in {copy.key: copy for copy in self._gpu_copies if copy not in (sample.gpu_copies or ())}.values():
            if all(gone.key != copy.key for copy in sample.gpu_copies or ()):
                self._write("    " + printable(say("released in GPU memory: {name}", name=gone.name)))
        for copy in sample.gpu_copies or ():
            if copy not in self._gpu_copies:
                self._write("    " + gpu_copy_line(copy))
        self._gpu_copies = sample.gpu_copies or ()

    def _line(self, sample: Sample, taken: int) -> str:
        columns = self._columns()
        return sample_line(sample, None if columns is None else columns - taken)

    def _write(self, text: str, stamp: str = "") -> None:
        """Write a sentence, wrapped to the terminal with its continuation lines indented."""
        columns = self._columns()
        first = f"{stamp}  " if stamp else ""
        if columns is None or cells(first) + cells(text) <= columns:
            self._write_line(first + text)
        else:
            self._write_line(fill(text, columns, first, " " * cells(first) or "  "))


def _due(sample: Sample, before: float | None) -> bool:
    """Whether ten seconds have passed; half an interval of tolerance, since samples do not come exactly then."""
    return before is None or sample.clock - before >= _LARGEST_EVERY - sample.interval / 2


def gpu_copy_line(copy: GpuCopyRow) -> str:
    """A copy in GPU memory: its size, what it is, and the processes that use it."""
    told = say(
        "GPU-{gpu}: {size} of {name}, one copy for {users} ({pids})",
        gpu=copy.gpu[:8], size=format_size(copy.bytes), name=copy.name,
        users=counted(len(copy.users), phrase("{count} process"), phrase("{count} processes")),
        pids=listed(map(str, copy.users)),
    )  # fmt: skip
    return printable(told)


def group_lines(group: GroupRow) -> list[str]:
    """A group that shares batches: who makes them, how full the window is, who waits and who is behind."""
    if group.producer is None:
        head = say("share={name!r}: one trainer, which makes its batches with its own workers", name=group.name)
    else:
        head = say(
            "share={name!r}: process {pid} makes the batches with {workers}; {batches} of {most} batches ready, {size}",
            name=group.name, pid=group.producer, batches=group.batches, most=group.most_batches,
            workers=counted(group.workers, phrase("{count} worker"), phrase("{count} workers")),
            size=format_size(group.bytes),
        )  # fmt: skip
    lines = [head]
    if group.error is not None:
        lines.append("  " + say("error: {error}", error=group.error))
    for one in group.trainers:
        if one.state == "alone":
            lines.append(f"  {one.pid} {one.command}")
            continue
        told = say(
            "{pid} {command}: {state}, epoch {epoch}, batch {batch}; {shared} shared, {own} made itself",
            pid=one.pid, command=one.command, state=trainer_state(one), epoch=one.epoch or 0, batch=one.batch or 0,
            shared=one.shared, own=one.made_itself,
        )  # fmt: skip
        lines.append("  " + told)
    return [printable(line) for line in lines]


def trainer_state(one: TrainerRow) -> str:
    """What a trainer does, and how far it is behind."""
    if one.state == "waiting":
        return say("waits for a batch")
    if one.state == "slow" and one.behind:
        return counted(one.behind, phrase("slow, {count} batch behind"), phrase("slow, {count} batches behind"))
    return {"slow": say("slow"), "alone": say("alone")}.get(one.state, say("training"))


def printable(text: str) -> str:
    """A process can have any name; control characters must not reach the terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def short_command(command: str, columns: int) -> str:
    """The command line; without the program's directory where it is too long: arguments tell processes apart."""
    if cells(command) <= columns or not command.startswith(("/", ".")):
        return command
    program, space, arguments = command.partition(" ")
    return (program.rpartition("/")[2] or program) + space + arguments


def sample_line(sample: Sample, columns: int | None = None) -> str:
    """One sample on one line: pools, swap traffic, the largest process, steps; as much as fits."""
    line = ""
    for detail in _DETAILS:
        line = _line(sample, detail)
        if columns is None or cells(line) <= columns:
            return line
    return cut(line, columns or 0)


def _line(sample: Sample, detail: _Detail) -> str:
    parts = [_pool(pool, detail.sizes) for pool in sample.pools if pool.size != 0]
    traffic = (sample.swap_in or 0.0) + (sample.swap_out or 0.0)
    if traffic >= 1:
        parts.append(say("swap traffic {rate}/s", rate=format_size(int(traffic))))
    largest = max(sample.processes, key=_host, default=None)
    count = len(sample.processes)
    if largest is not None and detail.command:
        parts.append(
            say(
                "{processes}, largest: pid {pid} {command} {size}",
                processes=counted(count, phrase("{count} process"), phrase("{count} processes")),
                pid=largest.pid,
                command=cut(short_command(largest.command, detail.command), detail.command),
                size=size_or_unknown(largest.host),
            )
        )
    if sample.said.components and detail.components:
        parts.append(listed(f"{name} {format_size(size)}" for name, size in sample.said.components.items()))
    if sample.said.steps_per_second is not None:
        parts.append(say("{rate:.2f} steps/s", rate=sample.said.steps_per_second))
    return "  ".join(parts)


def _pool(pool: Pool, sizes: bool) -> str:
    share = pool.used_share
    if share is None or pool.size is None:
        return say("{pool} unknown", pool=pool.name)
    if not sizes:
        return say("{pool} {share:.0%}", pool=pool.name, share=share)
    return say("{pool} {share:.0%} of {size}", pool=pool.name, share=share, size=format_size(pool.size))


def _host(row: ProcessRow) -> int:
    return row.host or 0  # the order; an unknown size is shown as unknown
