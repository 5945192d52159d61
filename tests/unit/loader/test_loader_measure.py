"""Measuring a dataset, here and in a child: bytes are exact, time is split, and every death has a name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tune_data
from torch.utils.data import TensorDataset

from legroom.errors import DatasetFailed, MissingKey, UsageError
from legroom.loader.measure import apart, meter
from legroom.loader.measure.contents import contents
from legroom.loader.measure.measuring import measure, measure_dataset
from legroom.loader.tune.settings_history import key_of

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
    assert "8 samples drawn" in measured.source and measured.transport is None


def test_a_batch_larger_than_what_was_drawn_is_made_of_repeats() -> None:
    measured = measure(tune_data.Images(), batch_size=100)
    assert max(measured.tensors) == 100 * IMAGE and "repeated to 100" in measured.source


def test_the_users_own_collate_counts() -> None:
    measured = measure(tune_data.images, batch_size=4, collate_fn=tune_data.double_collate)
    assert sorted(measured.tensors) == [4 * IMAGE, 8 * IMAGE]


def test_computing_and_waiting_are_told_apart() -> None:
    computing, waiting = (
        measure(tune_data.Computing(), batch_size=4),
        measure(tune_data.Waiting(), batch_size=4),
    )
    assert computing.cpu_seconds > 0.003 and computing.cpu_seconds > 4 * computing.wait_seconds
    assert waiting.wait_seconds > 0.003 and waiting.wait_seconds > 4 * waiting.cpu_seconds


def test_batched_and_walked_datasets() -> None:
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


def test_time_limits_the_drawing() -> None:
    measured = measure(tune_data.Waiting(), batch_size=4, seconds=0.0)
    assert measured.samples == 1


def test_a_batch_that_cannot_be_pickled_is_told() -> None:
    measured = measure(tune_data.Unsendable(), batch_size=2, collate_fn=tune_data.as_they_are)
    assert measured.unsendable is not None and "pickle" in measured.unsendable.lower()


def test_tensors_are_found_wherever_they_sit() -> None:
    class Odd:
        def __init__(self) -> None:
            self.inside = {"a": [torch.zeros(10)], "b": (torch.ones(3, dtype=torch.uint8), "text")}

    import __main__

    __main__.Odd = Odd  # where pickle looks for a class of that name
    Odd.__module__, Odd.__qualname__ = "__main__", "Odd"
    found = contents(Odd())
    del __main__.Odd
    assert found.unsendable is None and sorted(found.tensors) == [3, 40]


def test_a_view_travels_with_its_whole_storage_and_once() -> None:
    whole = torch.zeros(1000)
    found = contents([whole[:10], whole[10:20]])
    assert found.tensors == (40, 40) and found.storages == (4000,)
    sparse = torch.eye(4).to_sparse()
    assert contents(sparse).tensors == (4 * 2 * 8 + 4 * 4,)
    assert contents(torch.empty(0)).storages == ()


def test_a_sample_that_is_a_view_counts_itself() -> None:
    assert measure(TensorDataset(torch.zeros(1000, 100)), batch_size=2).sample_bytes < 1000


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8"])
def test_batches_without_meaning(size: object) -> None:
    with pytest.raises(UsageError, match="must be an integer >= 1"):
        measure(tune_data.images, batch_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dataset", "said"),
    [(tune_data.Raising(), "ValueError: sample"), (tune_data.Empty(), "length is 0"), (42, "TypeError")],
)
def test_a_dataset_that_fails_says_how(dataset: object, said: str) -> None:
    with pytest.raises(DatasetFailed, match=said):
        measure(dataset, batch_size=2)


def test_a_collate_that_fails_says_how() -> None:
    with pytest.raises(DatasetFailed, match="collating 2 samples failed"):
        measure(tune_data.images, batch_size=2, collate_fn=lambda samples: samples[2])


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
def test_the_way_from_a_worker_is_measured_with_one() -> None:
    way = measure(tune_data.images, batch_size=4, transport="torch").transport
    assert way is not None and way.parent_seconds > 0 and way.worker_seconds >= 0
    assert way.worker_ram is not None and way.worker_ram > 1 << 20
    assert "torch loader" in way.source


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("name", ["images", "Images", "make_images", "Chatty"])
def test_a_named_dataset_a_class_and_a_factory(name: str) -> None:
    measured = measure_dataset(f"tune_data:{name}", batch_size=4)
    assert sorted(measured.tensors) == [4 * 8, 4 * IMAGE] and measured.rows == 8


@pytest.mark.usefixtures("beside")
def test_a_loader_brings_its_collate_and_a_file_can_be_named() -> None:
    assert len(measure_dataset("tune_data:loader", batch_size=4).tensors) == 2
    measured = measure_dataset(
        "tune_data.py:images", batch_size=4, collate="tune_data:double_collate", transport="torch"
    )
    assert sorted(measured.tensors) == [4 * IMAGE, 8 * IMAGE] and measured.transport is not None


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Raising", r"(?s)in __getitem__.*ValueError: sample \d is broken"),
        ("Crashing", r"(?s)killed by signal 11 \(SIGSEGV\).*tune_data.py"),
        ("Empty", "gave no sample"),
        ("leaving", "SystemExit: 3"),
        ("number", "neither __getitem__ nor __iter__"),
    ],
)
def test_a_child_that_goes_wrong_has_last_words(name: str, said: str) -> None:
    with pytest.raises(DatasetFailed, match=said) as caught:
        measure_dataset(f"tune_data:{name}", batch_size=2)
    assert caught.value.exit_status == 2 and caught.value.fix


@pytest.mark.usefixtures("beside")
def test_a_name_that_is_not_there_is_no_failure_of_the_dataset() -> None:
    with pytest.raises(MissingKey, match=r"tune_data has no 'imagse'") as caught:
        measure_dataset("tune_data:imagse", batch_size=2)
    assert "did you mean 'images'?" in caught.value.fix


@pytest.mark.usefixtures("beside")
def test_a_child_that_hangs_is_ended() -> None:
    with pytest.raises(DatasetFailed, match="did not give a batch within 4 s"):
        measure_dataset("tune_data:Hanging", batch_size=2, timeout=4)


@pytest.mark.parametrize("spec", ["tune_data", ":images", "tune_data:", "a:b c", "a:1x"])
def test_names_without_meaning(spec: str) -> None:
    with pytest.raises(UsageError, match="as the name of a dataset"):
        measure_dataset(spec, batch_size=2)


@pytest.mark.skipif(sys.platform != "linux", reason="semaphores lie in /dev/shm there")
def test_a_group_that_is_ended_leaves_no_semaphores() -> None:
    program = (
        "import multiprocessing, time\n"
        "context = multiprocessing.get_context('spawn')\n"
        "lock = context.Lock()\n"
        "print(lock._semlock.name, flush=True)\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    with child.stdout:
        name = child.stdout.readline().strip().lstrip("/")
    assert Path("/dev/shm", f"sem.{name}").exists()
    meter.end_group(child.pid)
    child.wait()
    assert not Path("/dev/shm", f"sem.{name}").exists() and meter._in_group(child.pid) == {}


def test_the_last_words_of_a_crash_are_those_of_the_thread_that_crashed(tmp_path: Path) -> None:
    other = [
        "Thread 0x01 (most recent call first):",
        *(f'  File "queues.py", line {line}' for line in range(9)),
    ]
    own = ["Current thread 0x02 (most recent call first):", '  File "dataset.py", line 7 in __getitem__']
    (tmp_path / "output").write_text("\n".join(["Fatal Python error: Segmentation fault", *other, *own]))
    assert apart.last_words(tmp_path / "output") == ["Fatal Python error: Segmentation fault", *own]
