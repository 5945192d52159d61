"""The report of a supervised run as a page: the diagnosis, the chart and the fixes for every attempt."""

from __future__ import annotations

import shlex
import time

from legroom.charts.page import bullets, element, figure, page, table
from legroom.charts.pool_chart import amount, pool_chart
from legroom.model import AlarmSpan, PoolPoint
from legroom.model.death import Attempt, Story
from legroom.rescue.because import ended, headline
from legroom.units import format_duration
from legroom.words import counted, phrase, say


def run_page(story: Story) -> str:
    """The whole page."""
    body = [element("pre", shlex.join(story.command)), element("p", _started(story), "soft")]
    if story.stopped and story.verdict is not None:
        body.append(element("p", say("Not restarted: {why}.", why=story.stopped)))
    for attempt in story.attempts:
        body += _attempt(attempt)
    return page(_title(story), body)


def _title(story: Story) -> str:
    count = len(story.attempts)
    if story.verdict is None or story.attempts[-1].finished:
        return say("Finished after {count} attempts", count=count) if count > 1 else say("Finished")
    attempts = counted(count, phrase("{count} attempt"), phrase("{count} attempts"))
    return say("Ended by {cause} after {attempts}", cause=story.verdict.cause, attempts=attempts)


def _started(story: Story) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(story.began))
    took = format_duration(sum(attempt.seconds for attempt in story.attempts))
    return say(
        "Started {began}, ran for {took}, in {isolation}.", began=began, took=took, isolation=story.isolation
    )


def _attempt(attempt: Attempt) -> list[str]:
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
        parts.append(bullets(verdict.evidence or (ended(attempt.ending),)))
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
    # A reading has no word on when an alarm ended: the band is as wide as its beginning.
    alarms = [AlarmSpan(a.code, a.pool, a.level, a.message, a.since, a.since) for a in attempt.alarms]
    return [figure(pool_chart(pools, (), alarms, start=0.0, listed=False))]


def _alarms(attempt: Attempt) -> str:
    """What was reported while it ran, with the numbers that the chart has."""
    rows = [
        (str(number), format_duration(alarm.since), alarm.level, alarm.code, alarm.message)
        for number, alarm in enumerate(attempt.alarms, start=1)
    ]
    names = ("", say("when"), say("level"), say("code"), say("message"))
    return table(say("Alarms"), names, rows) if rows else ""


def _peaks(attempt: Attempt) -> str:
    rows = [
        (name, amount(name, level.used), amount(name, level.size), f"{level.share * 100:.0f} %")
        for name, level in sorted(attempt.peaks.items())
    ]
    return table(say("Pools"), (say("pool"), say("peak"), say("size"), say("share")), rows) if rows else ""
