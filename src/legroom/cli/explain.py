"""`legroom explain`: diagnose from a log file what ran out; its text and JSON output."""

from __future__ import annotations

import click

from legroom.cli.options import json_option
from legroom.cli.text_layout import labelled, paint, paragraph, print_result, steps
from legroom.messages import say
from legroom.records.failure import Verdict


@click.command()
@click.argument("log", metavar="LOGFILE|-")
@json_option
def command(log: str, as_json: bool) -> int:
    """Read a log file and diagnose what ran out: /dev/shm, RAM, GPU memory, file descriptors or disk.

    Reads the end of LOGFILE; - means standard input. If the log does not
    prove a cause, the diagnosis is "unknown", followed by the likely causes.
    legroom run also reads the kernel's counters, so its diagnosis is more
    reliable.
    """
    from legroom.probe.snapshot import snapshot
    from legroom.records.failure import Evidence
    from legroom.rescue.read_log_file import read_log
    from legroom.rescue.verdict import classify, verdict_object, with_fixes

    facts = read_log(log)
    evidence = Evidence(log=facts)
    verdict = with_fixes(classify(evidence), evidence, snapshot())
    read = {"lines": facts.lines, "bytes_passed_over": facts.skipped}
    print_result(as_json, "explain", lambda: {**verdict_object(verdict), "read": read}, lambda: as_text(verdict))
    return 0


def as_text(verdict: Verdict) -> str:
    """The verdict as text."""
    from legroom.records.failure import headline

    lines = [
        paint(headline(verdict), "critical" if verdict.memory else "info", bold=True),
        paragraph(verdict.summary, "  ", "  "),
    ]
    lines += [labelled(say("  why: "), line) for line in verdict.evidence]
    lines += [
        labelled(say("  or:  "), f"{one.cause}: {one.why}") for one in verdict.likely if one.cause != verdict.cause
    ]
    return "\n".join([*lines, *steps(verdict.fix)])
