"""The report of `legroom leak` as text for the terminal, as JSON, and as a page with a chart over steps.

While a process runs, its own sites go to `legroom watch`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legroom.charts.html_page import element, figure, page, table
from legroom.charts.pool_and_process_charts import GrowthLine, growth_chart
from legroom.leak.find_leaking_lines import diagnose_process
from legroom.leak.record_files import read_file
from legroom.messages import counted, fill, joined, left, listed, phrase, right, say
from legroom.monitor.script_marks_and_steps import annotation_directory, write_growing, write_steps
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.memory_growth import GrowingSite, LeakReport, PoolGrowth, ProcessGrowth, SourceLine
from legroom.units import format_duration, format_size

_KINDS = {
    "python": phrase("objects in {pool}"),
    "tensors": phrase("tensors in {pool}"),
    "graph": phrase("autograd graph in {pool}"),
    "shm-files": phrase("files in /dev/shm"),
    "native": phrase("memory outside Python"),
    "copy-on-write": phrase("copied by the worker"),
    "unknown": phrase("unknown, in {pool}"),
}
_POOLS = {"ram": "RAM", "shm": "shm"}
_CERTAINTY = {"high": phrase("high"), "medium": phrase("medium"), "low": phrase("low")}
_WHERE, _RATE, _SINCE, _FULL, _SURE = 22, 9, 7, 10, 6
_MOST_PROCESSES = 12
_MOST_CHARTED = 6
_MOST_PUBLISHED = 8


@dataclass(frozen=True, slots=True)
class SiteGroup:
    """The same site in one or several processes."""

    site: GrowingSite
    processes: tuple[ProcessGrowth, ...]

    @property
    def full_in(self) -> float | None:
        """Seconds until the pool is full: all these processes fill it."""
        return None if self.site.full_in is None else self.site.full_in / len(self.processes)


def grouped(report: LeakReport) -> list[SiteGroup]:
    """Sites of all processes; the same line in several workers or ranks is one group. The fastest first."""
    groups: dict[tuple[object, ...], list[tuple[GrowingSite, ProcessGrowth]]] = {}
    for process in report.processes:
        for site in process.sites:
            key = (site.kind, site.pool, site.line, site.holder, process.role)
            groups.setdefault(key, []).append((site, process))
    found = [
        SiteGroup(max((site for site, _ in members), key=lambda site: site.rate), tuple(one for _, one in members))
        for members in groups.values()
    ]
    return sorted(found, key=lambda group: -group.site.rate * len(group.processes))


def report_lines(report: LeakReport, width: int = 80) -> list[str]:
    """The report as lines of text."""
    groups = grouped(report)
    judged = [one for one in report.processes if one.reason is None]
    if not groups:
        return _nothing_found(report, judged, width)
    per = say("per s") if all(group.site.per == "second" for group in groups) else say("per step")
    what = width - _WHERE - _RATE - _SINCE - _FULL - _SURE - 5
    head = (
        f"{left(say('where'), _WHERE)} {left(say('what'), what)} {right(per, _RATE)} {right(say('since'), _SINCE)} "
        f"{right(say('full in'), _FULL)} {left(say('sure'), _SURE)}"
    )
    lines = [head.rstrip()]
    for group in groups:
        site = group.site
        kind, *more = fill(kind_text(site), what, "", "").splitlines()
        cells = (
            left(cut_front(where(site), _WHERE), _WHERE),
            left(kind, what),
            right(rate_text(site, per), _RATE),
            right(f"{site.since:.0f}" + (" s" if site.per == "second" else ""), _SINCE),
            right(_full_text(group.full_in), _FULL),
            left(say(_CERTAINTY[site.certainty]), _SURE),
        )
        lines.append(" ".join(cells).rstrip())
        lines += [" " * (_WHERE + 1) + text for text in more]
        lines += fill(detail(group), width, "  ", "  ").splitlines()
    lines += _rest(judged, width)
    lines += _not_judged(report, judged, width)
    return lines


def where(site: GrowingSite) -> str:
    """The line to look at, relative to this directory; or what it is instead of a line.

    All lines that may fill the container, where it was not seen which of them adds how much.
    """
    if site.kind == "copy-on-write":
        return site.holder or say("unknown")
    if site.line is not None:
        others = site.lines[1:] if site.share is None else ()
        return ", ".join((place(site.line), *(str(line.line) for line in others)))
    return say("outside Python") if site.kind == "native" else say("unknown")


def place(line: SourceLine) -> str:
    """``train.py:31``, relative to this directory where it is below it."""
    try:
        path = os.path.relpath(line.file) if os.path.isabs(line.file) else line.file
    except (OSError, ValueError):  # this directory was removed, or is on another drive
        path = line.file
    return f"{line.file if path.startswith('..') else path}:{line.line}"


def cut_front(text: str, columns: int) -> str:
    """Cut at the front: the end of a path says more."""
    return text if len(text) <= columns else "…" + text[-(columns - 1) :]


def kind_text(site: GrowingSite) -> str:
    """What grows: ``tensors in RAM``."""
    pool = _POOLS.get(site.pool, site.pool.upper() if site.pool.startswith("gpu") else site.pool)
    return say(_KINDS[site.kind], pool=pool)


def rate_text(site: GrowingSite, per: str) -> str:
    """Bytes per step; ``/s`` is added where the column counts steps."""
    text = format_size(round(site.rate))
    return f"{text}/s" if site.per == "second" and per == say("per step") else text


def detail(group: SiteGroup) -> str:
    """The line below a site: what keeps it, where it was made, in which processes."""
    site = group.site
    parts = []
    if site.kind == "copy-on-write":
        parts.append(say("the worker copies {name} page by page when it reads it; share it with legroom.freeze",
                         name=site.holder))  # fmt: skip
    elif site.kind == "graph":
        parts.append(say("{name} keeps the autograd graphs of earlier steps; detach() or item() ends that",
                         name=site.holder))  # fmt: skip
    elif site.holder is not None:
        parts.append(say("kept in {name} ({items})", name=site.holder, items=site.items or say("unknown")))
    elif site.kind == "shm-files":
        parts.append(say("{name} is not removed", name=site.items))
    if len(site.lines) > 1:
        numbers = listed(str(one) for one in sorted(line.line for line in site.lines))
        parts.append(say("filled in lines {numbers}", numbers=numbers))
    if site.share is not None:
        parts.append(_share_text(site, site.share))
    if site.created is not None and site.created != site.line:
        parts.append(say("made at {place}", place=place(site.created)))
    parts += site.why
    if len(group.processes) > 1:
        named = listed(str(one.pid) for one in group.processes[:4])
        parts.append(say("in {count} processes: {pids}", count=len(group.processes), pids=named))
    elif group.processes[0].role != "main":
        parts.append(say("in {name}", name=process_name(group.processes[0])))
    return joined(parts)


def _share_text(site: GrowingSite, share: float) -> str:
    line = site.lines[0].line
    if site.kind == "graph":
        return say("line {line} adds {share:.0%} of the graphs", line=line, share=share)
    return say("line {line} adds {share:.0%} of the bytes", line=line, share=share)


def process_name(process: ProcessGrowth) -> str:
    """``pid 12``, ``worker pid 13``, ``rank 1 (pid 14)``."""
    if process.role == "worker":
        return say("worker pid {pid}", pid=process.pid)
    if process.rank is not None:
        return say("rank {rank} (pid {pid})", rank=process.rank, pid=process.pid)
    return say("pid {pid}", pid=process.pid)


def _full_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return format_duration(seconds) if seconds < 30 * 86400 else say("> 30 d")


def _rest(processes: Sequence[ProcessGrowth], width: int) -> list[str]:
    """How much of each growing pool the sites explain."""
    lines = []
    for process in processes[:_MOST_PROCESSES]:
        for pool in process.pools:
            if pool.growing and pool.explained is not None and process.sites:
                unit = say("per step") if process.per == "step" else say("per second")
                text = say(
                    "{process}: {pool} grows by {rate} {unit}; the lines above explain {share:.0%} of it",
                    process=process_name(process), pool=_POOLS.get(pool.pool, pool.pool),
                    rate=format_size(max(0, round(pool.rate))), unit=unit, share=pool.explained,
                )  # fmt: skip
                lines += fill(text, width, "", "  ").splitlines()
    return lines


def _nothing_found(report: LeakReport, judged: Sequence[ProcessGrowth], width: int) -> list[str]:
    if not report.processes:
        text = say("no Python process was recorded: the command ended at once, or runs Python with -S, -I or -E")
        return fill(text, width, "", "  ").splitlines()
    if not judged:
        longest = max(report.processes, key=lambda one: (one.steps or 0, one.seconds))
        return fill(say("cannot tell whether memory grows: {why}", why=longest.reason), width, "", "  ").splitlines()
    lines = []
    for process in judged[:_MOST_PROCESSES]:
        done = (
            counted(process.steps, phrase("{count} step"), phrase("{count} steps"))
            if process.steps is not None
            else say("no steps seen")
        )
        text = say("no leak found in {process}: {done}, {time}", process=process_name(process), done=done,
                   time=format_duration(process.seconds))  # fmt: skip
        lines += fill(text, width, "", "  ").splitlines()
    return [*lines, *_not_judged(report, judged, width)]


def _not_judged(report: LeakReport, judged: Sequence[ProcessGrowth], width: int) -> list[str]:
    """Main processes that could not be judged: that their workers do not leak, or do, says nothing about them."""
    lines = []
    for process in report.processes[:_MOST_PROCESSES]:
        if process.role == "main" and process not in judged:
            text = say("cannot tell whether memory grows: {why}", why=process.reason)
            lines += fill(f"{process_name(process)}: {text}", width, "", "  ").splitlines()
    return lines


def report_object(report: LeakReport) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "schema": "legroom.leak/1",
        "command": list(report.command),
        "sites": [
            {**site_object(group.site), "full_in": group.full_in, "pids": [one.pid for one in group.processes]}
            for group in grouped(report)
        ],
        "processes": [_process_object(one) for one in report.processes],
    }


def site_object(site: GrowingSite) -> dict[str, Any]:
    """One site as JSON, without its points."""
    line = site.line
    return {
        "kind": site.kind, "pool": site.pool, "file": None if line is None else line.file,
        "line": None if line is None else line.line, "lines": [[one.file, one.line] for one in site.lines],
        "created": None if site.created is None else [site.created.file, site.created.line], "share": site.share,
        "holder": site.holder, "items": site.items, "rate": site.rate, "per": site.per, "since": site.since,
        "growth": site.growth, "rate_per_second": site.rate_per_second, "full_in": site.full_in,
        "certainty": site.certainty, "why": list(site.why),
    }  # fmt: skip


def _process_object(process: ProcessGrowth) -> dict[str, Any]:
    return {
        "pid": process.pid, "parent": process.parent, "command": process.command, "role": process.role,
        "rank": process.rank, "per": process.per, "steps": process.steps, "seconds": process.seconds,
        "reason": process.reason, "notes": list(process.notes),
        "sites": [site_object(site) for site in process.sites],
        "small": [site_object(site) for site in process.small],
        "pools": [_pool_object(pool) for pool in process.pools],
    }  # fmt: skip


def _pool_object(pool: PoolGrowth) -> dict[str, Any]:
    return {"pool": pool.pool, "rate": pool.rate, "growing": pool.growing, "explained": pool.explained}


def leak_page(report: LeakReport) -> str:
    """The report as a page: a table of the lines, and for each process a chart over its steps."""
    groups = grouped(report)
    parts = [
        element("p", " ".join(report.command), "soft"),
        table(
            say("What makes memory grow"),
            (say("where"), say("what"), say("rate"), say("since"), say("full in"), say("sure"), say("details")),
            (
                (
                    where(group.site), kind_text(group.site), _rate_with_unit(group.site), _since_text(group.site),
                    _full_text(group.full_in), say(_CERTAINTY[group.site.certainty]), detail(group),
                )
                for group in groups
            ),
        ),
    ]  # fmt: skip
    for process in report.processes:
        if process.reason is not None and not process.sites:
            parts.append(
                element("p", say("{process}: {why}", process=process_name(process), why=process.reason), "soft")
            )
            continue
        parts.append(element("h2", say("{process}: {command}", process=process_name(process), command=process.command)))
        for pool in process.pools:
            lines = [
                GrowthLine(f"{where(site)} · {kind_text(site)}", site.points)
                for site in process.sites[:_MOST_CHARTED]
                if site.pool == pool.pool and site.points
            ]
            name = _POOLS.get(pool.pool, pool.pool)
            parts.append(figure(growth_chart(name, pool.points, lines, per=process.per)))
    return page(say("Memory that grows"), parts)


def _rate_with_unit(site: GrowingSite) -> str:
    size = format_size(round(site.rate))
    return say("{size} per step", size=size) if site.per == "step" else say("{size} per second", size=size)


def _since_text(site: GrowingSite) -> str:
    if site.per == "step":
        return say("step {number:.0f}", number=site.since)
    return format_duration(site.since)


def publish(records: Path) -> None:
    """Diagnose the records of this process so far, and write the sites to the directory that `legroom watch` reads."""
    record = read_file(records)
    directory = annotation_directory(Host(), create=True)
    if record is None or directory is None:
        return
    found = diagnose_process(record)
    sites = [
        {
            "where": where(site),
            "what": kind_text(site) if site.holder is None else f"{kind_text(site)}: {site.holder}",
            "rate": site.rate,
            "per": site.per,
            "certainty": site.certainty,
        }
        for site in found.sites[:_MOST_PUBLISHED]
    ]
    write_growing(directory, os.getpid(), sites)


def publish_steps(steps: int) -> None:
    """Write how many steps this process has made to the directory that `legroom watch` reads."""
    directory = annotation_directory(Host(), create=True)
    if directory is not None:
        write_steps(directory, os.getpid(), steps)
