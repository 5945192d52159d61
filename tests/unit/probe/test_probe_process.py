"""Everybody at a glance, a closer look at some, families, and finding by command line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_host import NAMES, TREES
from fake_machine import MB, FakeMachine, area
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import NoSuchProcess, NothingMatches, UsageError
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import (
    arguments,
    command_text,
    holdings,
    is_ending,
    matching,
    our_pid,
    parse_limits,
    parse_status,
    process_at,
    processes,
    started_at,
    tree,
)
from legroom.records.machine import Process

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads this machine's /proc")


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


# A glance.


def test_a_recorded_training_run() -> None:
    found = {process.pid: process for process in processes(Host.at(TREES / "bare-v2"))}
    assert list(found) == [1, 6900, 8100, 8101, 8102]
    trainer = found[8100]
    assert trainer.command == "python3 train.py --data train_256.h5 --batch-size 64 --num-workers 2 --epochs=90"
    assert (trainer.parent, trainer.uid) == (6900, 1000)
    assert (trainer.rss, trainer.rss_shmem) == (6 << 30, 96 * MB)
    assert (trainer.swap, trainer.locked, trainer.pinned) == (0, 0, 0)
    assert (trainer.shm, trainer.pss, trainer.fds) == (None, None, None)  # a glance does not tell


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_machine_can_be_read(name: str) -> None:
    host = Host.at(TREES / name)
    for process in processes(host):
        assert holdings(host, process).pid == process.pid


def test_kernel_threads_and_zombies_are_left_out(machine: FakeMachine) -> None:
    machine.process(10)
    machine.text("/proc/2/status", "Name:\tkthreadd\nState:\tS (sleeping)\nPPid:\t0\n")
    machine.text("/proc/3/status", "Name:\tkworker\nState:\tI (idle)\nPPid:\t2\n")
    machine.text("/proc/4/status", "Name:\tkworker\nState:\tI (idle)\nPPid:\t1\nKthread:\t1\n")
    machine.text("/proc/5/status", "Name:\tpython\nState:\tZ (zombie)\nPPid:\t10\n")
    assert [process.pid for process in processes(machine.host)] == [10]


def test_a_process_without_a_command_line_shows_its_name(machine: FakeMachine) -> None:
    machine.process(10, command=())
    assert process_at(machine.host, 10) is not None
    assert processes(machine.host)[0].command == "[python]"


def test_one_that_vanished_in_between_is_left_out(machine: FakeMachine) -> None:
    machine.process(10)
    (machine.root / "proc/11").mkdir()  # listed, then gone
    assert [process.pid for process in processes(machine.host)] == [10]
    assert process_at(machine.host, 12) is None


def test_missing_figures_are_unknown_not_zero() -> None:
    process = parse_status("Name:\tx\nPPid:\t1\nVmRSS:\tmany kB\n", 9)
    assert process is not None
    assert (process.rss, process.rss_shmem, process.uid) == (None, None, None)


@given(st.text())
def test_any_status_is_survived(text: str) -> None:
    found = parse_status(text, 9)
    assert found is None or found.pid == 9


def test_the_effective_user_counts(machine: FakeMachine) -> None:
    found = parse_status("PPid: 1\nUid:\t1000\t0\t0\t0\n", 9)
    assert found is not None
    assert found.uid == 0


# Command lines.


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["python", "-c", "import x\nx.go()"], "python -c import x x.go()"),
        (["a\x1b[2Jb"], "a\ufffd[2Jb"),
        (["a\u202eb\u200bc\ufeff"], "a\ufffdb\ufffdc\ufffd"),
        (["naïve", "数据"], "naïve 数据"),
    ],
)
def test_a_command_line_is_safe_to_show(words: list[str], shown: str) -> None:
    assert command_text(words) == shown


@given(st.lists(st.text()))
def test_no_control_character_is_ever_shown(words: list[str]) -> None:
    assert not [c for c in command_text(words) if ord(c) < 32 or 127 <= ord(c) < 160 or 0x202A <= ord(c) <= 0x202E]


def test_empty_words_within_a_command_line_are_kept(machine: FakeMachine) -> None:
    machine.process(10, command=("python", "", "x"))
    assert arguments(machine.host, 10) == ["python", "", "x"]
    assert arguments(machine.host, 99) == []


# A closer look.


def test_holdings(machine: FakeMachine) -> None:
    machine.file("psm_1", 41, 3 * MB)
    machine.file("/proc/10/fd/5", 42, 2 * MB)
    machine.process(
        10,
        shmem=100,
        pss=4000,
        maps=[area(41, "/dev/shm/psm_1", 4 * MB), area(41, "/dev/shm/psm_1", 4 * MB, start=0x7F1000000000)],
        fds={0: "/dev/null", 4: "/dev/shm/psm_1", 5: "/dev/shm/torch_10_1_1 (deleted)"},
    )
    found = holdings(machine.host, processes(machine.host)[0])
    assert found.shm == 5 * MB  # each file once, by blocks
    assert found.shm_mapped == 8 * MB
    assert (found.pss, found.fds, found.fd_limit) == (4000 << 10, 3, 1024)
    assert found.rss_shmem == 100 << 10


def test_what_may_not_be_looked_into_is_unknown(machine: FakeMachine) -> None:
    machine.process(10, shmem=100, maps=None)
    found = holdings(machine.host, processes(machine.host)[0])
    assert (found.shm, found.shm_mapped, found.pss, found.fds, found.pinned) == (None, None, None, None, None)
    assert found.fd_limit == 1024


def test_memory_pinned_by_cuda_shows_where_the_driver_is_mapped(machine: FakeMachine) -> None:
    zero = area(9, "/dev/zero (deleted)", 8 * MB, device="00:01")
    machine.process(10, maps=[zero, area(142, "/dev/nvidiactl", device="00:06", start=0x200000000)])
    machine.process(11, maps=[zero])
    machine.process(12, maps=[zero], status="VmPin:\t4 kB\n")
    pinned = [holdings(machine.host, process).pinned for process in processes(machine.host)]
    assert pinned == [8 * MB, 0, 4096]


def test_limits() -> None:
    text = (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max cpu time              unlimited            unlimited            seconds   \n"
        "Max open files            1024                 1048576              files     \n"
        "Max nice priority         0                    0                    \n"
    )
    assert parse_limits(text) == {"Max open files": 1024, "Max nice priority": 0}


@given(st.text())
def test_any_limits_are_survived(text: str) -> None:
    assert all(value >= 0 for value in parse_limits(text).values())


def test_when_a_process_began(machine: FakeMachine) -> None:
    machine.process(10, started=1_759_999_000.5)
    assert started_at(machine.host, 10) == 1_759_999_000.5
    assert started_at(machine.host, 11) is None


def test_who_is_on_the_way_out(machine: FakeMachine) -> None:
    machine.process(10)
    stat = machine.host.root / "proc/10/stat"
    for flags in (0x400100, 0x40010C):
        stat.write_text(f"10 (python) x) R 1 10 10 0 -1 {flags} 0 0 0")
        assert is_ending(machine.host, 10) is bool(flags & 4)
    for text in ("", "10 (python", "10 (python) R 1 10 10 0 -1 nonsense"):
        stat.write_text(text)
        assert not is_ending(machine.host, 10)


# Families.


def person(pid: int, parent: int, command: str = "python") -> Process:
    return Process(pid, parent, command, 1000)


def test_a_tree_is_the_process_and_its_descendants() -> None:
    everybody = [person(1, 0), person(5, 1), person(6, 5), person(7, 6), person(8, 1), person(3, 5)]
    assert [process.pid for process in tree(everybody, 5)] == [5, 6, 3, 7]


def test_a_ring_of_reused_ids_ends() -> None:
    assert [process.pid for process in tree([person(5, 6), person(6, 5)], 5)] == [5, 6]


def test_no_such_process() -> None:
    with pytest.raises(NoSuchProcess) as caught:
        tree([person(1, 0)], 77)
    assert "77" in caught.value.what
    assert "1 processes" in caught.value.why
    assert caught.value.fix


# Finding.


def test_matching_leaves_out_ourselves_and_our_ancestors() -> None:
    everybody = [
        person(1, 0, "init"),
        person(20, 1, "sh -c legroom doctor --match train"),
        person(21, 20, "legroom doctor --match train"),
        person(30, 1, "python train.py"),
        person(31, 30, "python train.py"),
    ]
    assert [process.pid for process in matching(everybody, "train", us=21)] == [30, 31]
    assert [process.pid for process in matching(everybody, r"^python .*\.py$", us=21)] == [30, 31]


def test_nothing_matches() -> None:
    with pytest.raises(NothingMatches) as caught:
        matching([person(1, 0, "init"), person(2, 1, "zzz")], "zzz", us=2)
    assert "zzz" in caught.value.what
    assert "2 processes" in caught.value.why


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(UsageError) as caught:
        matching([person(1, 0)], "train(")
    assert "train(" in caught.value.what
    assert caught.value.exit_status == 2


# This machine.


@linux
def test_ourselves() -> None:
    host = Host()
    # A quiet machine may have no processes but us and our ancestors.
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            everybody = processes(host)
        finally:
            other.kill()
    me = next(process for process in everybody if process.pid == os.getpid())
    assert me.parent == os.getppid()
    assert me.uid == os.geteuid()
    assert our_pid(host) == os.getpid()
    assert me.rss is not None and me.rss > MB
    deep = holdings(host, me)
    import resource

    assert deep.fd_limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert deep.fds is not None and deep.fds >= 3
    assert deep.pss is not None and 0 < deep.pss <= me.rss * 2
    found = {process.pid for process in matching(everybody, ".")}
    assert other.pid in found and not found & {os.getpid(), os.getppid()}


@linux
def test_a_child_is_seen_and_then_not() -> None:
    host = Host()
    child = subprocess.Popen([sys.executable, "-c", "input('legroom-probe-child')"], stdin=-1, stdout=-1)
    try:
        found = process_at(host, child.pid)
        assert found is not None
        begun = started_at(host, child.pid)
        assert begun is not None and abs(begun - time.time()) < 60
        assert child.pid in {process.pid for process in tree(processes(host), os.getpid())}
    finally:
        child.communicate(b"\n")
    gone = holdings(host, found)
    assert (gone.fds, gone.pss, gone.fd_limit) == (None, None, None)
    assert process_at(host, child.pid) is None


@linux
def test_a_zombie_is_not_a_living_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert process_at(Host(), child.pid) is None
    finally:
        child.wait()


def test_a_recording_does_not_hold_this_process() -> None:
    assert our_pid(Host.at(TREES / "bare-v2")) is None
    assert our_pid(replace(Host(), root=Path("/nonexistent"))) is None
