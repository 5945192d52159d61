"""Copies in GPU memory that processes share, as `legroom watch` shows them: once each, with their users."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from monitor_samples import GB, moments, sample

from legroom.monitor.history_and_trend import History
from legroom.monitor.process_selection import user_processes
from legroom.monitor.take_watch_sample import Sampler
from legroom.monitor.tui_lines import fact_lines
from legroom.monitor.watch_text import TextOutput
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.watch_sample import GpuCopyRow

COPY = GpuCopyRow("3f2a1b2c-0000-0000-0000-000000000000", "ab", "/data/x.h5\x1b[2J: images", 20 * GB, (7, 8))


def test_lines_show_a_copy_when_it_comes_changes_or_goes() -> None:
    lines: list[str] = []
    output = TextOutput(lines.append, History())
    fewer = replace(COPY, users=(8,))
    states = [(COPY,), (COPY,), (fewer,), (), None]
    for moment in moments(sample(float(clock), gpu_copies=copies) for clock, copies in enumerate(states)):
        output.show(moment)
    assert [line.strip() for line in lines if "x.h5" in line] == [
        "GPU-3f2a1b2c: 20 GB of /data/x.h5\\u001b[2J: images, one copy for 2 processes (7, 8)",
        "GPU-3f2a1b2c: 20 GB of /data/x.h5\\u001b[2J: images, one copy for 1 process (8)",
        "released in GPU memory: /data/x.h5\\u001b[2J: images",
    ]


def test_the_full_screen_has_a_line_for_each_copy() -> None:
    lines = [line.plain for line in fact_lines(sample(gpu_copies=(COPY,)), 200)]
    (one,) = [line for line in lines if "x.h5" in line]
    assert "20 GB" in one and "one copy for 2 processes (7, 8)" in one and "\x1b" not in one


def test_the_sampler_survives_a_store_that_cannot_be_read() -> None:
    asked: list[float] = []

    def read() -> tuple[GpuCopyRow, ...]:
        asked.append(1.0)
        if len(asked) == 2:
            raise OSError("gone")
        return (COPY,)

    clock = iter(range(0, 10**9, 10**5))  # due again, also where a reading had to wait seconds for a core
    sampler = Sampler(user_processes(Host()), clock=lambda: float(next(clock)), gpu_copies=read)
    found = [taken.gpu_copies for taken in (sampler.take(), sampler.take(), sampler.take()) if taken is not None]
    sampler.close()
    assert found == [(COPY,), None, (COPY,)]


@pytest.mark.parametrize(
    ("name", "part"), [("index.html", "gpu-copies"), ("cards_and_tables.js", "gpuCopies"), ("watch.js", "gpuCopies")]
)
def test_the_page_has_a_table_for_them(name: str, part: str) -> None:
    page = Path(__file__).parents[3] / "src" / "legroom" / "monitor" / "web_page" / name
    assert part in page.read_text()
