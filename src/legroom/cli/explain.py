"""`legroom explain`: which memory a log says killed it. Parses, calls, renders; decides nothing."""

from __future__ import annotations

import json

import click

from legroom.cli.layout import labelled, paint, paragraph, steps
from legroom.model.death import Verdict
from legroom.words import say


@click.command()
@click.argument("log", metavar="LOGFILE|-")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(log: str, as_json: bool) -> int:
    """Which memory pool ran out, if one did, from a log alone.

    Reads the end of LOGFILE, or of what comes in on -. Where the log does not
    tell, the verdict is unknown, with the likely causes in order. legroom run
    reads the kernel's counters too, and is surer.
    """
    from legroom.model.death import Evidence
    from legroom.probe.box import snapshot
    from legroom.rescue.classify import classify
    from legroom.rescue.log_reader import read_log
    from legroom.rescue.report import verdict_object
    from legroom.rescue.watched import with_fixes

    facts = read_log(log)
    evidence = Evidence(log=facts)
    verdict = with_fixes(classify(evidence), evidence, snapshot())
    if as_json:
        report = {"schema": "legroom.explain/1", **verdict_object(verdict)}
        report["read"] = {"lines": facts.lines, "bytes_passed_over": facts.skipped}
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        click.echo(as_text(verdict))
    return 0


def as_text(verdict: Verdict) -> str:
    """The verdict as people read it."""
    from legroom.rescue.because import headline

    lines = [
        paint(headline(verdict), "critical" if verdict.memory else "info", bold=True),
        paragraph(verdict.summary, "  ", "  "),
    ]
    lines += [labelled(say("  by:  "), line) for line in verdict.evidence]
    lines += [
        labelled(say("  or:  "), f"{one.cause}: {one.why}")
        for one in verdict.likely
        if one.cause != verdict.cause
    ]
    return "\n".join([*lines, *steps(verdict.fix)])
