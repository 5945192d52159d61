"""Fixes: /dev/shm is only ever set to more than it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from machines import healthy, with_pool

from legroom.probe.snapshot import snapshot
from legroom.records.failure import Cause, Evidence, OomCount, Reading, Verdict
from legroom.records.machine import Level, Machine, RuntimeEnvironment
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


_AT = 'Traceback (most recent call last):\n  File "s.py", line 9, in <module>\n'
_OPENED = f'{_AT}    files.append(open(name))\nOSError: [Errno 24] Too many open files: "/data/img/1021.jpg"\n'
_SENT = (
    f"{_AT}    for batch in loader:\n"
    '  File "/lib/torch/multiprocessing/reductions.py", line 282, in rebuild_storage_fd\n    fd = df.detach()\n'
    "RuntimeError: received 0 items of ancdata\n"
)
_SHARED = (
    f"{_AT}    for batch in loader:\n"
    '  File "/lib/torch/multiprocessing/reductions.py", line 9, in reduce_storage\n'
    "    fd, size = storage._share_fd_cpu_()\nRuntimeError: unable to open shared memory object </torch_1_2_3> in "
    "read-write mode: Too many open files (24)\n"
)
_UNSEEN = "OSError: [Errno 24] Too many open files\n"


def test_descriptors_of_tensors_are_only_spoken_of_where_tensors_were_sent() -> None:
    for text in (_SENT, _SHARED):
        verdict = classify(Evidence(log=facts_of(text.encode())))
        assert verdict.cause == "fds-exhausted" and "tensor" in verdict.summary
        assert "set_sharing_strategy" in _advised(text=text) and verdict.without_effect == frozenset()
    for text in (_OPENED, _UNSEEN):
        verdict = classify(Evidence(log=facts_of(text.encode())))
        assert verdict.cause == "fds-exhausted" and "tensor" not in verdict.summary
        assert "set_sharing_strategy" not in _advised(text=text) and "ulimit -n" in _advised(text=text)
    assert "close each file" in _advised(text=_OPENED) and "close each file" not in _advised(text=_UNSEEN)


def _readings(*sizes: int) -> tuple[Reading, ...]:
    return tuple(Reading(float(when), {"ram": Level(size * GB, 64 * GB)}) for when, size in enumerate(sizes))


_KILLED: dict[str, Any] = {"ending": ExitStatus(signal=9), "oom": OomCount(1, True, "own")}


def test_memory_that_grew_to_the_end_without_workers_is_looked_for_with_leak() -> None:
    leak = _readings(1, 8, 15, 22, 29, 36, 43, 50, 57, 63)
    told = _advised(**_KILLED, workers=False, readings=leak)
    assert "legroom leak -- " in told and "fewer workers" not in told
    for readings in (_readings(1, 60, 60, 60, 60, 60, 60, 61), _readings(1, 1, 1, 1, 1, 1, 1, 63), leak[:3]):
        told = _advised(**_KILLED, workers=False, readings=readings)
        assert "legroom leak" not in told and "no worker processes" in told
    for workers in (True, None):
        assert "fewer workers" in _advised(**_KILLED, workers=workers, readings=leak)


_HUGE = f"{_AT}    x = np.zeros(n)\nnumpy._core._exceptions._ArrayMemoryError: Unable to allocate {{}} for an array with shape (9,)\n"


@pytest.mark.parametrize("size", ["149. GiB", "149. TiB", "2.00 PiB"])
def test_one_array_larger_than_the_machine_is_called_that(size: str) -> None:
    text = _HUGE.format(size)
    machine = with_pool(healthy(), "ram", 64 * GB, None, None)
    machine = replace(machine, memory=replace(machine.memory, total=64 * GB))
    evidence = Evidence(log=facts_of(text.encode()), peaks={"ram": Level(GB, 64 * GB)}, ending=ExitStatus(1))
    verdict = with_fixes(classify(evidence), evidence, machine)
    told = "\n".join(verdict.fix)
    assert "larger than all RAM" in told and "workers" not in told
    assert verdict.too_large and verdict.without_effect == {"num_workers", "prefetch_factor"}
    small = Evidence(log=facts_of(_HUGE.format("3.00 GiB").encode()), peaks=evidence.peaks, ending=ExitStatus(1))
    assert classify(small).too_large is None and "larger than" not in "\n".join(
        with_fixes(classify(small), small, machine).fix
    )


@pytest.mark.parametrize("replaceable", [True, False])
def test_the_loader_that_the_job_ran_with_is_not_advised(replaceable: bool) -> None:
    told = _fixes("shm-full", healthy(), loader_replaceable=replaceable)
    assert ("legroom run --loader legroom" in told) == replaceable


def test_a_job_that_ran_under_legroom_is_not_to_be_run_under_it() -> None:
    assert "legroom run -- COMMAND" in _fixes("unknown", healthy())
    assert "legroom run" not in _fixes("unknown", healthy(), ending=ExitStatus(1, None))
