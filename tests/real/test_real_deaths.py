"""Every death of the corpus is named rightly when seen, and mostly from its log alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import corpus
import pytest
import rigs

CASES = corpus.cases()
LEAST_FROM_LOGS = 0.85
SURE = 0.8
_judged: dict[str, corpus.Judged] = {}


def _marked(case: corpus.Case, place: str) -> object:
    marks = [pytest.mark.real(*case.needs(place))] if case.needs(place) else []
    return pytest.param(case, place, id=f"{case.name}-{place}", marks=marks)


# The whole corpus in all places is brought about by deaths/table.py; here are all kinds of it, and each place.
LIVE = [_marked(case, place) for case in CASES if case.log is None for place in case.ci]


@pytest.mark.skipif(rigs.why_no_rigs() is not None, reason=str(rigs.why_no_rigs()))
@pytest.mark.parametrize(("case", "place"), LIVE)
def test_diagnosis_of_a_supervised_job(case: corpus.Case, place: str) -> None:
    if "torch" in case.path.read_text():
        pytest.importorskip("torch")
    judged = corpus.judge(case, place)
    if place == "own":
        _judged[case.name] = judged
    assert judged.live is not None
    told = f"{judged.live['evidence']}\n{judged.text[-2000:]}"
    assert case.right(judged.live), f"{judged.live['verdict']}: {told}"
    assert judged.live["exit"] == judged.live["returned"], told
    assert judged.live["exit"] == case.exit if case.exit is not None else judged.live["exit"] != 0, told
    assert judged.live["evidence"] or case.truth == "none"


def test_logs_alone_are_mostly_right_and_never_surer_than_a_supervisor() -> None:
    """Uses the logs that the deaths above wrote; those that were not brought about are left out."""
    judged = [_judged.get(case.name) or corpus.judge(case) for case in CASES if case.log or case.name in _judged]
    judged = [one for one in judged if one.case.exit != 0]  # a job that exits with 0 writes nothing of a death
    tells = [one for one in judged if not one.case.silent]
    wrong = [one for one in judged if not one.case.right(one.log)]
    told = [(one.case.name, one.log["verdict"], one.log["confidence"]) for one in wrong]
    assert sum(one not in wrong for one in tells) / len(tells) >= LEAST_FROM_LOGS, told
    assert all(one.log["confidence"] < SURE for one in wrong), told
    for one in judged:
        if one.log["verdict"] == "unknown":
            assert one.case.truth in [cause["verdict"] for cause in one.log["likely"]], one.case.name
        assert one.log["confidence"] <= 0.85
        if one.live is not None and one.log["verdict"] == one.live["verdict"]:
            assert one.log["confidence"] <= one.live["confidence"]


def test_the_corpus_is_large_and_every_script_is_in_it() -> None:
    scripts = {path.stem for path in corpus.HERE.glob("*.*") if path.suffix in (".py", ".sh")}
    scripts -= {"corpus", "table"}
    assert scripts == {case.name for case in CASES if case.log is None}
    assert len([case for case in CASES if case.log is None and case.truth != "none"]) >= 40
    assert {place for case in CASES if case.log is None for place in case.ci} == set(corpus.PLACES)


@pytest.mark.real("cgroup")
def test_a_fast_oom_kill_shows_the_memory_that_was_used(tmp_path: Path) -> None:
    """It takes all of its memory between two looks."""
    code = "import time; time.sleep(0.3); held = bytearray(b'x') * (400 << 20)"
    run = [sys.executable, "-m", "legroom", "run", "--json", "--quiet", "--", sys.executable, "-c", code]
    with rigs.memory_cgroup(120 << 20) as group:
        done = subprocess.run(group.command(run), capture_output=True, text=True, timeout=240, cwd=tmp_path)
    (attempt,) = json.loads(done.stdout)["attempts"]
    assert attempt["verdict"] == "ram-oom-kill"
    (line,) = (line for line in attempt["evidence"] if "RAM peak of its cgroup" in line)
    share = int(line.rpartition("(")[2].partition("%")[0])
    # Part of the limit is the supervisor's own, which the job's group does not count.
    assert "recorded by the kernel" in line and share > 50, line
