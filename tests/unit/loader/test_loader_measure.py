"""Measuring a dataset, in this process and in a child: bytes, time, and how a child failed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tune_data
from forked_measurements import use_forks
from torch.utils.data import TensorDataset

import legroom
from legroom.errors import DatasetFailed, MissingKey, UsageError
from legroom.loader import legroom_check
from legroom.loader.measure import (
    dataloader_trial,
    load_timed_samples,
    measure_in_child,
    memory_guard_script,
    start_memory_guard,
)
from legroom.loader.measure.dataset_bytes_and_seconds import measure
from legroom.loader.measure.load_timed_samples import contents_of
from legroom.loader.measure.measure_in_child import measure_dataset, run_loader_in_child
from legroom.loader.measure.start_memory_guard import GuardedRun
from legroom.loader.tune.remembered_settings import key_of
from legroom.records.loader_settings_and_flags import CompleteLoaderSettings
from legroom.records.machine import Pool

HERE = Path(__file__).parent
IMAGE = 3 * 16 * 16 * 4


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's directory is the caller's, and what lies in it can be imported."""
    monkeypatch.chdir(HERE)


def test_bytes_of_a_batch_are_exact() -> None:
    measured = measure(tune_data.Images(), batch_size=4)
    assert sorted(measured.tensors) == [4 * 8, 4 * IMAGE]
    assert measured.batch_bytes == 4 * (8 + IMAGE) and measured.rows == 8 and measured.samples == 8
    assert IMAGE <= measured.sample_bytes < IMAGE + 200
    assert "8 samples loaded" in measured.source and measured.transport is None


def test_a_batch_larger_than_the_loaded_samples_repeats_them() -> None:
    measured = measure(tune_data.Images(), batch_size=100)
    assert max(measured.tensors) == 100 * IMAGE and "repeated to 100" in measured.source


def test_the_users_collate_is_measured() -> None:
    measured = measure(tune_data.images, batch_size=4, collate_fn=tune_data.double_collate)
    assert sorted(measured.tensors) == [4 * IMAGE, 8 * IMAGE]


@pytest.mark.load_sensitive(reason="time that a hypervisor takes from the machine is neither CPU time nor run queue")
def test_computing_and_waiting_are_separated() -> None:
    computing, waiting = (measure(tune_data.Computing(), batch_size=4), measure(tune_data.Waiting(), batch_size=4))
    assert computing.cpu_seconds > 0.003 and computing.cpu_seconds > 4 * computing.wait_seconds
    assert waiting.wait_seconds > 0.003 and waiting.wait_seconds > 4 * waiting.cpu_seconds


def test_a_point_in_time_is_one_during_which_no_core_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time on the run queue would be in one of two differences, and its seconds in the other."""
    now, queued = [100.0], [0.0]

    def perf_counter() -> float:
        if queued[0] < 5:  # another process gets the core before the clock is read
            now[0], queued[0] = 105.0, 5.0
        return now[0]

    monkeypatch.setattr(load_timed_samples.time, "perf_counter", perf_counter)
    monkeypatch.setattr(load_timed_samples, "_seconds_on_run_queue", lambda: queued[0])
    start = load_timed_samples.Clock.now()
    now[0] += 1.0
    assert (start.wall, start.queued) == (105.0, 5.0)
    assert load_timed_samples.Clock.now().since(start).undisturbed == 1.0


def test_batched_and_iterable_datasets() -> None:
    assert max(measure(tune_data.Batched(), batch_size=4).tensors) == 4 * IMAGE
    walked = measure(tune_data.Walked(), batch_size=4)
    assert walked.iterable and walked.rows is None and walked.samples == 5 and walked.tensors == (64,)


def test_an_iterable_dataset_that_raises_for_its_length_is_measured() -> None:
    class Unsized(tune_data.Walked):
        def __len__(self) -> int:
            raise RuntimeError("not known before the end")

    measured = measure(Unsized(), batch_size=4)
    assert measured.rows is None and measured.samples == 5
    assert key_of(Unsized()).endswith(" None")

    class Broken(tune_data.Images):
        def __len__(self) -> int:
            raise RuntimeError("the list of files is gone")

    assert key_of(Broken()).endswith(" None")
    with pytest.raises(DatasetFailed, match="the list of files is gone"):
        measure(Broken(), batch_size=4)


def test_the_time_limit_of_loading() -> None:
    measured = measure(tune_data.Waiting(), batch_size=4, seconds=0.0)
    assert measured.samples == 1


def test_a_batch_that_cannot_be_pickled_is_reported() -> None:
    measured = measure(tune_data.Unsendable(), batch_size=2, collate_fn=tune_data.as_they_are)
    assert measured.unsendable is not None and "pickle" in measured.unsendable.lower()


def test_tensors_are_found_in_any_class() -> None:
    class Odd:
        def __init__(self) -> None:
            self.inside = {"a": [torch.zeros(10)], "b": (torch.ones(3, dtype=torch.uint8), "text")}

    import __main__

    __main__.Odd = Odd  # where pickle looks for a class of that name
    Odd.__module__, Odd.__qualname__ = "__main__", "Odd"
    found = contents_of(Odd())
    del __main__.Odd
    assert found.unsendable is None and sorted(found.tensors) == [3, 40]


def test_a_view_counts_with_its_whole_storage_once() -> None:
    whole = torch.zeros(1000)
    found = contents_of([whole[:10], whole[10:20]])
    assert found.tensors == (40, 40) and found.storages == (4000,)
    sparse = torch.eye(4).to_sparse()
    assert contents_of(sparse).tensors == (4 * 2 * 8 + 4 * 4,)
    assert contents_of(torch.empty(0)).storages == ()


def test_a_sample_that_is_a_view_counts_itself() -> None:
    assert measure(TensorDataset(torch.zeros(1000, 100)), batch_size=2).sample_bytes < 1000


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8"])
def test_a_batch_size_below_one_is_refused(size: object) -> None:
    with pytest.raises(UsageError, match="must be an integer >= 1"):
        measure(tune_data.images, batch_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dataset", "said"),
    [(tune_data.Raising(), "ValueError: sample"), (tune_data.Empty(), "length is 0"), (42, "TypeError")],
)
def test_a_dataset_that_fails_is_explained(dataset: object, said: str) -> None:
    with pytest.raises(DatasetFailed, match=said):
        measure(dataset, batch_size=2)


def test_a_collate_that_fails_is_explained() -> None:
    with pytest.raises(DatasetFailed, match="collating 2 samples failed"):
        measure(tune_data.images, batch_size=2, collate_fn=lambda samples: samples[2])


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
def test_sending_from_a_worker_is_measured() -> None:
    way = measure(tune_data.images, batch_size=4, transport="torch").transport
    assert way is not None and way.parent_seconds > 0 and way.worker_seconds >= 0
    assert way.worker_ram is not None and way.worker_ram > 1 << 20
    assert "torch loader" in way.source


@pytest.mark.usefixtures("beside", "child_in_fork")
@pytest.mark.parametrize("name", ["images", "Images", "make_images", "Chatty"])
def test_a_named_dataset_a_class_and_a_factory(name: str) -> None:
    measured = measure_dataset(f"tune_data:{name}", batch_size=4)
    assert sorted(measured.tensors) == [4 * 8, 4 * IMAGE] and measured.rows == 8


@pytest.mark.usefixtures("beside")
def test_a_named_loader_has_its_collate_and_a_file_can_be_named() -> None:
    assert len(measure_dataset("tune_data:loader", batch_size=4).tensors) == 2
    measured = measure_dataset(
        "tune_data.py:images", batch_size=4, collate="tune_data:double_collate", transport="torch"
    )
    assert sorted(measured.tensors) == [4 * IMAGE, 8 * IMAGE] and measured.transport is not None


@pytest.mark.usefixtures("beside", "child_in_fork")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Raising", r"(?s)in __getitem__.*ValueError: sample \d is broken"),
        ("Crashing", r"(?s)killed by signal 11 \(SIGSEGV\).*tune_data.py"),
        ("Empty", "has no samples"),
        ("leaving", "SystemExit: 3"),
        ("number", "neither __getitem__ nor __iter__"),
    ],
)
def test_a_child_that_fails_is_explained(name: str, said: str) -> None:
    with pytest.raises(DatasetFailed, match=said) as caught:
        measure_dataset(f"tune_data:{name}", batch_size=2)
    assert caught.value.exit_status == 2 and caught.value.fix


@pytest.mark.usefixtures("beside", "child_in_fork")
def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(MissingKey, match=r"tune_data has no 'imagse'") as caught:
        measure_dataset("tune_data:imagse", batch_size=2)
    assert "did you mean 'images'?" in caught.value.fix


@pytest.mark.usefixtures("beside")
def test_a_child_that_hangs_is_ended() -> None:
    with pytest.raises(DatasetFailed, match="no batch within 4 s"):
        measure_dataset("tune_data:Hanging", batch_size=2, timeout=4)


@pytest.mark.parametrize("spec", ["tune_data", ":images", "tune_data:", "a:b c", "a:1x"])
def test_text_that_is_not_a_name(spec: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a dataset"):
        measure_dataset(spec, batch_size=2)


@pytest.mark.skipif(sys.platform != "linux", reason="semaphores lie in /dev/shm there")
def test_an_ended_group_leaves_no_semaphores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_guard_script, "TRACKER_S", 60.0)  # on a busy machine the tracker waits for a core
    program = (
        "import multiprocessing, time\n"
        "context = multiprocessing.get_context('spawn')\n"
        "lock = context.Lock()\n"
        "print(lock._semlock.name, flush=True)\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    with child.stdout:
        name = child.stdout.readline().strip().lstrip("/")
    assert Path("/dev/shm", f"sem.{name}").exists()
    memory_guard_script.end_group(child.pid)
    child.wait()
    assert not Path("/dev/shm", f"sem.{name}").exists() and memory_guard_script._in_group(child.pid) == {}


def test_the_last_lines_of_a_crash_are_those_of_the_thread_that_crashed(tmp_path: Path) -> None:
    other = ["Thread 0x01 (most recent call first):", *(f'  File "queues.py", line {line}' for line in range(9))]
    own = ["Current thread 0x02 (most recent call first):", '  File "dataset.py", line 7 in __getitem__']
    (tmp_path / "output").write_text("\n".join(["Fatal Python error: Segmentation fault", *other, *own]))
    assert start_memory_guard.last_lines(tmp_path / "output") == ["Fatal Python error: Segmentation fault", *own]


class _Alive:
    """A batch; counts how many exist."""

    now = most = 0

    def __init__(self, samples: list[Any]) -> None:
        _Alive.now += 1
        _Alive.most = max(_Alive.most, _Alive.now)

    def __del__(self) -> None:
        _Alive.now -= 1


def test_a_trial_holds_as_many_batches_as_a_training_loop() -> None:
    """The new one and the one before: in short epochs, which are repeated, it held one more."""
    _Alive.most = 0
    dataloader_trial._loop(
        [0, 1, 2], _Alive, lambda **_: None, caller=True, loader_kind="torch", batch_size=1, num_workers=0, prefetch_factor=2,
        persistent_workers=False, multiprocessing_context=None, seconds=30.0, batch_seconds=0.0, pause_seconds=0.0,
        longer_seconds=0.0,
    )  # fmt: skip
    assert _Alive.most == 2 and _Alive.now == 0


def test_shared_memory_that_others_free_does_not_hide_what_the_trial_takes() -> None:
    size = 4 << 20
    others = [Path("/dev/shm", f"legroom-test-{os.getpid()}-{number}") for number in range(2)]
    try:
        for path in others:
            path.write_bytes(bytes(size))
        use = dataloader_trial._ShmUse()
        with tempfile.TemporaryFile(dir="/dev/shm") as own, others[0].open("rb") as cached:
            own.write(bytes(size)), own.flush()
            others[1].unlink()
            assert cached.read(1) and use.held() == size <= use.now()  # without the file that existed before
    finally:
        for path in others:
            path.unlink(missing_ok=True)


def test_a_worker_that_waits_for_a_cpu_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its CPU time stands still while its queue is not full."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    asleep = subprocess.Popen(["sleep", "600"])
    try:
        for pid, waits in ((busy.pid, False), (asleep.pid, True)):
            monkeypatch.setattr(dataloader_trial, "_children", lambda pid=pid: [str(pid)])
            deadline, found = time.monotonic() + 60, dataloader_trial._activity()
            while (found is None) is waits and time.monotonic() < deadline:
                time.sleep(0.01)  # until it has begun
                found = dataloader_trial._activity()
            assert (found is not None) is waits
    finally:
        for process in (busy, asleep):
            process.kill()
            process.wait()


class _Boxes:
    """A list of Python objects, or an array, or a list of arrays, or the first list frozen."""

    def __init__(self, kind: str) -> None:
        self.boxes: Any = np.ones((150_000, 4), np.float32)
        if kind == "arrays":
            self.boxes = [np.ones(3000, np.float32) for _ in range(3000)]
        elif kind != "array":
            self.boxes = [[float(index), 2.0, 3.0, 4.0] for index in range(150_000)]
        if kind == "frozen":
            legroom.freeze_dataset(self)

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: int) -> Any:
        return np.array(self.boxes[index], np.float32)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "loader", "batch_size", "seconds"),
    [
        *((kind, "torch", 256, 0.0) for kind in ("list", "array", "arrays", "frozen")),
        ("list", "legroom", 256, 0.0),
        *(pytest.param(kind, "legroom", 256, 0.0, marks=pytest.mark.soak) for kind in ("array", "arrays", "frozen")),
        ("list", "torch", 4, 0.0),  # the first batches alone hold too few samples to judge
        pytest.param("list", "torch", 2048, 50.0, marks=pytest.mark.soak),  # the workers have ended with the epoch
        ("arrays", "torch", 256, 1.0),
    ],
)  # fmt: skip
@pytest.mark.load_sensitive(reason="a trial run of a few batches shows what its worker has read by then")
def test_a_trial_run_names_the_attribute_that_workers_copy(
    kind: str, loader: Any, batch_size: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time beyond the fewest batches, as on a busy machine, and with time for all of them."""
    for variable in ("LEGROOM_SHM", "LEGROOM_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(legroom_check, "_TRIAL_S", seconds)
    found = legroom.check(
        _Boxes(kind), batch_size=batch_size, num_workers=1, start_method="fork", loader=loader, timeout=240
    )
    codes = [(finding.code, "boxes (list, " in finding.message) for finding in found.findings]
    assert codes == ([("workers-copy-dataset", True)] if kind == "list" else []), found


TORCH_WORKER = """Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/venv/lib/torch/utils/data/_utils/worker.py", line 351, in _worker_loop
  File "{file}", line 7, in __getitem__
OSError: [Errno 28] No space left on device{rest}
"""


@pytest.mark.parametrize(
    ("problem", "pool"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "shm"),  # a semaphore
        (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x"), "shm"),
        (OSError(errno.ENOSPC, "No space left on device", "/scratch/x"), None),
        (OSError(TORCH_WORKER.format(file="/home/me/data.py", rest=": '/scratch/x'")), None),
        (OSError(TORCH_WORKER.format(file="/home/me/data.py", rest="")), None),  # it wrote to an open file
        (OSError(TORCH_WORKER.format(file="/usr/lib/python3/multiprocessing/synchronize.py", rest="")), "shm"),
        (RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)"), "shm"),
        (RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: File exists (17)"), "shm"),
        (RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376"), None),  # of a GPU
    ],
)
def test_which_memory_ran_out(problem: BaseException, pool: str | None) -> None:
    assert dataloader_trial._pool(problem) == pool


class Scores(tune_data.Images):
    """Writes how willingly the OOM killer takes the process that loads samples."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __getitem__(self, index: int) -> Any:
        self.path.write_text(Path("/proc/self/oom_score_adj").read_text())
        return super().__getitem__(index)


def test_a_test_that_uses_forks_leaves_new_processes_to_the_others() -> None:
    before = measure_in_child.run_guarded
    with pytest.MonkeyPatch.context() as patch:
        use_forks(patch.setattr)
    assert measure_in_child.run_guarded is before


@pytest.mark.skipif(sys.platform != "linux", reason="memory is watched on Linux")
def test_a_loader_that_is_tried_runs_under_a_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = CompleteLoaderSettings(batch_size=2, num_workers=0, prefetch_factor=2, loader_kind="torch")
    rate = run_loader_in_child(Scores(tmp_path / "score"), None, settings, 0.0)
    assert isinstance(rate, float) and rate > 0 and (tmp_path / "score").read_text().strip() == "1000"
    failed = run_loader_in_child(tune_data.Raising(), None, settings, 0.0)
    assert isinstance(failed, str) and failed.startswith("ValueError: sample")
    stopped = GuardedRun(None, "ram", 5 << 30, 0, (), killed=False)
    monkeypatch.setattr(measure_in_child, "fork_guarded", lambda *_: stopped)
    assert "5 GB of RAM" in str(run_loader_in_child(tune_data.Images(), None, settings, 0.0))


@pytest.mark.usefixtures("beside", "child_in_fork")
@pytest.mark.skipif(sys.platform != "linux", reason="there is no guard elsewhere")
def test_a_program_that_leaves_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*_: object) -> None:
        raise AssertionError("the caller goes on after legroom.check")

    monkeypatch.setattr(os, "execv", replace)
    assert legroom.check("tune_data:images", batch_size=2, num_workers=0, leaving=True).verdict == "fits"


SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("{name}", type=int, default=4)
arguments = parser.parse_args()
train_set = [float(arguments.size)] * 8
"""


@pytest.mark.usefixtures("child_in_fork")
def test_a_script_that_parses_its_command_line_at_import_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("parses_none.py").write_text(SCRIPT.format(name="--size"))
    assert measure_dataset("parses_none.py:train_set", batch_size=4).rows == 8
    Path("needs_one.py").write_text(SCRIPT.format(name="size"))
    with pytest.raises(DatasetFailed) as caught:
        measure_dataset("needs_one.py:train_set", batch_size=4)
    assert "needs_one.py" in caught.value.why and "parser.parse_args()" in caught.value.why
    assert "argparse.py" not in caught.value.why


def test_a_full_shm_is_not_blamed_on_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    from legroom.loader.dataloader import explain_start_failure

    full = Pool("shm", 20 << 20, 20 << 20, 0, "statvfs")
    monkeypatch.setattr(explain_start_failure, "shm_space", lambda *_: full)
    answer: dict[str, Any] = {"error": DatasetFailed("", fix=("look at the dataset",)).as_dict(), "tail": []}
    measure_in_child._add_full_shm(answer, OSError(errno.EIO, "Input/output error"))
    assert answer["tail"] == [] and answer["error"]["fix"] == ["look at the dataset"]
    measure_in_child._add_full_shm(answer, OSError(errno.ENOSPC, "No space left on device"))
    assert "0 B of 20 MB free" in answer["tail"][-1] and "num_workers=0" in answer["error"]["fix"][0]


@pytest.mark.load_sensitive(reason="the function is called for a limited time")
def test_the_first_calls_of_a_collate_function_do_not_count() -> None:
    """They fault in the memory of a batch. tune then chose workers where none were seven times as fast."""
    calls = []

    def collate(members: list[Any]) -> Any:
        calls.append(len(members))
        if calls.count(4) <= 6:
            time.sleep(0.002)
        return torch.zeros(4)

    found = measure([torch.zeros(1)] * 8, batch_size=4, collate_fn=collate)
    assert calls.count(4) > 6 and found.collate_seconds < 0.001


def test_where_dummy_tensors_cannot_be_loaded_no_dataset_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], folder: Path, timeout: float) -> GuardedRun:
        (folder / "output").write_text("ImportError: libtorch_cpu.so: cannot be read\n")
        return GuardedRun(256, None, 0, 0, (), killed=False)

    monkeypatch.setattr(measure_in_child, "run_guarded", fails)
    with pytest.raises(DatasetFailed) as caught:
        measure_in_child.try_named(
            "", None, timeout=9, leaving=False, measured=None, own=None, known=False, sizes=[8], samples=8
        )
    told = str(caught.value)
    assert "loading batches of dummy tensors" in told and "libtorch_cpu.so" in told and "import torch" in told
