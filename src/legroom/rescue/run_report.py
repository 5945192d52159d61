"""The report of a supervised run: JSON for `--json`, and FILE.json and FILE.html for `--report FILE`."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from pathlib import Path
from typing import Any

from legroom.charts.html_page import bullets, element, figure, page, table
from legroom.charts.pool_and_process_charts import amount, pool_chart
from legroom.messages import counted, phrase, say
from legroom.records.failure import Attempt, SupervisedRun, exit_line, headline
from legroom.records.watch_sample import AlarmSpan, PoolPoint
from legroom.rescue.retry_settings import SHORT_NAMES
from legroom.rescue.verdict import verdict_object
from legroom.system.atomic_file import replace_file
from legroom.units import format_duration


def run_object(run: SupervisedRun) -> dict[str, Any]:
    """The run as JSON; ``verdict`` is the last attempt's, null if it succeeded."""
    last = run.verdict
    return {
        "schema": "legroom.run/1",
        "command": list(run.command),
        "exit": run.ending.shell_status,
        **verdict_object(last),
        "isolation": run.isolation,
        "stopped": run.stopped,
        "began": run.began,
        "own_cpu_seconds": run.own_cpu,
        "attempts": [_attempt_object(attempt) for attempt in run.attempts],
    }


def _attempt_object(attempt: Attempt) -> dict[str, Any]:
    victim = attempt.verdict.victim if attempt.verdict is not None else None
    return {
        "number": attempt.number,
        "command": list(attempt.command),
        "settings": {SHORT_NAMES.get(name, name): value for name, value in attempt.settings.given().items()},
        "changed": list(attempt.changed),
        "resumed_from": attempt.resumed_from,
        "notes": list(attempt.notes),
        "seconds": round(attempt.seconds, 3),
        "ending": dataclasses.asdict(attempt.ending),
        "exit": attempt.ending.shell_status,
        **verdict_object(attempt.verdict),
        "finished": attempt.finished,
        "victim": None if victim is None else dataclasses.asdict(victim),
        "peaks": {name: dataclasses.asdict(level) for name, level in attempt.peaks.items()},
        "alarms": [dataclasses.asdict(alarm) for alarm in attempt.alarms],
        "readings": [
            {
                "when": round(reading.when, 3),
                "levels": {name: [level.used, level.size] for name, level in reading.levels.items()},
                "oom_kills": reading.oom_kills,
                "swapped_back": reading.swapped_back,
                "stalled": reading.stalled,
            }
            for reading in attempt.readings
        ],
    }


def report_paths(path: str | Path) -> tuple[str, str]:
    """FILE.json and FILE.html, for either as FILE."""
    base = Path(path)
    stem = base.with_suffix("") if base.suffix in (".json", ".html") else base
    return f"{stem}.json", f"{stem}.html"


def write_report(run: SupervisedRun, path: str) -> tuple[str, str]:
    """Write FILE.json and FILE.html; return their paths."""
    names = report_paths(path)
    replace_file(names[0], json.dumps(run_object(run), ensure_ascii=False, indent=1))
    replace_file(names[1], run_page(run))
    return names


def run_page(run: SupervisedRun) -> str:
    """The whole page."""
    body = [element("pre", shlex.join(run.command)), element("p", _started(run), "soft")]
    if run.stopped and run.verdict is not None:
        body.append(element("p", say("Not restarted: {why}.", why=run.stopped)))
    for attempt in run.attempts:
        body += _attempt_section(attempt)
    return page(_title(run), body)


def _title(run: SupervisedRun) -> str:
    count = len(run.attempts)
    if run.verdict is None or run.attempts[-1].finished:
        return say("Finished after {count} attempts", count=count) if count > 1 else say("Finished")
    attempts = counted(count, phrase("{count} attempt"), phrase("{count} attempts"))
    return say("Ended by {cause} after {attempts}", cause=run.verdict.cause, attempts=attempts)


def _started(run: SupervisedRun) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began))
    took = format_duration(sum(attempt.seconds for attempt in run.attempts))
    return say("Started {began}, ran for {took}, in {isolation}.", began=began, took=took, isolation=run.isolation)


def _attempt_section(attempt: Attempt) -> list[str]:
    took = format_duration(attempt.seconds)
    parts = [element("h2", say("Attempt {number}: {took}", number=attempt.number, took=took))]
    changes = [*attempt.changed]
    if attempt.resumed_from:
        changes.append(say("resumed from {path}", path=attempt.resumed_from))
    parts += [bullets([*changes, *attempt.notes]), element("pre", shlex.join(attempt.command))]
    verdict = attempt.verdict
    if attempt.finished:
        parts.append(element("p", say("It finished."), "verdict fine"))
    if verdict is not None:
        heading, summary = element("b", headline(verdict)), element("span", verdict.summary)
        parts.append(f'<p class="verdict">{heading}<br>{summary}</p>')
        parts.append(bullets(verdict.evidence or (exit_line(attempt.ending),)))
        parts.append(bullets([f"{one.cause}: {one.why}" for one in verdict.likely]))
    parts += [*_chart(attempt), _alarms(attempt), _peaks(attempt)]
    if verdict is not None and verdict.fix:
        parts += [element("h3", say("What to do")), bullets(verdict.fix)]
    return parts


def _chart(attempt: Attempt) -> list[str]:
    """Every pool up to the end of the attempt, with the numbers of its alarms."""
    names = sorted({name for reading in attempt.readings for name in reading.levels})
    if not names:
        return []
    pools = {
        name: [
            PoolPoint(reading.when, level.used, level.size) if (level := reading.levels.get(name)) is not None
            else PoolPoint(reading.when, None, None)
            for reading in attempt.readings
        ]
        for name in names
    }  # fmt: skip
    # Readings do not record when an alarm ended: mark only its start.
    alarms = [AlarmSpan(a.code, a.pool, a.level, a.message, a.since, a.since) for a in attempt.alarms]
    return [figure(pool_chart(pools, (), alarms, start=0.0, listed=False))]


def _alarms(attempt: Attempt) -> str:
    """The alarms raised during the run, with their numbers in the chart."""
    rows = [
        (str(number), format_duration(alarm.since), alarm.level, alarm.code, alarm.message)
        for number, alarm in enumerate(attempt.alarms, start=1)
    ]
    names = ("", say("when"), say("level"), say("code"), say("message"))
    return table(say("Alarms"), names, rows) if rows else ""


def _peaks(attempt: Attempt) -> str:
    rows = [
        (name, amount(name, level.used), amount(name, level.size), f"{level.share * 100:.0f}%")
        for name, level in sorted(attempt.peaks.items())
    ]
    return table(say("Resources"), (say("resource"), say("peak"), say("size"), say("share")), rows) if rows else ""
