"""Groups that share batches, as `legroom watch` shows them: who makes them, who waits, who is behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from monitor_samples import MB, moments, sample

from legroom.monitor.history_and_trend import History
from legroom.monitor.process_selection import user_processes
from legroom.monitor.take_watch_sample import Sampler
from legroom.monitor.tui_lines import fact_lines
from legroom.monitor.watch_text import TextOutput
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.watch_sample import GroupRow, TrainerRow

SLOW = TrainerRow(7, "train.py --lr 1\x1b[2J", "slow", 1, 4, 9, 30, 2)
GROUP = GroupRow("aug", 90, 2, 3, 8, MB, None, (SLOW, TrainerRow(8, "train.py", "waiting", 1, 13, 0, 41, 0)))
ALONE = GroupRow("one", None, 0, 0, 0, 0, None, (TrainerRow(9, "b.py", "alone", None, None, None, 0, 0),))


def test_lines_show_groups_at_first_every_ten_seconds_and_when_they_change() -> None:
    lines: list[str] = []
    output = TextOutput(lines.append, History())
    states: Iterator[Any] = iter([(GROUP,), (GROUP,), (), (GROUP, ALONE), *[(GROUP, ALONE)] * 10])
    for moment in moments(sample(float(clock), groups=groups) for clock, groups in enumerate(states)):
        output.show(moment)
    heads = [line for line in lines if "share='aug'" in line]
    assert len(heads) == 3  # at first, when it is back, and ten seconds later
    assert heads[0].strip() == ("share='aug': process 90 makes the batches with 2 workers; 3 of 8 batches ready, 1 MB")
    (first, *_) = [line.strip() for line in lines if line.strip().startswith("7 train.py")]
    assert first == "7 train.py --lr 1\\u001b[2J: slow, 9 batches behind, epoch 1, batch 4; 30 shared, 2 made itself"
    assert any("8 train.py: waits for a batch" in line for line in lines)
    assert any("share='one': one trainer" in line for line in lines) and "      9 b.py" in lines


def test_the_full_screen_has_a_line_for_each_group() -> None:
    lines = [line.plain for line in fact_lines(sample(groups=(GROUP, ALONE)), 200)]
    (one,) = [line for line in lines if "aug" in line]
    assert "3 of 8 batches ready" in one and "made by 90" in one and "7 slow, 9 batches behind" in one
    assert "8 waits for a batch" in one and any("9 alone" in line for line in lines)
    broken = GroupRow("aug", 90, 0, 0, 8, 0, "no\nroom", ())
    assert any("error: no\ufffdroom" in line.plain for line in fact_lines(sample(groups=(broken,)), 200))


def test_the_sampler_reads_groups_within_its_share_of_the_time_and_survives_errors() -> None:
    asked: list[float] = []

    def read() -> tuple[GroupRow, ...]:
        asked.append(1.0)
        if len(asked) == 2:
            raise OSError("gone")
        return (GROUP,)

    clock = iter(range(0, 10**9, 10**5))  # due again, also where a reading had to wait seconds for a core
    sampler = Sampler(user_processes(Host()), clock=lambda: float(next(clock)), groups=read)
    found = [taken.groups for taken in (sampler.take(), sampler.take(), sampler.take()) if taken is not None]
    sampler.close()
    assert found == [(GROUP,), None, (GROUP,)]


@pytest.mark.parametrize("name", ["index.html", "cards_and_tables.js", "watch.js"])
def test_the_page_has_a_table_for_them(name: str) -> None:
    page = Path(__file__).parents[3] / "src" / "legroom" / "monitor" / "web_page" / name
    assert "groups" in page.read_text()
