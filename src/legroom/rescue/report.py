"""The story of a run as JSON, and written to files. Covers: `--report FILE` and `--json`.

Does not cover: the page for people (report_html.py).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from legroom.model.death import Attempt, Story, Verdict
from legroom.monitor.watch_log import alarm_object
from legroom.system.atomic_file import replace_file


def as_object(story: Story) -> dict[str, Any]:
    """The run as other programs read it; ``verdict`` is the last attempt's, null where nothing was wrong."""
    last = story.verdict
    return {
        "schema": "legroom.run/1",
        "command": list(story.command),
        "exit": story.ending.shell_status,
        **verdict_object(last),
        "isolation": story.isolation,
        "stopped": story.stopped,
        "began": story.began,
        "own_cpu_seconds": story.own_cpu,
        "attempts": [_attempt(attempt) for attempt in story.attempts],
    }


def verdict_object(verdict: Verdict | None) -> dict[str, Any]:
    """A verdict's fields as `explain` and `run` share them."""
    if verdict is None:
        return {"verdict": None, "confidence": None, "summary": None, "likely": [], "evidence": [], "fix": []}
    return {
        "verdict": verdict.cause,
        "confidence": verdict.confidence,
        "summary": verdict.summary,
        "likely": [{"verdict": one.cause, "why": one.why} for one in verdict.likely],
        "evidence": list(verdict.evidence),
        "fix": list(verdict.fix),
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    victim = attempt.verdict.victim if attempt.verdict is not None else None
    return {
        "number": attempt.number,
        "command": list(attempt.command),
        "settings": {name: value for name, value in attempt.settings.items() if value is not None},
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
        "alarms": [alarm_object(alarm) for alarm in attempt.alarms],
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


def write_report(story: Story, path: str) -> tuple[str, str]:
    """Write FILE.json and FILE.html, whichever of the two FILE names; their paths."""
    from legroom.rescue.report_html import run_page

    base = Path(path)
    stem = base.with_suffix("") if base.suffix in (".json", ".html") else base
    names = (f"{stem}.json", f"{stem}.html")
    replace_file(names[0], json.dumps(as_object(story), ensure_ascii=False, indent=1))
    replace_file(names[1], run_page(story))
    return names
