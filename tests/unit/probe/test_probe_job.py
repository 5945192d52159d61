"""One running training: its family, its sums, its settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import TREES
from fake_machine import MB, FakeMachine, area

from legroom.errors import NoSuchProcess, NothingMatches
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.memory_of_running_jobs import job, jobs

TRAIN = ("python", "train.py", "--batch-size", "64", "--num-workers=2")


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """A trainer with two workers that share segments, below a shell; and another user's process."""
    staged = FakeMachine(tmp_path)
    staged.file("/proc/11/fd/3", 41, 2 * MB)
    staged.file("/proc/12/fd/3", 42, 3 * MB)
    shared = area(41, "/dev/shm/torch_11_1_0 (deleted)", 2 * MB)
    staged.process(9, 1, ("bash", "run.sh"))
    staged.process(10, 9, TRAIN, shmem=8, maps=[shared], pss=1000, fds={0: "/dev/null"})
    staged.process(11, 10, TRAIN, shmem=8, maps=[shared], pss=200, fds={3: "/dev/shm/torch_11_1_0 (deleted)"})
    deleted = "/dev/shm/torch_12_1_0 (deleted)"
    staged.process(12, 10, TRAIN, shmem=8, pss=300, fds={1: "/x", 2: "/y", 3: deleted})
    staged.process(50, 1, ("python", "other.py"), shmem=8, maps=[area(77, "/dev/shm/psm_7")])
    return staged


def test_a_family_and_its_sums(machine: FakeMachine) -> None:
    found = job(machine.host, 10)
    assert (found.pid, found.command) == (10, "python train.py --batch-size 64 --num-workers=2")
    assert [process.pid for process in found.processes] == [10, 11, 12]
    assert [process.shm for process in found.processes] == [2 * MB, 2 * MB, 3 * MB]
    assert found.held == {"shm": 5 * MB, "ram": 1500 << 10, "swap": 21 << 10, "pinned": 0, "fds": 3}
    assert found.flags == {"batch": "64", "workers": "2"}
    assert found.spellings == {"batch": "--batch-size", "workers": "--num-workers"}
    assert (found.binds, found.notes) == (None, ())


def test_a_shells_settings_are_its_trainers(machine: FakeMachine) -> None:
    found = job(machine.host, 9)
    assert found.flags == {"batch": "64", "workers": "2"}
    assert found.command == "bash run.sh"


def test_ranks_come_from_the_launcher_and_the_rest_from_the_ranks(machine: FakeMachine) -> None:
    machine.process(60, 1, ("torchrun", "--nproc_per_node", "2", "train.py"))
    machine.process(61, 60, ("python", "train.py", "--batch", "8"))
    machine.process(62, 61, ("ninja", "-j", "16"))
    assert job(machine.host, 60).flags == {"batch": "8", "ranks": "2"}


def test_batches_on_their_way_belong_to_the_job(machine: FakeMachine) -> None:
    machine.file("torch_11_5_1", 90, 4 * MB, age=5)
    machine.file("torch_11_5_2", 91, 4 * MB, age=1e6)  # older than the process of that id
    machine.file("torch_50_5_1", 92, 4 * MB, age=5)
    assert job(machine.host, 10).held["shm"] == 9 * MB


def test_rss_where_pss_cannot_be_read_is_reported(machine: FakeMachine) -> None:
    (machine.root / "proc/12/smaps_rollup").unlink()
    found = job(machine.host, 10)
    assert found.held["ram"] == (1000 + 200 + 5008) << 10
    (note,) = found.notes
    assert "1 of 3" in note
    assert "RSS" in note


def test_a_member_that_may_not_be_looked_into_makes_the_sum_unknown(machine: FakeMachine) -> None:
    machine.process(13, 10, TRAIN, shmem=8, maps=None, pss=1)
    found = job(machine.host, 10)
    assert found.held["shm"] is None
    assert found.held["pinned"] is None
    assert any("1 of 4" in note and "5 MB" in note for note in found.notes)


def test_descriptors_are_those_of_the_process_nearest_its_limit(machine: FakeMachine) -> None:
    machine.text("/proc/11/limits", "Max open files   2   4096   files\n")
    assert job(machine.host, 10).held["fds"] == 1


def test_pinned_memory_is_reported_as_a_part(machine: FakeMachine) -> None:
    lines = [area(9, "/dev/zero (deleted)", 8 * MB, device="00:01"), area(1, "/dev/nvidiactl", device="00:06")]
    machine.process(14, 10, TRAIN, maps=lines, pss=1)
    found = job(machine.host, 10)
    assert found.held["pinned"] == 8 * MB
    assert any("cudaHostRegister" in note for note in found.notes)


def test_found_by_its_command_line_with_its_workers(machine: FakeMachine) -> None:
    (found,) = jobs(machine.host, r"train\.py")
    assert (found.pid, len(found.processes)) == (10, 3)


def test_every_training_run_that_matches_is_a_job(machine: FakeMachine) -> None:
    assert [found.pid for found in jobs(machine.host, r"\.py")] == [10, 50]


def test_no_process_matches(machine: FakeMachine) -> None:
    with pytest.raises(NothingMatches):
        jobs(machine.host, "nobody")
    with pytest.raises(NoSuchProcess):
        job(machine.host, 4711)


def test_one_that_is_gone_before_it_is_looked_at(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from legroom.probe import memory_of_running_jobs as module

    def vanishing(host: Host, process: object, segments: object) -> object:
        if process.pid == 12:  # type: ignore[attr-defined]
            shutil.rmtree(machine.root / "proc/12")
        return real(host, process, segments)  # type: ignore[arg-type]

    real = module.holdings
    monkeypatch.setattr(module, "holdings", vanishing)
    found = job(machine.host, 10)
    assert [process.pid for process in found.processes] == [10, 11]
    assert found.held["shm"] == 2 * MB


def test_a_recorded_training_run() -> None:
    (found,) = jobs(Host.at(TREES / "bare-v2"), "train.py")
    assert [process.pid for process in found.processes] == [8100, 8101, 8102]
    assert found.flags == {"batch": "64", "workers": "2", "epochs": "90"}
    assert found.held["ram"] == (6041600 + 2 * 1843200) << 10
