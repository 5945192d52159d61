"""`with legroom.watch()`: samples in a thread, what the script says, and nothing that reaches the training."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from monitor_samples import sample

import legroom
from legroom.errors import BadDuration, CannotListen, UsageError
from legroom.monitor.script_marks_and_steps import (
    AnnotationCollector,
    AnnotationFile,
    AnnotationReader,
    StepRate,
    annotation_directory,
)
from legroom.monitor.watch_log import read_samples
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.finding_and_alarm import Alarm
from legroom.records.watch_sample import Annotations, Mark, Moment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def _own_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    # On a busy machine the watch's thread may take longer to end than a training run would wait for it.
    monkeypatch.setattr("legroom.monitor.watch_in_script._LAST_WAIT", 60.0)
    monkeypatch.setattr("legroom.monitor.notify._LAST_WAIT", 60.0)


def _until(what: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_script_is_watched_and_heard(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with legroom.watch(log=log, interval=0.1) as w:
        w.component(model=5 << 20, data=1)
        w.component(data=None)
        for epoch in range(2):
            w.mark(f"epoch {epoch}")
            want = len(w.history.samples) + 3
            for _ in range(10):
                w.step()
            _until(lambda want=want: len(w.history.samples) >= want)
        assert w.latest is not None
    found = list(read_samples(log, lambda text: None))
    assert [mark.text for one in found for mark in one.said.marks] == ["epoch 0", "epoch 1"]
    last = found[-1].said
    assert last.components == {"model": 5 << 20} and last.phase == "epoch 1" and last.steps == 20
    assert any(one.said.steps_per_second for one in found)
    assert all(os.getpid() in {row.pid for row in one.processes} for one in found)
    assert list((tmp_path / "legroom-said").iterdir()) == []


class _Collecting:
    def __init__(self) -> None:
        self.shown: list[Moment] = []
        self.closed = 0

    def show(self, moment: Moment) -> None:
        self.shown.append(moment)

    def close(self) -> None:
        self.closed += 1


class _Breaking(_Collecting):
    def show(self, moment: Moment) -> None:
        raise RuntimeError("an output broke")


def test_outputs_are_shown_and_closed_also_when_the_training_run_fails() -> None:
    output = _Collecting()
    with pytest.raises(ZeroDivisionError), legroom.watch(interval=0.1, outputs=(output,)):
        _until(lambda: output.shown)
        _ = 1 / 0
    assert output.closed == 1


def test_what_breaks_in_the_watch_never_reaches_the_training_run() -> None:
    output = _Breaking()
    told = pytest.warns(RuntimeWarning, match="ended early: RuntimeError: an output broke")
    with told, legroom.watch(interval=0.1, outputs=(output,)) as w:
        _until(lambda: output.closed)
        w.step()
        w.mark("still training")


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least"):
        legroom.watch(interval=0.01)
    with pytest.raises(CannotListen, match="invalid address"):
        legroom.watch(prometheus="host:port")
    with pytest.raises(UsageError, match="the command for alarms is empty"):
        legroom.watch(on_alarm="")
    with pytest.raises(BadDuration):
        legroom.watch(interval="soon")
    with pytest.raises(UsageError), legroom.watch(log=tmp_path / "no" / "where"):
        pass
    with legroom.watch(interval=0.1) as w:
        with pytest.raises(UsageError, match="integer >= 0"):
            w.component(model=1.5)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="already started"):
            w.__enter__()


def test_alarms_reach_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Alarm] = []
    monkeypatch.setattr("legroom.advice.findings_shm.NEARLY_FULL", -1.0)  # every /dev/shm is nearly full
    with legroom.watch(interval=0.1, on_alarm=got.append) as w:
        _until(lambda: got)
        assert got[0].code == "shm-nearly-full" and w.alarms
    assert len([alarm for alarm in got if alarm.code == "shm-nearly-full"]) == 1


def test_a_port_in_use_does_not_reach_the_training_run(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with socket.socket() as taken:  # by the watch of another rank
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = pytest.warns(RuntimeWarning, match=rf"no metrics are served: cannot listen on 127.0.0.1:{port} \(")
        with told, legroom.watch(log=log, interval=0.1, prometheus=port) as w:
            _until(lambda: w.latest)
    assert list(read_samples(log, lambda text: None))


def test_a_forked_child_leaves_the_watch_alone(tmp_path: Path) -> None:
    script = (
        "import legroom, os, sys\n"
        f"with legroom.watch(log={str(tmp_path / 'log')!r}, interval=0.1) as w:\n"
        "    pid = os.fork()\n"
        "    w.step()\n"
        "if pid == 0: os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


# What is said, and how another process hears it.


def test_another_process_reads_it(tmp_path: Path) -> None:
    host = Host()
    file, collector, reader = AnnotationFile(host), AnnotationCollector(), AnnotationReader(host)
    me = os.getpid()
    assert reader.read(0.0, [me]) == Annotations()
    collector.component(model=3, optimizer=4)
    collector.step(10)
    file.write(collector.collect())
    first = reader.read(1.0, [me, 1])
    assert first.components == {"model": 3, "optimizer": 4} and first.steps == 10 and first.steps_per_second is None
    collector.mark("epoch 1")
    collector.step(30)
    file.write(collector.collect())
    second = reader.read(3.0, [me])
    assert second.phase == "epoch 1" and [mark.text for mark in second.marks] == ["epoch 1"]
    assert second.steps_per_second == pytest.approx(15.0)
    assert reader.read(4.0, [me]).marks == ()  # heard once
    file.close()
    assert reader.read(5.0, [me]) == Annotations()


def test_ranks_are_put_together(tmp_path: Path) -> None:
    place = annotation_directory(Host(), create=True)
    assert place is not None
    for pid, steps in ((os.getpid(), 5), (1, 9)):
        text = {
            "schema": "legroom.said/1",
            "components": {"model": 10},
            "phase": f"p{pid}",
            "marks": [],
            "steps": steps,
        }
        (place / f"{pid}.json").write_text(json.dumps(text))
    said = AnnotationReader(Host()).read(0.0, [1, os.getpid()])
    assert said.components == {"model": 20} and said.steps == 9 and said.phase == "p1"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema":"legroom.said/1"}', "[" * 9999, '{"schema":"legroom.said/1","components":{"a":"x"},"phase":1,"marks":[[1]],"steps":0}'])  # fmt: skip
def test_nonsense_in_an_annotation_file_is_ignored(text: str) -> None:
    place = annotation_directory(Host(), create=True)
    assert place is not None
    (place / f"{os.getpid()}.json").write_text(text)
    assert AnnotationReader(Host()).read(0.0, [os.getpid()]) == Annotations()


def test_the_annotation_file_of_an_earlier_process_with_this_pid_is_ignored() -> None:
    host = Host()
    file = AnnotationFile(host)
    file.write(Annotations(phase="old"))
    place = annotation_directory(host)
    assert place is not None
    os.utime(place / f"{os.getpid()}.json", (1.0, 1.0))
    assert AnnotationReader(host).read(0.0, [os.getpid()]) == Annotations()
    file.close()


def test_a_directory_that_others_could_write_is_not_used(tmp_path: Path) -> None:
    assert annotation_directory(Host()) is None
    place = annotation_directory(Host(), create=True)
    assert place is not None and stat.S_IMODE(place.stat().st_mode) == 0o700
    place.chmod(0o770)
    assert annotation_directory(Host()) is None
    place.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "elsewhere")
    assert annotation_directory(Host()) is None
    file = AnnotationFile(Host())  # heard by our own watch only
    file.write(Annotations(phase="x"))
    file.close()


def test_boards_of_the_dead_are_cleared_away() -> None:
    place = annotation_directory(Host(), create=True)
    assert place is not None
    above_every_pid = (1 << 22) + 1  # the number of one that has ended may be given to another
    (place / f"{above_every_pid}.json").write_text("{}")
    AnnotationFile(Host()).close()
    assert list(place.iterdir()) == []


def test_a_file_of_another_pid_namespace_is_neither_read_nor_removed() -> None:
    place = annotation_directory(Host(), create=True)
    assert place is not None
    above_every_pid, us = (1 << 22) + 1, os.getpid()
    data = {"schema": "legroom.said/1", "components": {}, "phase": "of a container", "marks": [], "steps": 1}
    for name in (above_every_pid, us):
        (place / f"{name}.json").write_text(json.dumps({**data, "namespace": "pid:[1]"}))
    (place / f"{above_every_pid}.json.0a.part").write_text("{")  # being written
    (place / f"{above_every_pid}.json.0b.part").write_text("{")
    os.utime(place / f"{above_every_pid}.json.0b.part", (1.0, 1.0))
    assert AnnotationReader(Host()).read(0.0, [us]) == Annotations()
    AnnotationFile(Host()).close()
    assert sorted(path.name for path in place.iterdir()) == [
        f"{above_every_pid}.json",
        f"{above_every_pid}.json.0a.part",
    ]


def test_long_marks_reach_another_process_cut() -> None:
    file, collector = AnnotationFile(Host()), AnnotationCollector()
    for number in range(40):
        collector.mark(f"{number} " + "\U0001f600" * 5000)
    file.write(collector.collect())
    found = AnnotationReader(Host()).read(0.0, [os.getpid()])
    file.close()
    assert found.phase == "39 " + "\U0001f600" * 997


def test_bytes_may_be_integers_of_numpy() -> None:
    collector = AnnotationCollector()
    collector.component(data=np.int64(5))  # type: ignore[arg-type]
    assert json.dumps(dict(collector.collect().components)) == '{"data": 5}'


def test_pace() -> None:
    pace = StepRate()
    assert pace.at(0.0, None) is None and pace.at(1.0, 5) is None
    assert pace.at(3.0, 9) == pytest.approx(2.0)
    assert pace.at(4.0, 0) is None  # counted anew
    assert pace.at(5.0, 3) == pytest.approx(3.0)


def test_marks_between_two_samples_are_bounded() -> None:
    collector = AnnotationCollector()
    for number in range(1000):
        collector.mark(str(number))
    said = collector.collect()
    assert len(said.marks) == 256 and said.marks[-1].text == "999" and isinstance(said.marks[0], Mark)
    assert sample(said=said).said.phase == "999"
