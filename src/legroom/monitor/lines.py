"""A watch as plain lines: for pipes, files and screen readers.

Covers: one line a sample, one for each alarm that begins or ends, a summary at the end. Does not cover: colours.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from legroom.model import Moment, Pool, ProcessRow, Sample
from legroom.model.advice import heading
from legroom.monitor.history import History
from legroom.units import format_duration, format_size
from legroom.words import listed, say

_LONGEST_COMMAND = 40


class Lines:
    """Writes through ``write``; ``history`` is the stream's, for the summary."""

    def __init__(self, write: Callable[[str], object], history: History) -> None:
        self._write = write
        self._history = history
        self._first: Sample | None = None
        self._last: Sample | None = None
        self._alarms = 0

    def show(self, moment: Moment) -> None:
        if self._first is None:
            self._first = moment.sample
            self._write(say("watching {what}", what=moment.sample.watched))
            for note in moment.sample.notes:
                self._write(say("note: {note}", note=note))
        self._last = moment.sample
        self._alarms += len(moment.begun)
        stamp = time.strftime("%H:%M:%S", time.localtime(moment.sample.when))
        for mark in moment.sample.said.marks:
            self._write(f"{stamp}  -- {mark.text}")
        self._write(f"{stamp}  {sample_line(moment.sample)}")
        for alarm in moment.begun:
            self._write(f"{stamp}  {heading(alarm.level)} {alarm.code}: {alarm.message}")
        for alarm in moment.ended:
            lasted = format_duration(max(0.0, moment.sample.when - alarm.since))
            self._write(f"{stamp}  " + say("over after {time}: {code}", time=lasted, code=alarm.code))

    def close(self) -> None:
        first, last = self._first, self._last
        if first is None or last is None or last is first:
            return
        sizes = {pool.name: pool.size for pool in last.pools if pool.size}
        peaks = [
            say(
                "{pool} {used} of {size}",
                pool=name,
                used=format_size(peak.used),
                size=format_size(sizes[name]),
            )
            for name, peak in self._history.peaks.items()
            if name in sizes
        ]
        self._write(
            say(
                "watched for {time}; peaks: {peaks}; {count} alarm(s)",
                time=format_duration(max(0.0, last.when - first.when)),
                peaks=listed(peaks) or say("none known"),
                count=self._alarms,
            )
        )


def sample_line(sample: Sample) -> str:
    """One sample on one line: pools, whether swap moves, who holds most, steps."""
    parts = [_pool(pool) for pool in sample.pools if pool.size != 0]
    moving = (sample.swap_in or 0.0) + (sample.swap_out or 0.0)
    if moving >= 1:
        parts.append(say("swap moving {rate}/s", rate=format_size(int(moving))))
    most = max(sample.processes, key=_host, default=None)
    count = len(sample.processes)
    if most is not None:
        parts.append(
            say(
                "{count} process(es), most {pid} {command} {size}",
                count=count,
                pid=most.pid,
                command=most.command[:_LONGEST_COMMAND],
                size=format_size(_host(most)),
            )
        )
    if sample.said.components:
        held = listed(f"{name} {format_size(size)}" for name, size in sample.said.components.items())
        parts.append(held)
    if sample.said.steps_per_second is not None:
        parts.append(say("{rate:.2f} steps/s", rate=sample.said.steps_per_second))
    return "  ".join(parts)


def _pool(pool: Pool) -> str:
    share = pool.used_share
    if share is None or pool.size is None:
        return say("{pool} unknown", pool=pool.name)
    return say("{pool} {share:.0%} of {size}", pool=pool.name, share=share, size=format_size(pool.size))


def _host(row: ProcessRow) -> int:
    return row.host or 0
