"""How the cache looks: as text, as JSON, and while it loads.

Covers: rendering of `legroom cache`. Does not cover: any looking or removing (legroom.cache).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from legroom.cli.layout import paragraph
from legroom.cli.streams import for_drawing
from legroom.columns import cells, left
from legroom.model import Entry, Finding, Reaped, StoreRoom, Verification
from legroom.units import format_duration, format_size
from legroom.words import listed, say, shown

_SHORT = 12  # digits of a key that people see


class Bar:
    """What a load tells of itself; drawn on a terminal, silent in a pipe."""

    def __init__(self, draw: Any = None) -> None:
        self.moved = False  # whether bytes were loaded, here or by the process waited for
        self._draw = draw

    def told(self, done: int, total: int) -> None:
        self.moved = True
        if self._draw is not None:
            self._draw(done, total)


@contextmanager
def progress(label: str) -> Iterator[Bar]:
    """A progress bar with rate and time left on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=for_drawing(sys.stderr)), transient=True) as drawn:
        task = drawn.add_task(shown(label), total=None)
        yield Bar(lambda done, total: drawn.update(task, completed=done, total=total))


def print_json(verb: str, content: dict[str, Any]) -> None:
    """One object on stdout."""
    click.echo(json.dumps({"schema": f"legroom.{verb}/1", **content}, ensure_ascii=False))


def entry_object(entry: Entry) -> dict[str, Any]:
    """An entry as other programs read it."""
    whole = dataclasses.asdict(entry)
    whole["source"] = entry.sources[0] if entry.sources else None
    return whole


def listing_object(
    found: Sequence[Entry], rooms: Sequence[StoreRoom], passed_over: Sequence[Finding]
) -> dict[str, Any]:
    """The list as other programs read it; ``store`` is the first of ``stores``."""
    stores = [dataclasses.asdict(room) for room in rooms]
    return {
        "store": stores[0] if stores else None,
        "stores": stores,
        "entries": [entry_object(entry) for entry in found],
        "saved": saved(found),
        "findings": [dataclasses.asdict(finding) for finding in passed_over],
    }


def saved(found: Sequence[Entry]) -> int:
    """Bytes that separate copies would have taken on top: one for every user but the first."""
    return sum(entry.bytes * max(0, len(entry.users or ()) - 1) for entry in found)


def listing_text(
    found: Sequence[Entry], rooms: Sequence[StoreRoom], passed_over: Sequence[Finding], what: str | None
) -> str:
    """The list as people read it."""
    lines: list[str] = []
    if not found:
        lines += [say("{what}: not loaded", what=shown(what)) if what else say("the cache is empty"), ""]
    for entry in found:
        lines += [entry_text(entry), ""]
    together = saved(found)
    if together:
        lines.append(say("saved against separate copies: {size}", size=format_size(together)))
    for room in rooms:
        told = say(
            "{backing} store {path}: {used} in entries, {free} free for more (bound by {bound})",
            backing=room.backing, path=room.path, used=format_size(room.used), free=format_size(room.free),
            bound=room.bound_by,
        )  # fmt: skip
        lines.append(paragraph(told, "", "  "))
    lines += [
        paragraph(
            say("{name}: {why}", name=finding.message, why=finding.why) + f" [{finding.code}]", "", "  "
        )
        for finding in passed_over
        if finding.severity != "info"
    ]
    return "\n".join(lines).rstrip()


def entry_text(entry: Entry, *, attributes: bool = False) -> str:
    """One entry: file, digest, each array with its size, who uses it."""
    lines = [_source(entry)]
    if entry.damaged is not None:
        lines += [f"  {entry.key}", say("  damaged: {why}", why=entry.damaged)]
        return "\n".join(lines)
    if entry.unreadable is not None:
        lines += [f"  {entry.key}", say("  cannot be read: {why}", why=entry.unreadable)]
        return "\n".join(lines)
    lines.append(f"  {(entry.hash or '').upper():<8}{entry.digest}")
    if entry.key != entry.digest:
        lines.append(f"  {left(say('key'), 8)}{entry.key}")
    names = [*entry.arrays, *entry.tables]
    column = max((cells(shown(name)) for name in names), default=0)
    for name, array in entry.arrays.items():
        shape = "×".join(map(str, array.shape)) or say("scalar")
        lines.append(f"  {left(shown(name), column)}  {format_size(array.bytes):>8}  {shape} {array.dtype}")
        if attributes:
            lines += _attribute_lines(array.attributes, "    ")
    for name, table in entry.tables.items():
        size = format_size(table.bytes)
        told = say("{rows} rows: {columns}", rows=table.rows, columns=listed(map(shown, table.columns)))
        lines.append(paragraph(told, f"  {left(shown(name), column)}  {size:>8}  ", "    "))
    lines.append("  " + _state(entry))
    for user in entry.users or ():
        own = say("unknown") if user.privatised is None else format_size(user.privatised)
        lines.append(
            paragraph(
                say("{pid} {command} (privatised {own})", pid=user.pid, command=user.command, own=own),
                "    ",
                "      ",
            )
        )
    if attributes:
        lines += _attribute_lines(entry.attributes, "  ")
        lines += [say("  built by {who}", who=entry.built_by or say("unknown"))]
    return "\n".join(lines)


def _source(entry: Entry) -> str:
    """The file behind an entry; of several the first, and how many more."""
    if not entry.sources:
        return say("source unknown")
    if len(entry.sources) == 1:
        return shown(entry.sources[0])
    return say("{first} and {count} more", first=shown(entry.sources[0]), count=len(entry.sources) - 1)


def _attribute_lines(attributes: Mapping[str, Any], indent: str) -> list[str]:
    return [
        f"{indent}@{shown(name)}: {shown(json.dumps(value, ensure_ascii=False, default=str))}"
        for name, value in attributes.items()
    ]


def _state(entry: Entry) -> str:
    now = time.time()
    if entry.users:
        use = say("used by {count}", count=len(entry.users))
    elif entry.in_use:
        use = say("in use by a process that cannot be seen from here")
    else:
        use = say("not in use")
    told = say("{size} in {backing}, {use}", size=format_size(entry.bytes), backing=entry.backing, use=use)
    if entry.created is not None:
        told = say("{told}, built {age} ago", told=told, age=format_duration(max(0.0, now - entry.created)))
    if entry.last_used is not None:
        told = say(
            "{told}, opened {age} ago", told=told, age=format_duration(max(0.0, now - entry.last_used))
        )
    return told


def loaded_line(entry: Entry, seconds: float, *, built: bool) -> str:
    """One line about one load."""
    name = _source(entry) if entry.sources else entry.key
    what = say("{name}: {size} in {backing}", name=name, size=format_size(entry.bytes), backing=entry.backing)
    if not built:
        return say("{what}, was there already ({time})", what=what, time=format_duration(seconds))
    rate = format_size(int(entry.bytes / seconds)) if seconds > 0 else "?"
    return say("{what}, loaded in {time} ({rate}/s)", what=what, time=format_duration(seconds), rate=rate)


def reaped_object(gone: Reaped) -> dict[str, Any]:
    """What was removed, as other programs read it."""
    return {
        "removed": [entry_object(entry) for entry in gone.entries],
        "kept": [entry_object(entry) for entry in gone.kept],
        "freed": gone.freed,
        "strays": gone.strays,
        "dry_run": gone.dry_run,
        "short": [dataclasses.asdict(one) for one in gone.short],
    }


def reaped_text(gone: Reaped) -> str:
    """What was removed, as people read it."""
    verb = say("would remove") if gone.dry_run else say("removed")
    lines = [f"{verb} {_named(entry)}" for entry in gone.entries]
    lines += [say("kept {name}: in use", name=_named(entry)) for entry in gone.kept]
    lines.append(
        say(
            "{verb} in all: {freed} in entries ({count}), leftovers of dead processes: {strays}",
            verb=verb, count=len(gone.entries), freed=format_size(gone.freed), strays=gone.strays,
        )
    )  # fmt: skip
    for one in gone.short:
        told = say(
            "{store}: still {missing} short of what was asked for (bound by {bound})",
            store=one.store, missing=format_size(one.missing), bound=one.bound_by,
        )  # fmt: skip
        lines.append(paragraph(told, "", "  "))
    return "\n".join(lines)


def _named(entry: Entry) -> str:
    return f"{(entry.key or '')[:_SHORT]} {_source(entry)} ({format_size(entry.bytes)})"


def verified_object(result: Verification) -> dict[str, Any]:
    """A check as other programs read it."""
    return {
        "key": result.entry.key,
        "source": result.entry.sources[0] if result.entry.sources else None,
        "whole": result.whole,
        "damaged": list(result.damaged),
        "source_state": result.source,
        "source_why": result.source_why,
    }


def verified_line(result: Verification) -> str:
    """A check as people read it."""
    copy = (
        say("copy whole")
        if result.whole
        else say("copy DAMAGED: {names}", names=listed(map(shown, result.damaged)))
    )
    source = {
        "same": say("source unchanged"),
        "changed": say("source CHANGED since: {why}", why=result.source_why),
        "missing": say("source gone"),
        "not-checked": say("source not read"),
    }[result.source]
    return say("{name}: {copy}, {source}", name=_named(result.entry), copy=copy, source=source)
