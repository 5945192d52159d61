"""Real loops, each in a process of its own: what grows is named by its line, and nothing where nothing grows."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_runner import Runner

pytest.importorskip("torch")

from tests.unit.leak import leaking_loops

from legroom.leak.find_leaking_lines import diagnose
from legroom.leak.record_files import read_directory
from legroom.records.memory_growth import LeakReport

pytestmark = pytest.mark.load_sensitive(reason="steps of a few ms: a pause of the process leaves too few samples")

STEPS = 120
PROGRAM = """
import sys, time
folder, name, steps, records = sys.argv[1:]
sys.path.insert(0, folder)
import torch, leaking_loops
from legroom.leak import memory_recorder
from legroom.system.training_step_listeners import step

memory_recorder._WIDER = 0.0  # after a pause at the beginning, samples as often as without it
torch.set_num_threads(1)

def one():
    time.sleep(0.003)
    step()

recorder = memory_recorder.Recorder(records, share=100.0)  # samples are not fewer where other programs use the processor
recorder.start()
getattr(leaking_loops, name)(int(steps), one)
recorder.stop()
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Runner]:
    """Runs programs in forks of a process that has imported torch, and has no other test's objects and threads."""
    process = Runner("numpy", "torch", "torch._dynamo", "legroom.leak.memory_recorder")
    yield process
    process.close()


@pytest.fixture
def record(forks: Runner, tmp_path: Path) -> Callable[[Any], LeakReport]:
    def run(loop: Callable[..., None]) -> LeakReport:
        script, records = tmp_path / "program.py", tmp_path / "records"
        script.write_text(PROGRAM)
        records.mkdir()
        folder = str(Path(leaking_loops.__file__).parent)
        status, output = forks.run(script, tmp_path, dict(os.environ), folder, loop.__name__, str(STEPS), str(records))
        assert status == 0, output
        found = read_directory(records)
        print([sample.step for sample in found[0].samples])  # shown with a failure
        return diagnose(found)

    return run


def _line(loop: Callable[..., None]) -> int:
    """The line with the mark: in the loop, or in what it uses above it."""
    source, first = inspect.getsourcelines(loop)
    for number, text in enumerate(source):
        if "# here" in text:
            return first + number
    whole = inspect.getsource(leaking_loops).splitlines()
    return max(number for number, text in enumerate(whole[:first], 1) if "# here" in text)


@pytest.mark.parametrize("loop", leaking_loops.NAMED, ids=lambda loop: loop.__name__)
def test_the_line_is_named(loop: Any, record: Callable[[Any], LeakReport]) -> None:
    report = record(loop)
    assert report.sites, report
    first = report.sites[0]
    lines = {(one.file, one.line) for one in (*first.lines, first.created) if one is not None}
    assert (leaking_loops.__file__, _line(loop)) in lines, first
    assert first.since < STEPS / 4 and first.rate > 1000 and first.full_in is not None


@pytest.mark.parametrize("loop", leaking_loops.CLEAN, ids=lambda loop: loop.__name__)
def test_nothing_is_named_where_nothing_leaks(loop: Any, record: Callable[[Any], LeakReport]) -> None:
    report = record(loop)
    assert report.processes[0].reason is None, report  # it was judged
    assert not report.sites, report.sites


def test_native_memory_is_called_what_it_is(record: Callable[[Any], LeakReport]) -> None:
    (site,) = record(leaking_loops.malloc).sites
    assert site.kind == "native" and site.line is None and site.holder is None
    assert 70_000 < site.rate < 130_000


def test_memory_mapped_by_a_library_is_native_too(record: Callable[[Any], LeakReport]) -> None:
    (site,) = record(leaking_loops.mapped).sites
    assert site.kind == "native" and site.line is None and 150_000 < site.rate < 350_000


def test_graphs_and_tensors_are_told_apart(record: Callable[[Any], LeakReport]) -> None:
    (site,) = record(leaking_loops.sum_of_losses).sites
    assert site.kind == "graph" and site.holder == "total"


@pytest.mark.parametrize("loop", leaking_loops.TWO_SITES, ids=lambda loop: loop.__name__)
def test_of_several_lines_the_one_that_adds_the_bytes_is_named(loop: Any, record: Callable[[Any], LeakReport]) -> None:
    """And no other: neither where it is kept, nor where it was made."""
    report = record(loop)
    (site,) = report.sites
    assert site.line is not None and site.line.line == _line(loop), site
    assert site.certainty == "high", site
    assert report.processes[0].pools[0].explained == pytest.approx(1.0, abs=0.2)
    source, first = inspect.getsourcelines(loop)
    if made := [first + number for number, text in enumerate(source) if "# made" in text]:
        assert site.created is not None and [site.created.line] == made


def test_two_lines_that_add_as_much_are_two_rows(record: Callable[[Any], LeakReport]) -> None:
    report = record(leaking_loops.two_lines_that_add_as_much)
    first, second = report.sites
    begin = leaking_loops.two_lines_that_add_as_much.__code__.co_firstlineno
    assert {one.line.line - begin for one in (first, second) if one.line is not None} == {4, 5}
    for one in (first, second):
        assert one.share == pytest.approx(0.5, abs=0.1) and one.rate == pytest.approx(160 * 1024, rel=0.2)


def test_graphs_and_plain_tensors_in_one_list_are_named_by_their_own_lines(record: Callable[[Any], LeakReport]) -> None:
    found = {site.kind: site for site in record(leaking_loops.graphs_and_plain_tensors).sites}
    begin = leaking_loops.graphs_and_plain_tensors.__code__.co_firstlineno
    lines = {kind: site.line.line - begin for kind, site in found.items() if site.line is not None}
    assert lines == {"graph": 5, "tensors": 6}, found
