"""What the terminal view says, line by line, for a screen of so many columns. Pure.

Covers: bars, history lines, pools, alarms, processes, cache entries, what scripts say. Does not cover: the screen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from legroom.columns import cells, left, right
from legroom.model import Alarm, EntryRow, Pool, PoolPoint, ProcessRow, Sample
from legroom.model.advice import heading, scope_name
from legroom.monitor.timeline import column_shares
from legroom.units import format_duration, format_size
from legroom.words import phrase, say

_LEVELS = "▁▂▃▄▅▆▇█"
_BAR = 16
_NAME = 6
MOST_ROWS = 300


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the processes: its key, what it sorts by, its text."""

    key: str
    name: str
    width: int
    of: Callable[[ProcessRow], int | None]
    text: Callable[[ProcessRow, float], str]


def size_or(count: int | None, otherwise: str | None = None) -> str:
    """A size, or the word for not having it."""
    if count is not None:
        return format_size(count)
    return say("unknown") if otherwise is None else otherwise


COLUMNS = (
    Column("p", "PSS", 9, lambda row: row.pss, lambda row, _: size_or(row.pss, _pss_missing(row))),
    Column("a", phrase("PSS age"), 9, lambda row: None, lambda row, clock: _age(row, clock)),
    Column("m", "RssShmem", 10, lambda row: row.rss_shmem, lambda row, _: size_or(row.rss_shmem)),
    Column("w", "VmSwap", 9, lambda row: row.swap, lambda row, _: size_or(row.swap)),
    Column("r", "RSS", 9, lambda row: row.rss, lambda row, _: size_or(row.rss)),
    Column("g", "GPU", 8, lambda row: row.gpu, lambda row, _: size_or(row.gpu, "–")),
)
SORTS = tuple(column.key for column in COLUMNS if column.key != "a")


def bar(share: float, width: int = _BAR) -> str:
    """A share as cells; at least one for anything above nothing, and not all of them before it is full."""
    share = min(1.0, max(0.0, share))
    full = round(share * width)
    if 0 < share < 1:
        full = min(width - 1, max(1, full))
    return "█" * full + "░" * (width - full)


def history_line(shares: Sequence[float | None]) -> str:
    """Shares as columns of eight heights; a dot where nothing is known."""
    return "".join(
        "·" if share is None else _LEVELS[min(7, max(0, int(min(1.0, share) * 8)))] for share in shares
    )


def pool_line(pool: Pool, dots: Sequence[PoolPoint], level: str | None, width: int) -> Text:
    """One pool: its bar, its figures, its history in what is left of the width."""
    line = _begun(f"{pool.name:<{_NAME}}")
    if pool.size == 0:
        return line.append(say("none"), style="dim")
    share = pool.used_share
    if share is None or pool.used is None or pool.size is None:
        why = pool.reason or pool.source
        line.append(say("unknown: {why}", why=why), style="italic")
        line.truncate(width, overflow="ellipsis")
        return line
    style = {"critical": "bold red", "warning": "bold yellow"}.get(level or "", "")
    line.append(bar(share), style=style or "cyan")
    line.append(f" {share * 100:>3.0f} %", style=style)
    figures = say("{used} of {size}", used=format_size(pool.used), size=format_size(pool.size))
    line.append("  " + left(figures, 18))
    room = width - line.cell_len - 2
    if room >= 8 and dots:
        line.append("  " + history_line(column_shares(dots, room)), style="cyan")
    return line


def alarm_lines(alarms: Sequence[Alarm], width: int, most: int) -> list[Text]:
    """The alarms that stand, the worst first, so many of them."""
    if not alarms:
        return [Text(say("no alarms"), style="dim")]
    lines = []
    for alarm in alarms[:most]:
        style = "bold red" if alarm.level == "critical" else "bold yellow"
        line = _begun(left(heading(alarm.level), 9), style)
        line.append(alarm.message)
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if len(alarms) > most:
        more = " " + say("(and {count} more)", count=len(alarms) - most)
        lines[-1].truncate(max(0, width - cells(more)), overflow="ellipsis")
        lines[-1].append(more, style="dim")
    return lines


def fact_lines(sample: Sample, width: int) -> list[Text]:
    """The kernel's word, the script's, the cache's: a line each, where there is something to say."""
    counts = sample.events
    kernel = [
        say("swap {into}/s in, {out}/s out", into=_rate(sample.swap_in), out=_rate(sample.swap_out)),
        *(
            say("{scope} stalled {share:.1f} %", scope=scope_name(one.scope), share=one.some_avg10)
            for one in sample.pressure
        ),
        say("OOM kills {kills}", kills=say("unknown") if counts.oom_kills is None else counts.oom_kills),
    ]
    said = sample.said
    script = [] if said.phase is None else [_printable(said.phase)]
    if said.steps is not None:
        rate = said.steps_per_second
        script.append(say("{count} steps", count=said.steps))
        script.append(say("unknown steps/s") if rate is None else say("{rate:.2f} steps/s", rate=rate))
    holds = [f"{_printable(name)} {format_size(size)}" for name, size in said.components.items()]
    lines = [
        (say("kernel"), kernel),
        (say("script"), script),
        (say("holds"), holds),
        (say("cache"), _cache_summary(sample.entries)),
    ]
    found = []
    for name, words in lines:
        if words:
            line = _begun(left(name, _NAME + 1))
            line.append(" · ".join(words))
            line.truncate(width, overflow="ellipsis")
            found.append(line)
    return found


def process_lines(sample: Sample, sort: str, width: int) -> list[Text]:
    """A heading and the processes, those that hold most first; what is not known sorts last."""
    shown = [column for column in COLUMNS if column.key != "g" or _has_cards(sample)]
    sorting = next((column for column in shown if column.key == sort), shown[0])
    head = Text(f"{'pid':>7}", no_wrap=True, style="bold")
    for column in shown:
        name = ("▾" if column is sorting else "") + say(column.name)
        head.append(right(name, column.width), style="reverse" if column is sorting else "")
    head.append("  " + say("command"))
    rows = sorted(sample.processes, key=lambda row: _place(sorting.of(row), row.pid))
    lines = [head]
    for row in rows[:MOST_ROWS]:
        line = Text(f"{row.pid:>7}", no_wrap=True)
        for column in shown:
            text = column.text(row, sample.clock)
            dim = text in (say("unknown"), say("not yet"), "–")
            line.append(right(text, column.width), style="dim" if dim else "")
        line.append("  " + _printable(row.command))
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if len(rows) > MOST_ROWS:
        lines.append(Text(say("and {count} more", count=len(rows) - MOST_ROWS), style="dim"))
    return lines


def entry_lines(entries: Sequence[EntryRow] | None, width: int) -> list[Text]:
    """The shared cache."""
    if not entries:
        return [Text(say("not looked at") if entries is None else say("no cache entries"), style="dim")]
    lines = [
        Text(
            f"{right(say('bytes'), 10)}  {left(say('kept in'), 8)} {left(say('in use'), 8)} {say('source')}",
            style="bold",
            no_wrap=True,
        )
    ]
    for entry in entries:
        used = say("unknown") if entry.in_use is None else say("yes") if entry.in_use else say("no")
        line = Text(f"{format_size(entry.bytes):>10}  {entry.backing:<8} {left(used, 8)} ", no_wrap=True)
        line.append(_printable(entry.source))
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines


def head_line(sample: Sample | None, note: str, width: int) -> Text:
    """What is watched, and when this was."""
    line = _begun("legroom watch")
    stamp = "" if sample is None else time.strftime("%H:%M:%S", time.localtime(sample.when))
    end = f"{note}  {stamp}" if note else stamp
    room = width - line.cell_len - cells(end) - 4
    what = say("waiting for the first sample") if sample is None else _printable(sample.watched)
    if room > 3:
        shown = Text(f"  {what}", no_wrap=True)
        shown.truncate(room + 2, overflow="ellipsis")
        line.append_text(shown)
    line.append(" " * max(2, width - line.cell_len - cells(end)) + end, style="bold" if note else "")
    line.truncate(width)
    return line


def worst_by_pool(alarms: Sequence[Alarm]) -> Mapping[str, str]:
    """The worst level that stands for each pool."""
    worst: dict[str, str] = {}
    for alarm in alarms:
        if alarm.pool is not None and worst.get(alarm.pool) != "critical":
            worst[alarm.pool] = alarm.level
    return worst


def _begun(name: str, style: str = "bold") -> Text:
    """A line that begins with a name; what is appended is plain."""
    return Text(no_wrap=True).append(name, style=style)


def _cache_summary(entries: Sequence[EntryRow] | None) -> list[str]:
    if not entries:
        return []
    held = format_size(sum(entry.bytes for entry in entries))
    used = sum(entry.in_use is True for entry in entries)
    return [
        say("{count} entries", count=len(entries)),
        held,
        say("{used} in use (c shows them)", used=used),
    ]


def _rate(value: float | None) -> str:
    return say("unknown") if value is None else format_size(int(value))


def _pss_missing(row: ProcessRow) -> str:
    return say("not yet") if row.pss_at is None else say("unknown")


def _age(row: ProcessRow, clock: float) -> str:
    if row.pss is None or row.pss_at is None:
        return ""
    seconds = max(0, int(clock - row.pss_at))
    return f"{seconds} s" if seconds < 60 else format_duration(seconds - seconds % 60)


def _has_cards(sample: Sample) -> bool:
    return any(pool.name.startswith("gpu") and pool.size for pool in sample.pools)


def _place(value: int | None, pid: int) -> tuple[bool, int, int]:
    return value is None, -(value or 0), pid


def _printable(text: str) -> str:
    """A process can be called anything, and a screen must not be driven by it."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
