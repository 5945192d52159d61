"""Fixes: /dev/shm is only ever set to more than it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from machines import healthy, with_pool

from legroom.probe.snapshot import snapshot
from legroom.records.failure import Cause, Evidence, Level, OomCount, Verdict
from legroom.records.machine import Machine, RuntimeEnvironment
from legroom.rescue.find_failures_in_log import facts_of
from legroom.rescue.verdict import classify, with_fixes
from legroom.system.processes_and_threads import ExitStatus

GB = 1 << 30


def _fixes(cause: Cause, machine: Machine, **known: Any) -> str:
    return "\n".join(with_fixes(Verdict(cause, 1.0, ""), Evidence(**known), machine).fix)


def _told(shm: Level | None, here: int | None) -> str:
    machine = healthy()
    mounted = replace(machine.shm, size=here, mounted=here is not None)
    machine = with_pool(replace(machine, shm=mounted), "ram", 24 * GB, None, None)
    return _fixes("shm-full", machine, peaks={} if shm is None else {"shm": shm})


@pytest.mark.parametrize("here", [None, 64 << 20, GB])
def test_a_small_one_is_enlarged(here: int | None) -> None:
    assert "remount,size=4G" in _told(None, here)


@pytest.mark.parametrize("peak", [None, Level(23 * GB, 24 * GB)])
def test_a_large_one_is_never_made_smaller(peak: Level | None) -> None:
    told = _told(peak, 24 * GB)
    assert "remount" not in told and "24 GB" in told and "legroom doctor" in told


def test_a_path_with_no_room_for_a_socket_is_to_be_shorter() -> None:
    told = _fixes("tmpdir-too-long", healthy())
    assert "export TMPDIR=/tmp" in told and "75 or less" in told


def test_after_an_oom_kill_no_limit_is_raised_beyond_the_machine_and_the_dead_are_not_listed() -> None:
    docker = RuntimeEnvironment("docker", "", "linux", root=True, may_mount=False, sudo=False, rights_how="")

    def told(runtime: RuntimeEnvironment, ram: int, total_ram: int) -> str:
        machine = healthy()
        machine = replace(machine, runtime=runtime, memory=replace(machine.memory, total=total_ram))
        return _fixes("ram-oom-kill", with_pool(machine, "ram", ram, None, None))

    assert "--memory=8G" in told(docker, 4 * GB, 64 * GB)
    assert "--memory" not in told(docker, 64 * GB, 64 * GB)  # there is no limit to raise
    for text in (told(docker, 64 * GB, 64 * GB), told(healthy().runtime, 4 * GB, 64 * GB)):
        assert "ps -e" not in text and "use fewer workers" in text


def test_a_full_disk_is_named_in_its_fixes() -> None:
    told = _fixes("disk-full", healthy(), disks={"/mnt/my data": Level(100, 100)})
    assert "du -xh --max-depth=1 '/mnt/my data' |" in told and "df -h '/mnt/my data'" in told
    unknown = _fixes("disk-full", healthy()).splitlines()
    assert not any(line.endswith(" .") or " . " in line for line in unknown), "the current directory may be elsewhere"
    assert "df -h" in unknown and "df -i" in unknown


def _advised(**known: Any) -> str:
    known["log"] = facts_of(known.pop("text", "").encode())
    evidence = Evidence(**known)
    return "\n".join(with_fixes(classify(evidence), evidence, snapshot()).fix)


CRASH = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Segmentation fault.\n"
BUG = "Traceback (most recent call last):\n  File 'a'\nKeyError: 'x'\n"


def test_a_crash_advises_the_fault_handler() -> None:
    for known in ({"ending": ExitStatus(signal=11)}, {"ending": ExitStatus(1), "text": CRASH}, {"text": CRASH}):
        assert "python -X faulthandler" in _advised(**known)
    traced = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
    assert "faulthandler" not in _advised(ending=ExitStatus(signal=11), text=traced)
    assert "faulthandler" not in _advised(ending=ExitStatus(1), text="Aborted\n" + "step 1\n" * 500 + BUG)


def test_sigint_is_never_called_that_of_a_daemon() -> None:
    interrupted = "Traceback (most recent call last):\n  File 'a'\nKeyboardInterrupt\n"
    for known in (
        {"ending": ExitStatus(signal=2)},
        {"text": interrupted},
        {"ending": ExitStatus(130), "text": interrupted},
    ):
        told = _advised(**known)
        assert "Ctrl-C" in told and "earlyoom" not in told and "time limit" not in told
    assert "earlyoom" in _advised(ending=ExitStatus(signal=15))
    typed = classify(Evidence(ending=ExitStatus(130), keyboard=True, oom=OomCount(0, True, "own")))
    assert typed.cause == "killed" and "Ctrl-C" in typed.summary, "a script that exits with 130 after Ctrl-C"
    assert _advised(ending=ExitStatus(130), keyboard=True) == ""


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 149. PiB for an array with shape (9,)", "149 PB"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
         "tried to allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)", "3.55 PB"),
    ],
)  # fmt: skip
def test_an_array_larger_than_the_machine_is_no_question_of_workers(line: str, asked: str) -> None:
    told = _advised(ending=ExitStatus(1), text=f"Traceback (most recent call last):\n  File 'a'\n{line}\n")
    assert f"asked for {asked}" in told and "fewer workers" not in told
    small = _advised(
        ending=ExitStatus(1), text=f"{line}\n".replace("149. PiB", "9. MiB").replace("4000000000000000", "40")
    )
    assert "asked for" not in small and "fewer workers" in small
