"""`legroom check`: the verdict and its exit status, what breaks first, bad input."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_measurements import use_forks
from machines import healthy, with_pool
from rigs import TREES

import legroom
from legroom.cli.main import run
from legroom.errors import UsageError
from legroom.records.workload import LoaderTrial

MB, GB = 1 << 20, 1 << 30
DOCKER = ("--root", str(TREES / "docker-v2"))


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(["check", *arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(_run(capsys, "--json", *arguments)[1])
    return report


def test_too_big_names_the_pool_and_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--batch", "64", "--sample-bytes", "1MB", "--workers", "4", *DOCKER)
    status, text, _ = _run(capsys, *options)
    report = _json(capsys, *options)
    assert status == 1 and report["schema"] == "legroom.check/1" and report["verdict"] == "too-big"
    first = report["problems"][0]
    assert first["pool"] == "shm" and first["missing"] == first["need"] - first["free"] > 0
    assert report["settings"]["num_workers"] < 4 and report["settings"]["batch_size"] == 64
    assert 0 < report["largest_batch"] < 64
    flat = " ".join(text.split())
    assert "too big" in flat and " short" in flat and "largest batch size with these workers" in flat
    assert "legroom.DataLoader fits with these settings" in flat


def test_it_fits_without_workers_and_with_our_loader(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (("--workers", "0"), ("--workers", "4", "--loader", "legroom")):
        status, text, _ = _run(capsys, "--batch", "64", "--sample-bytes", "1MB", *more, *DOCKER)
        assert status == 0 and "Verdict: fits" in text


def test_unknown_is_no_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recording.json").write_text("{}")
    options = ("--batch", "64", "--sample-bytes", "1MB", "--workers", "4", "--root", str(tmp_path))
    status, text, _ = _run(capsys, *options)
    assert status == 0 and "Verdict: unknown" in text and "shm: unknown" in text
    assert _json(capsys, *options)["unknown"].keys() >= {"shm", "ram"}


@pytest.mark.parametrize("tree", sorted(path.name for path in TREES.iterdir() if path.is_dir()))
def test_every_recorded_machine_gets_an_answer(tree: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = ("--batch", "64", "--sample-bytes", "1MB", "--workers", "4", "--pin-memory", "--root", str(TREES / tree))
    status, text, err = _run(capsys, *options)
    assert err == "" and status in (0, 1) and "None" not in text
    long = [line for line in text.splitlines() if len(line) > 80]
    assert all(max(map(len, line.split())) > 60 for line in long), long


@pytest.mark.usefixtures("child_in_fork")
def test_the_disk_of_checkpoints_is_a_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--batch", "8", "--sample-bytes", "1KB", "--checkpoint-dir", str(tmp_path))
    report = _json(capsys, *options, "--checkpoint-bytes", "1E")
    assert [one["pool"] for one in report["problems"]] == ["disk"] and report["settings"] == {}
    assert any("df -h" in step for step in report["problems"][0]["fix"])
    status, text, _ = _run(capsys, *options, "--checkpoint-bytes", "1E")
    assert status == 1 and "does not fit with any DataLoader settings" in text
    assert _run(capsys, *options, "--checkpoint-bytes", "1KB")[0] == 0


def test_checkpoints_that_go_nowhere_are_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "no such runs"
    options = ("--batch", "8", "--sample-bytes", "1KB", "--checkpoint-bytes", "1KB")
    status, out, err = _run(capsys, *options, "--checkpoint-dir", str(folder))
    assert status == 2 and out == "" and f"mkdir -p '{folder}'" in err


def test_a_data_file_has_no_larger_batch_than_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((10, 1 << 18), np.float32))
    few = _json(capsys, "--batch", "10", "--workers", "2", "--data", str(path), *DOCKER)
    many = _json(capsys, "--batch", "100000", "--workers", "2", "--data", str(path), *DOCKER)
    assert many["need"] == few["need"] and few["need"]["shm"] < 3 * 10 * MB


def test_a_data_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((100, 1 << 18), np.float32))
    report = _json(capsys, "--batch", "16", "--workers", "2", "--data", str(path), *DOCKER)
    assert report["verdict"] == "too-big"  # 6 batches of 16 MB in 64 MB
    assert report["need"]["shm"] >= 6 * 16 * MB


DATASET = """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, index): return torch.zeros(1 << 18), index
class Broken(Data):
    def __getitem__(self, index): raise KeyError("lost sample")
class Endless(Data):
    def __len__(self): return 1 << 30
data, broken, endless = Data(), Broken(), Endless()
def listed(samples):
    return samples
def double(samples):
    images = torch.stack([sample[0] for sample in samples])
    return images, images.clone()
"""


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("torch")
    name = f"check_dataset_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(DATASET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name  # type: ignore[misc]
    sys.modules.pop(name, None)


def test_a_dataset_is_drawn_from(dataset: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = _json(capsys, "--batch", "8", "--dataset", f"{dataset}:data", *DOCKER)
    assert report["verdict"] == "fits"
    process, making, batches = [term["bytes"] for term in report["terms"] if term["pool"] == "ram"]
    assert process > MB and batches == 2 * (8 * MB + 8 * 8)
    assert 8 * MB <= making < 9 * MB  # its samples


@pytest.mark.usefixtures("child_in_fork")
def test_what_a_collate_function_makes_counts(dataset: str, capsys: pytest.CaptureFixture[str]) -> None:
    twice = _json(capsys, "--batch", "8", "--dataset", f"{dataset}:data", "--collate", f"{dataset}:double", *DOCKER)
    _, making, batches = [term["bytes"] for term in twice["terms"] if term["pool"] == "ram"]
    assert batches == 2 * 16 * MB
    assert 24 * MB <= making < 25 * MB  # its samples, and beside them what its own collate makes of them


@pytest.mark.usefixtures("child_in_fork")
def test_a_batch_that_cannot_fit_is_not_drawn(dataset: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = _json(capsys, "--batch", str(1 << 20), "--dataset", f"{dataset}:endless")
    assert report["verdict"] == "too-big" and report["problems"][0]["pool"] == "ram"
    assert report["need"]["ram"] > 1 << 40  # 1 MB a sample
    assert 0 < report["largest_batch"] < 1 << 20


@pytest.mark.usefixtures("child_in_fork")
def test_every_tensor_of_a_batch_that_is_a_list_counts(dataset: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--batch", "200", "--workers", "2", "--dataset", f"{dataset}:data", "--collate", f"{dataset}:listed")
    report = _json(capsys, *options, *DOCKER)
    assert report["need"]["fds"] > 2 * 40  # 40 samples in the dataset, of which 32 were drawn
    assert report["need"]["shm"] > 2 * 40 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="memory is watched on Linux")
def test_a_trial_run_counts_the_process_and_what_workers_keep(
    dataset: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = _json(capsys, "--batch", "8", "--dataset", f"{dataset}:data")
    (term,) = [term for term in alone["terms"] if term["pool"] == "ram"]
    assert (
        "trial run" in term["source"] and alone["need"]["ram"] > 30 * MB
    )  # torch itself, less what other processes share
    assert alone["verdict"] == "fits" and alone["settings"]["num_workers"] == 0 and alone["codes"] == {}
    use_forks(monkeypatch.setattr)  # the process is new above, and the workers are forks in both
    with_workers = _json(capsys, "--batch", "8", "--workers", "2", "--dataset", f"{dataset}:data")
    assert with_workers["need"]["shm"] >= 4 * 8 * MB and with_workers["need"]["fds"] > 10


@pytest.mark.skipif(sys.platform != "linux", reason="memory is watched on Linux")
@pytest.mark.parametrize(
    ("shm", "ended", "verdict"), [(50, None, "fits"), (30, None, "too-big"), (50, "its time was over", "unknown")]
)
def test_the_largest_batch_agrees_with_the_verdict_of_a_trial_run(
    shm: int, ended: str | None, verdict: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 samples of 1 MB in flight 2 × 2 + 3 times are 56 MB and semaphores; the trial run has measured 40 MB."""
    from legroom.loader import legroom_check

    machine = with_pool(with_pool(healthy(), "ram", GB, 0, GB), "shm", 64 * MB, 0, shm * MB)
    trial = LoaderTrial(
        ram=300 * MB, shm=40 * MB, fds=20, batches=100, process=150 * MB, whole=True, filled=True,
        waiting_shm=40 * MB, unfinished=ended,
    )  # fmt: skip
    monkeypatch.setattr(legroom_check, "snapshot", lambda host: machine)
    monkeypatch.setattr(legroom_check, "_tried", lambda *given, **options: trial)
    options = ("--batch", "8", "--sample-bytes", "1MB", "--workers", "2")
    report = _json(capsys, *options)
    assert report["verdict"] == verdict, report
    text = _run(capsys, *options)[1]
    if verdict == "unknown":
        assert report["largest_batch"] is None and "batch size" not in text
    else:
        assert (report["largest_batch"] >= 8) is (verdict == "fits")
        assert f"largest batch size with these workers: {report['largest_batch']}" in text


@pytest.mark.usefixtures("child_in_fork")
def test_a_dataset_that_raises_is_exit_2(dataset: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, "--batch", "8", "--dataset", f"{dataset}:broken")
    assert status == 2 and out == "" and "lost sample" in err
    assert _run(capsys, "--batch", "8", "--dataset", "no_such_module:data")[0] == 2


def test_python_takes_the_dataset_itself(dataset: str) -> None:
    from importlib import import_module

    data = import_module(dataset).data
    plan = legroom.check(data, batch_size=8, num_workers=2, prefetch_factor=2)
    assert plan.need.shm >= 5 * 8 * MB and plan.settings is not None
    with pytest.raises(UsageError):
        legroom.check(data, batch_size=8, sample_bytes=4)
    with pytest.raises(UsageError):
        legroom.check(data, batch_size=8, collate_fn="module:function")
    with pytest.raises(UsageError):
        legroom.check(data, batch_size=0)


class _Counting:
    """Samples of a megabyte; knows the process that drew from it."""

    def __init__(self) -> None:
        self.drawn, self.process = 0, os.getpid()

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        self.drawn += 1
        return np.ones(MB // 4, dtype=np.float32)


class _NotInAFork(_Counting):
    """As a dataset whose tensors are on a GPU: CUDA does not work in a fork."""

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self.process:
            raise RuntimeError("cannot be used in a forked subprocess")
        return super().__getitem__(index)


class _Slow(_Counting):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.5)
        return super().__getitem__(index)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is watched on Linux")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_object_is_tried_in_a_fork(workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    data = _Counting()
    before = random.getstate()
    plan = legroom.check(data, batch_size=4, num_workers=workers)
    (term, *_) = [term for term in plan.need.terms if term.pool == "ram"]
    assert plan.verdict == "fits" and "trial run" in term.source and "adds to this process" in term.what
    assert data.drawn == 0 and random.getstate() == before and capfd.readouterr() == ("", "")
    assert 8 * MB < plan.need.ram < 400 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="memory is watched on Linux")
def test_a_dataset_object_that_cannot_be_forked_is_drawn_from_here() -> None:
    data = _NotInAFork()
    plan = legroom.check(data, batch_size=4)
    assert data.drawn and plan.verdict == "fits" and plan.need.ram >= 8 * MB
    assert any("fork of this process" in note for note in plan.notes)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is watched on Linux")
def test_a_trial_that_takes_too_long_is_unknown_and_reports_what_it_had_taken() -> None:
    began = time.monotonic()
    plan = legroom.check(_Slow(), batch_size=16, num_workers=1, timeout=6)
    assert time.monotonic() < began + 30
    assert plan.verdict == "unknown" and plan.codes == {"ram": "trial-unfinished"}
    assert "by then" in plan.unknown["ram"] and "--timeout" in plan.unknown["ram"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--batch", "8"),
        ("--batch", "0", "--sample-bytes", "1MB"),
        ("--batch", "-8", "--sample-bytes", "1MB"),
        ("--batch", "8", "--sample-bytes", "0"),
        ("--batch", "8", "--sample-bytes", "-1MB"),
        ("--batch", "8", "--sample-bytes", "lots"),
        ("--batch", "8", "--sample-bytes", "1MB", "--workers", "-1"),
        ("--batch", "8", "--sample-bytes", "1MB", "--workers", "2", "--prefetch", "0"),
        ("--batch", "8", "--sample-bytes", "1MB", "--data", "x.npy"),
        ("--batch", "8", "--data", "/no/such/file.h5"),
        ("--batch", "8", "--sample-bytes", "1MB", "--checkpoint-bytes", "1GB"),
        ("--batch", "8", "--sample-bytes", "1MB", "--val-workers", "-1"),
        ("--batch", "8", "--dataset", "nonsense"),
    ],
)
def test_bad_input_is_exit_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, *arguments)
    assert status == 2 and out == "" and err and "Traceback" not in err


def test_what_is_missing_is_named_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    err = _run(capsys, "--batch", "8")[2]
    assert all(option in err for option in ("--dataset", "--data FILE", "--sample-bytes")), err


def test_a_trial_is_left_out_only_where_one_batch_does_not_fit() -> None:
    """Not for what drawing took of the process: that counts the measuring code too, and said no to what ran."""
    from legroom.advice.job_settings_to_workload import Batch
    from legroom.loader.legroom_check import _one_batch_fits
    from legroom.probe.host_files_and_syscalls import Host
    from legroom.probe.snapshot import snapshot

    machine = snapshot(Host.at(str(TREES / "bare-v2")))
    ram = machine.pool("ram")
    assert ram is not None and ram.free is not None
    assert _one_batch_fits(Batch((ram.free - 1,), 1, "given"), machine)
    assert not _one_batch_fits(Batch((ram.free,), 1, "given"), machine)


LOADERS = """
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler
from check_data import Data, double
data = Data()
class Own:
    def __iter__(self):
        return iter([[0, 1, 2], [3]] * 5)
    def __len__(self):
        return 10
def started(worker):
    open(f"started-{worker}", "w").close()
loader = DataLoader(data, batch_size=4, num_workers=2, prefetch_factor=3, collate_fn=double, worker_init_fn=started)
alone = DataLoader(data, batch_size=4)
sampled = DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * 40, 400))
batched = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 5, drop_last=True))
own = DataLoader(data, batch_sampler=Own())
whole = DataLoader(data, batch_size=None)
"""


@pytest.fixture
def loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")
    (tmp_path / "check_data.py").write_text(DATASET)
    (tmp_path / "check_loaders.py").write_text(LOADERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "check_loaders"
    for name in ("check_data", "check_loaders"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("child_in_fork")
def test_the_settings_of_a_dataloader_are_checked_and_printed(
    loaders: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = _json(capsys, "--dataset", f"{loaders}:loader")
    assert report["from_loader"] == {
        "batch_size": 4, "num_workers": 2, "prefetch_factor": 3, "worker_init_fn": "started", "collate_fn": "double",
    }  # fmt: skip
    settings = report["settings"]
    assert [settings[name] for name in ("batch_size", "num_workers", "prefetch_factor")] == [4, 2, 3]
    assert settings["persistent_workers"] is False
    assert (tmp_path / "started-1").exists()  # the trial had its workers
    assert report["need"]["shm"] > 2 * 4 * MB * 6  # and their batches
    status, text, _ = _run(capsys, "--dataset", f"{loaders}:loader")
    assert status == 0 and "from the DataLoader: batch_size=4, num_workers=2, prefetch_factor=3" in text


@pytest.mark.usefixtures("child_in_fork")
def test_typed_options_replace_those_of_a_dataloader(loaders: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--dataset", f"{loaders}:loader", "--batch", "8", "--workers", "0")
    report = _json(capsys, *arguments)
    assert report["from_loader"] == {"collate_fn": "double"} and "and 0 workers" in str(report["terms"])
    assert report["instead_of_loader"] == {
        "batch_size": {"given": 8, "own": 4}, "num_workers": {"given": 0, "own": 2},
    }  # fmt: skip
    text = _run(capsys, *arguments)[1]
    assert "given by you: batch_size=8 (DataLoader: 4), num_workers=0 (DataLoader: 2)" in " ".join(text.split())
    prefetch = _json(capsys, "--dataset", f"{loaders}:loader", "--prefetch", "1")
    assert prefetch["settings"]["prefetch_factor"] == 1 and prefetch["settings"]["num_workers"] == 2


@pytest.mark.usefixtures("child_in_fork")
def test_settings_of_workers_are_refused_for_a_dataloader_without_workers(
    loaders: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = _run(capsys, "--dataset", f"{loaders}:alone", "--prefetch", "2")
    assert status == 2 and "--prefetch needs --workers 1 or more" in err


@pytest.mark.usefixtures("child_in_fork")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own", ("batch_sampler without a batch_size", "Own decides", "in its largest batch: --batch")),
        ("whole", ("the DataLoader makes no batches", "a batch size of 1")),
        ("data", ("the batch size is missing", "not a DataLoader", "pass --batch")),
    ],
)
def test_a_batch_size_that_nothing_gives_is_asked_for(
    name: str, said: tuple[str, ...], loaders: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = _run(capsys, "--dataset", f"{loaders}:{name}")
    assert status == 2 and all(one in err for one in said) and "loading a batch" not in err


@pytest.mark.usefixtures("child_in_fork")
def test_samplers_of_a_dataloader_decide_the_epoch(loaders: str, capsys: pytest.CaptureFixture[str]) -> None:
    sampled = _json(capsys, "--dataset", f"{loaders}:sampled")
    assert sampled["from_loader"]["sampler"] == "WeightedRandomSampler"
    assert "100 batches per epoch" in str(sampled["terms"])  # of 400 samples, though the dataset has 40
    batched = _json(capsys, "--dataset", f"{loaders}:batched")
    assert batched["from_loader"] == {"batch_size": 5, "num_workers": 0, "drop_last": True}
    typed = _json(capsys, "--dataset", f"{loaders}:own", "--batch", "3")
    assert typed["instead_of_loader"] == {"batch_size": {"given": 3, "own": "batch_sampler=Own"}}


def test_a_dataloader_object_gives_its_settings() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.zeros(64, 1 << 14))
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=1, prefetch_factor=4, persistent_workers=True)
    found = legroom.check(loader)
    assert found.settings is not None and found.from_loader["prefetch_factor"] == 4
    assert (found.settings.batch_size, found.settings.num_workers, found.settings.prefetch_factor) == (8, 1, 4)
    assert found.need.shm > 5 * 8 * (1 << 16)
    found = legroom.check(loader, batch_size=16, num_workers=0)
    assert "with 0 workers" in str(found.need.terms)
    assert found.instead_of_loader == {"batch_size": (16, 8), "num_workers": (0, 1)}
    with pytest.raises(UsageError, match=r"prefetch_factor= needs num_workers=1 or more"):
        legroom.check(data, batch_size=8, prefetch_factor=2)
    with pytest.raises(UsageError, match="the batch size is missing"):
        legroom.check(data)


def test_a_dataloader_that_could_not_be_imported_is_not_checked_with_other_settings(
    loaders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring ran out of memory before it could read them: a trial without workers would fit."""
    from legroom.errors import DatasetOutOfMemory
    from legroom.loader import legroom_check

    problem = DatasetOutOfMemory("loading a batch failed")

    def fails(*_: Any, **__: Any) -> Any:
        raise problem

    use_forks(monkeypatch.setattr)
    monkeypatch.setattr(legroom_check, "measure_dataset", fails)
    assert legroom.check(f"{loaders}:loader").verdict == "too-big"
    assert legroom.check(f"{loaders}:loader", batch_size=4).verdict == "too-big"
    problem.found = True
    problem.loader = {
        "batch_size": 4, "num_workers": 2, "prefetch_factor": 3, "loader": "torch", "sampler": None,
        "batch_sampler": None, "start_method": None, "persistent_workers": False, "pin_memory": False,
    }  # fmt: skip
    found = legroom.check(f"{loaders}:loader")
    assert found.need.shm > 2 * 4 * MB * 6 and found.from_loader["num_workers"] == 2


@pytest.mark.usefixtures("child_in_fork")
def test_one_batch_per_epoch_is_in_the_singular(loaders: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(_run(capsys, "--dataset", f"{loaders}:data", "--batch", "10000")[1].split())
    assert "1 batch per epoch" in text and "1 batches" not in text
