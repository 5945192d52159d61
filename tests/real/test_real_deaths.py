"""Every death of the corpus is named rightly when seen, and mostly from its log alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import rigs

sys.path.insert(0, str(Path(__file__).parent / "deaths"))

import corpus

from legroom.model.death import MEMORY_CAUSES

CASES = corpus.cases()
LEAST_FROM_LOGS = 0.85
_judged: dict[str, corpus.Judged] = {}


def _marked(case: corpus.Case) -> object:
    marks = [pytest.mark.real(*case.needs)] if case.needs else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.skipif(rigs.why_no_rigs() is not None, reason=str(rigs.why_no_rigs()))
@pytest.mark.parametrize("case", [_marked(case) for case in CASES if case.log is None])
def test_a_death_that_was_seen(case: corpus.Case) -> None:
    if "torch" in (corpus.HERE / f"{case.name}.py").read_text():
        pytest.importorskip("torch")
    judged = _judged[case.name] = corpus.judge(case)
    assert judged.live is not None
    told = f"{judged.live['evidence']}\n{judged.text[-2000:]}"
    assert judged.live["verdict"] == case.truth, told
    assert judged.live["exit"] == judged.live["returned"] != 0
    assert judged.live["evidence"]
    if case.truth not in MEMORY_CAUSES:
        assert judged.live["verdict"] not in MEMORY_CAUSES


def test_logs_alone_say_it_mostly_and_never_surer_than_a_witness() -> None:
    """Uses the logs that the deaths above wrote; those that were not brought about are left out.

    But for the one that needs a swap file: it is brought about in another run, alone, and counts as wrong here.
    """
    judged = [
        _judged.get(case.name) or corpus.judge(case) for case in CASES if case.log or case.name in _judged
    ]
    elsewhere = [case for case in CASES if "swap" in case.needs and case.name not in _judged]
    right = [one for one in judged if one.log["verdict"] == one.case.truth]
    wrong = [(one.case.name, one.log["verdict"]) for one in judged if one not in right]
    assert len(right) / (len(judged) + len(elsewhere)) >= LEAST_FROM_LOGS, wrong
    for one in judged:
        assert one.log["confidence"] <= 0.85
        if one.live is not None and one.log["verdict"] == one.live["verdict"]:
            assert one.log["confidence"] <= one.live["confidence"]


def test_the_corpus_is_large_and_every_script_is_in_it() -> None:
    scripts = {path.stem for path in corpus.HERE.glob("*.py")} - {"corpus", "table"}
    assert scripts == {case.name for case in CASES if case.log is None}
    assert len(scripts) >= 16


@pytest.mark.real("cgroup")
def test_a_fast_oom_kill_shows_the_memory_that_it_died_of(tmp_path: Path) -> None:
    """It takes all of its memory between two looks."""
    code = "import time; time.sleep(0.3); held = bytearray(b'x') * (400 << 20)"
    run = [sys.executable, "-m", "legroom", "run", "--json", "--quiet", "--", sys.executable, "-c", code]
    with rigs.memory_cgroup(120 << 20) as group:
        done = subprocess.run(group.command(run), capture_output=True, text=True, timeout=120, cwd=tmp_path)
    (attempt,) = json.loads(done.stdout)["attempts"]
    assert attempt["verdict"] == "ram-oom-kill"
    (line,) = (line for line in attempt["evidence"] if "at its fullest" in line)
    share = int(line.rpartition("(")[2].partition("%")[0])
    # Part of the limit is the supervisor's own, which the job's group does not count.
    assert "the kernel's own peak" in line and share > 50, line
