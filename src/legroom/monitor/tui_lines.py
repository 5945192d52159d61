"""The lines of the full-screen view for a given width: pools, alarms, processes, cache entries. Pure functions."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.text import Text

from legroom.messages import cells, counted, cut, cut_front, left, listed, phrase, right, say
from legroom.monitor.timeline import (
    ProcessFrame,
    ProcessPoint,
    column_shares,
    is_as_read,
    largest_pids,
    over_steps,
    taken,
)
from legroom.monitor.watch_text import printable, short_command, trainer_state
from legroom.records.finding_and_alarm import Alarm, heading
from legroom.records.machine import Pool, scope_name
from legroom.records.watch_sample import EntryRow, GpuCopyRow, GroupRow, GrowthRow, PoolPoint, ProcessRow, Sample
from legroom.units import format_duration, format_size, size_or_unknown

_HEIGHTS = "▁▂▃▄▅▆▇█"
_STACK_ROWS = 8
_LAYER_STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red", "white", "dim")  # the last: others, the rest
_BAR_WIDTH = 16
_NAME_WIDTH = 6
MOST_ROWS = 300


@dataclass(frozen=True, slots=True)
class _ProcessColumn:
    """A column of the process table."""

    key: str  # sorts by this column
    name: str
    width: int
    value: Callable[[ProcessRow], int | None]
    text: Callable[[ProcessRow, float], str]


_COLUMNS = (
    _ProcessColumn("p", "PSS", 9, lambda row: row.pss_estimate, lambda row, _: _pss(row)),
    _ProcessColumn("a", phrase("PSS age"), 9, lambda row: None, lambda row, clock: _age(row, clock)),
    _ProcessColumn("m", "RssShmem", 10, lambda row: row.rss_shmem, lambda row, _: size_or_unknown(row.rss_shmem)),
    _ProcessColumn("w", "VmSwap", 9, lambda row: row.swap, lambda row, _: size_or_unknown(row.swap)),
    _ProcessColumn("r", "RSS", 9, lambda row: row.rss, lambda row, _: size_or_unknown(row.rss)),
    _ProcessColumn("g", "GPU", 8, lambda row: row.gpu, lambda row, _: "–" if row.gpu is None else format_size(row.gpu)),
)


def bar(share: float, width: int = _BAR_WIDTH) -> str:
    """A share as a bar: at least one cell above 0 %, and not all cells below 100 %."""
    share = min(1.0, max(0.0, share))
    full = round(share * width)
    if 0 < share < 1:
        full = min(width - 1, max(1, full))
    return "█" * full + "░" * (width - full)


def history_line(shares: Sequence[float | None]) -> str:
    """Shares as columns of eight heights; a dot where unknown."""
    return "".join("·" if share is None else _HEIGHTS[min(7, max(0, int(min(1.0, share) * 8)))] for share in shares)


def pool_line(pool: Pool, points: Sequence[PoolPoint], level: str | None, width: int) -> Text:
    """A pool: bar, figures, and history in the rest of the width."""
    line = _line(f"{pool.name:<{_NAME_WIDTH}}")
    if pool.size == 0:
        return line.append(say("none"), style="dim")
    share = pool.used_share
    if share is None or pool.used is None or pool.size is None:
        why = pool.reason or pool.source
        line.append(say("unknown: {reason}", reason=why), style="italic")
        line.truncate(width, overflow="ellipsis")
        return line
    style = {"critical": "bold red", "warning": "bold yellow"}.get(level or "", "")
    line.append(bar(share), style=style or "cyan")
    line.append(f" {share * 100:>4.0f}%", style=style)
    figures = say("{used} of {size}", used=format_size(pool.used), size=format_size(pool.size))
    line.append("  " + left(figures, 18))
    room = width - line.cell_len - 2
    if room >= 8 and points:
        line.append("  " + history_line(column_shares(points, room)), style="cyan")
    return line


def alarm_lines(alarms: Sequence[Alarm], width: int, most: int) -> list[Text]:
    """Active alarms, the worst first, at most ``most``."""
    if not alarms:
        return [Text(say("no alarms"), style="dim")]
    lines = []
    for alarm in alarms[:most]:
        style = "bold red" if alarm.level == "critical" else "bold yellow"
        line = _line(left(heading(alarm.level), 9), style)
        line.append(alarm.message)
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if len(alarms) > most:
        more = f" ({say('and {count} more', count=len(alarms) - most)})"
        lines[-1].truncate(max(0, width - cells(more)), overflow="ellipsis")
        lines[-1].append(more, style="dim")
    return lines


def fact_lines(sample: Sample, width: int) -> list[Text]:
    """What the kernel, the script and the cache report, a line each; empty ones are left out."""
    counts = sample.events
    kernel = [
        say("swap {into}/s in, {out}/s out", into=_rate(sample.swap_in), out=_rate(sample.swap_out)),
        *(
            say("{scope} stalled {share:.1f}%", scope=scope_name(one.scope), share=one.some_avg10)
            for one in sample.pressure
        ),
        say("OOM kills {kills}", kills=say("unknown") if counts.oom_kills is None else counts.oom_kills),
    ]
    said = sample.said
    script = [] if said.phase is None else [printable(said.phase)]
    if said.steps is not None:
        rate = said.steps_per_second
        script.append(counted(said.steps, phrase("{count} step"), phrase("{count} steps")))
        script.append(say("unknown steps/s") if rate is None else say("{rate:.2f} steps/s", rate=rate))
    components = [f"{printable(name)} {format_size(size)}" for name, size in said.components.items()]
    lines = [
        (say("kernel"), kernel),
        (say("script"), script),
        (say("memory"), components),
        (say("cache"), _cache_summary(sample.entries)),
        *((say("share"), _group_summary(group)) for group in sample.groups or ()),
        *((say("copies"), _gpu_copy_summary(copy)) for copy in sample.gpu_copies or ()),
    ]
    found = []
    for name, words in lines:
        if words:
            line = _line(left(name, _NAME_WIDTH + 1))
            line.append(" · ".join(words))
            line.truncate(width, overflow="ellipsis")
            found.append(line)
    return found


def process_lines(sample: Sample, sort: str, width: int) -> list[Text]:
    """A heading and the processes, the largest first; unknown sorts last."""
    shown = [column for column in _COLUMNS if column.key != "g" or _has_gpus(sample)]
    sorting = next((column for column in shown if column.key == sort), shown[0])
    head = Text(f"{'pid':>7}", no_wrap=True, style="bold")
    for column in shown:
        name = ("▾" if column is sorting else "") + say(column.name)
        head.append(right(name, column.width), style="reverse" if column is sorting else "")
    head.append("  " + say("command"))
    rows = sorted(sample.processes, key=lambda row: _sort_key(sorting.value(row), row.pid))
    lines = [head]
    for row in rows[:MOST_ROWS]:
        line = Text(f"{row.pid:>7}", no_wrap=True)
        for column in shown:
            text = column.text(row, sample.clock)
            dim = text in (say("unknown"), say("not yet"), "–")
            line.append(right(text, column.width), style="dim" if dim else "")
        line.append("  " + short_command(printable(row.command), width - line.cell_len - 2))
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if len(rows) > MOST_ROWS:
        lines.append(Text(say("and {count} more", count=len(rows) - MOST_ROWS), style="dim"))
    return lines


def stacked_lines(frames: Sequence[ProcessFrame], width: int, listed: Collection[int] | None = None) -> list[Text]:
    """RAM over time as columns: the largest processes from the bottom up, then the other ones, then the rest in use.

    Only processes that are ``listed`` below it have a digit; the others may have ended. None: all.
    """
    pids = _numbered(frames, listed)
    totals = [max(frame.used or 0, sum(point.taken for point in frame.points) + frame.others) for frame in frames]
    top = max(totals, default=0)
    if len(frames) < 2 or not top:
        return []
    room = max(10, width - 12)
    chosen = [at * len(frames) // min(room, len(frames)) for at in range(min(room, len(frames)))]
    columns = [_layers(frames[at], pids, totals[at]) for at in chosen]
    lines = []
    for row in reversed(range(_STACK_ROWS)):
        level = (row + 0.5) / _STACK_ROWS * top
        label = format_size(top * (row + 1) // _STACK_ROWS) if row in (_STACK_ROWS - 1, _STACK_ROWS // 2 - 1) else ""
        line = Text(right(label, 9) + " ", no_wrap=True)
        for edges in columns:
            layer = bisect_right(edges, level)
            line.append(*((" ", "") if layer == len(edges) else (_layer_mark(layer, pids), _LAYER_STYLES[layer])))
        lines.append(line)
    text = say("digits: processes below; +: others, also ended ones; ░: rest of RAM in use")
    return [*lines, Text(cut(text, width), style="dim")]


def _numbered(frames: Sequence[ProcessFrame], listed: Collection[int] | None) -> list[int]:
    """The processes that have a digit of their own, the largest first."""
    found = largest_pids(list(frames), None)
    return [pid for pid in found if listed is None or pid in listed][: len(_LAYER_STYLES) - 2]


def _layers(frame: ProcessFrame, pids: Sequence[int], total: int) -> list[int]:
    """The upper edge of each layer: of these processes, of the others, of everything in use."""
    found = {point.pid: point.taken for point in frame.points}
    own = [found.get(pid, 0) for pid in pids] + [0] * (len(_LAYER_STYLES) - 2 - len(pids))
    others = frame.others + sum(size for pid, size in found.items() if pid not in pids)
    return [*accumulate([*own, others]), total]


def _layer_mark(layer: int, pids: Sequence[int]) -> str:
    return str(layer + 1) if layer < len(pids) else "░" if layer == len(_LAYER_STYLES) - 1 else "+"


def process_history_lines(sample: Sample, frames: Sequence[ProcessFrame], sort: str, width: int) -> list[Text]:
    """RAM stacked by process, and for each one what it takes now and its course over time, all with the same scale."""
    sorting = next((column for column in _COLUMNS if column.key == sort), _COLUMNS[0])
    value = taken if sorting.key == "p" else sorting.value
    rows = sorted(sample.processes, key=lambda row: _sort_key(value(row), row.pid))
    top = max((point.taken for frame in frames for point in frame.points), default=0) or 1
    room = max(10, (width - 31) // 2)
    head = f"{'pid':>8}{right(say('takes'), 10)}  {left(say('over time, up to {size}', size=format_size(top)), room)}"
    listed = {row.pid for row in rows[:MOST_ROWS]}
    lines = [*stacked_lines(frames, width, listed), Text(f"{head}  {say('command')}", style="bold", no_wrap=True)]
    digits = {pid: str(at + 1) for at, pid in enumerate(_numbered(frames, listed))}
    for row in rows[:MOST_ROWS]:
        points = [PoolPoint(frame.when, _taken(frame, row.pid), top) for frame in frames]
        line = Text(f"{digits.get(row.pid, '+')}{row.pid:>7}", no_wrap=True)
        mark = "" if is_as_read(row) else "~"
        line.append(f"{right(mark + format_size(taken(row)), 10)}  ")
        line.append(left(history_line(column_shares(points, room)), room), style="cyan")
        line.append("  " + short_command(printable(row.command), width - line.cell_len - 2))
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines


def opened_lines(sample: Sample, frames: Sequence[ProcessFrame], pid: int, width: int) -> list[Text]:
    """One process: its kinds of memory over its steps or over time, and the lines of code that make it grow."""
    row = next((one for one in sample.processes if one.pid == pid), None)
    if row is None:
        return [Text(say("pid {pid} has ended", pid=pid), style="dim")]
    lines = [Text(cut(say("pid {pid}: {command}", pid=pid, command=printable(row.command)), width), style="bold")]
    kinds = (
        (say("anonymous"), row.rss_anon, 2),
        (say("files"), row.rss_file, 3),
        (say("shared memory"), row.rss_shmem, 4),
        (say("swap"), row.swap, 5),
    )
    over_time = [(one.when, next((point for point in one.points if point.pid == pid), None)) for one in frames]
    by_step = over_steps(over_time)
    series: list[tuple[float, ProcessPoint | None]] = [*by_step] or over_time
    top = max((point[at] or 0 for _, point in series if point for _, _, at in kinds), default=0) or 1
    room = max(10, width - 28)
    for name, now, at in kinds:
        points = [PoolPoint(place, None if point is None else point[at], top) for place, point in series]
        line = Text(f"{left(name, 15)}{right(size_or_unknown(now), 10)}  ", no_wrap=True)
        shares = column_shares(points, room)
        line.append(history_line(_without_gaps(shares) if by_step else shares), style="cyan")
        lines.append(line)
    scale = say("all four with the same scale, up to {size}", size=format_size(top))
    if by_step:
        first, last = round(by_step[0][0]), round(by_step[-1][0])
        scale = say("{scale}; from step {first} to step {last}", scale=scale, first=first, last=last)
    lines.append(Text(cut(scale, width), style="dim"))
    growing = [one for one in sample.said.growing if one.pid == pid]
    for one in growing:
        text = say("{where}: {what}, {rate} (sure: {certainty})", where=one.where, what=one.what, rate=growth_rate(one),
                   certainty=one.certainty)  # fmt: skip
        lines.append(Text(cut(text, width), style="yellow"))
    if not growing:
        lines.append(Text(say("no line of code is known to make it grow (see legroom leak)"), style="dim"))
    return lines


def _without_gaps(shares: Sequence[float | None]) -> list[float | None]:
    """Each unknown share as the one before it: between two samples may lie more steps than fit into a column."""
    found: list[float | None] = []
    for share in shares:
        found.append(found[-1] if share is None and found else share)
    return found


def growth_rate(row: GrowthRow) -> str:
    """Bytes per step, or per second."""
    size = format_size(round(row.rate))
    return say("{size} per step", size=size) if row.per == "step" else say("{size} per second", size=size)


def _taken(frame: ProcessFrame, pid: int) -> int | None:
    return next((point.taken for point in frame.points if point.pid == pid), None)


def entry_lines(entries: Sequence[EntryRow] | None, width: int) -> list[Text]:
    """The entries of the shared cache."""
    if not entries:
        return [Text(say("cache not read") if entries is None else say("no cache entries"), style="dim")]
    lines = [
        Text(
            f"{right(say('bytes'), 10)}  {left(say('stored in'), 8)} {left(say('in use'), 8)} {say('source')}",
            style="bold",
            no_wrap=True,
        )
    ]
    for entry in entries:
        used = say("unknown") if entry.in_use is None else say("yes") if entry.in_use else say("no")
        line = Text(f"{format_size(entry.bytes):>10}  {entry.backing:<8} {left(used, 8)} ", no_wrap=True)
        line.append(cut_front(printable(entry.source), max(1, width - line.cell_len)))
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines


def head_line(sample: Sample | None, status: str, width: int) -> Text:
    """What is watched, and the time of the sample."""
    line = _line("legroom watch")
    stamp = "" if sample is None else time.strftime("%H:%M:%S", time.localtime(sample.when))
    end = f"{status}  {stamp}" if status else stamp
    room = width - line.cell_len - cells(end) - 4
    what = say("waiting for the first reading") if sample is None else printable(sample.watched)
    if room > 3:
        shown = Text(f"  {what}", no_wrap=True)
        shown.truncate(room + 2, overflow="ellipsis")
        line.append_text(shown)
    line.append(" " * max(2, width - line.cell_len - cells(end)) + end, style="bold" if status else "")
    line.truncate(width)
    return line


def level_by_pool(alarms: Sequence[Alarm]) -> Mapping[str, str]:
    """The worst level of the active alarms of each pool."""
    levels: dict[str, str] = {}
    for alarm in alarms:
        if alarm.pool is not None and levels.get(alarm.pool) != "critical":
            levels[alarm.pool] = alarm.level
    return levels


def _line(name: str, style: str = "bold") -> Text:
    """A line that starts with a styled name."""
    return Text(no_wrap=True).append(name, style=style)


def _cache_summary(entries: Sequence[EntryRow] | None) -> list[str]:
    if not entries:
        return []
    size = format_size(sum(entry.bytes for entry in entries))
    used = sum(entry.in_use is True for entry in entries)
    return [
        counted(len(entries), phrase("{count} entry"), phrase("{count} entries")),
        size,
        say("{used} in use (press c to list)", used=used),
    ]


def _gpu_copy_summary(copy: GpuCopyRow) -> list[str]:
    users = counted(len(copy.users), phrase("{count} process"), phrase("{count} processes"))
    pids = listed(map(str, copy.users))
    return [printable(copy.name), format_size(copy.bytes), say("one copy for {users} ({pids})", users=users, pids=pids)]


def _group_summary(group: GroupRow) -> list[str]:
    words = [printable(group.name)]
    if group.producer is not None:
        words.append(say("{batches} of {most} batches ready", batches=group.batches, most=group.most_batches))
        words.append(say("made by {pid}", pid=group.producer))
    words += [f"{one.pid} {trainer_state(one)}" for one in group.trainers]
    return words if group.error is None else [*words, say("error: {error}", error=printable(group.error))]


def _rate(value: float | None) -> str:
    return size_or_unknown(None if value is None else int(value))


def _pss(row: ProcessRow) -> str:
    """PSS as read; with ~ what it is by now, with ≤ RSS, which it cannot exceed."""
    estimate = row.pss_estimate
    if estimate is None:
        return say("not yet") if row.pss_at is None else say("unknown")
    if row.pss is None:
        return f"≤{format_size(estimate)}"
    return format_size(row.pss) if is_as_read(row) else f"~{format_size(estimate)}"


def _age(row: ProcessRow, clock: float) -> str:
    if row.pss is None or row.pss_at is None:
        if row.rss is None:
            return ""  # PSS has the word
        return say("not yet") if row.pss_at is None else say("unknown")
    seconds = max(0, int(clock - row.pss_at))
    return f"{seconds} s" if seconds < 60 else format_duration(seconds - seconds % 60)


def _has_gpus(sample: Sample) -> bool:
    return any(pool.name.startswith("gpu") and pool.size for pool in sample.pools)


def _sort_key(value: int | None, pid: int) -> tuple[bool, int, int]:
    return value is None, -(value or 0), pid
