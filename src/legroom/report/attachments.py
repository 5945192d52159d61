"""Files that the user adds to a bundle: the log of a training run, the report of a run, the log of a watch.

Of each only the end is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from legroom.errors import DamagedSource, UnreadableSource
from legroom.monitor.watch_log import SCHEMA as WATCH
from legroom.records import Box
from legroom.records.failure import Evidence
from legroom.report.bundle import Attachments, Part
from legroom.report.redact import shape_of
from legroom.rescue.log_reader import read_log
from legroom.rescue.verdict import classify, verdict_object, with_fixes
from legroom.words import say

LOG_END = 256 << 10  # bytes
_WATCH_END = 8 << 20
_LARGEST_RUN = 64 << 20
_MOST_ALARMS = 50
_MOST_READINGS = 60  # of an attempt: its last minute or more
_MOST_ATTEMPTS = 20
_RUN = "legroom.run/1"


def attached_parts(attachments: Attachments, box: Box) -> Iterator[Part]:
    """The parts from these files; an error where one of them is something else."""
    if attachments.log is not None:
        facts = read_log(attachments.log)
        evidence = Evidence(log=facts)
        verdict = with_fixes(classify(evidence), evidence, box)
        yield Part("explain.json", say("diagnosis of the failure, from the log"), verdict_object(verdict))
        yield Part(
            "training.log", say("the end of the training log"), log_end(_end(attachments.log, LOG_END))
        )
    if attachments.run is not None:
        yield Part("run.json", say("the report of legroom run"), run_report(attachments.run))
    if attachments.watch is not None:
        yield Part(
            "watch.json",
            say("the last alarms and the last sample of the watch"),
            watch_end(attachments.watch),
        )


def log_end(data: bytes) -> str:
    """Whole lines: half of a name at the beginning would not be recognized."""
    text = data.decode("utf-8", "replace")
    if len(data) < LOG_END:
        return text
    first = re.search(r"[\r\n]", text) or re.search(r"\s", text)
    return text[first.end() :] if first is not None else ""


def run_report(path: str) -> dict[str, Any]:
    """The report of a run with the last readings of each attempt."""
    try:
        found = json.loads(_end(path, _LARGEST_RUN))
        if not isinstance(found, dict) or found.get("schema") != _RUN:
            raise ValueError(_RUN)
    except (ValueError, RecursionError) as problem:
        raise DamagedSource(
            say("{path} is not the report of a run", path=path),
            why=say("it is not a JSON object with schema {schema}", schema=_RUN),
            fix=(say("pass the .json file that legroom run --report wrote"),),
        ) from problem
    attempts = found.get("attempts")
    for attempt in attempts if isinstance(attempts, list) else ():
        if isinstance(attempt, dict) and isinstance(attempt.get("readings"), list):
            attempt["readings"] = attempt["readings"][-_MOST_READINGS:]
    if isinstance(attempts, list):
        found["attempts"] = attempts[-_MOST_ATTEMPTS:]
    return found


def watch_end(path: str) -> dict[str, Any]:
    """The last alarms of a watch, each once, and the last sample."""
    alarms: dict[str, Any] = {}
    last: dict[str, Any] | None = None
    for line in _end(path, _WATCH_END).split(b"\n"):
        try:
            moment = json.loads(line)
        except (ValueError, RecursionError):
            continue  # incomplete, at either end
        if not isinstance(moment, dict) or moment.get("schema") != WATCH:
            continue
        last = moment
        for alarm in moment.get("alarms") or ():
            if isinstance(alarm, dict):
                key = json.dumps([alarm.get("code"), alarm.get("pool"), alarm.get("since")])
                alarms.pop(key, None)
                alarms[key] = alarm  # its newest state, in the order of these
    if last is None:
        raise DamagedSource(
            say("{path} is not the log of a watch", path=path),
            why=say("its last lines have no JSON object with schema {schema}", schema=WATCH),
            fix=(say("pass a file that legroom watch --log wrote"),),
        )
    for row in last.get("processes") or ():
        if isinstance(row, dict) and isinstance(row.get("command"), str):
            row["command"] = shape_of(row["command"])
    return {"alarms": list(alarms.values())[-_MOST_ALARMS:], "last": last}


def _end(path: str, keep: int) -> bytes:
    """The last bytes of a file."""
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - keep))
            return file.read(keep)
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise UnreadableSource(
            say("cannot read {path}", path=path), why=why, fix=(say("pass a file that you can read"),)
        ) from problem
