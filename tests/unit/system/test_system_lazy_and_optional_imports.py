"""Optional packages that are not installed: one error, with the command that installs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from legroom.errors import MissingPackage
from legroom.system.lazy_and_optional_imports import require

WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
import numpy as np
np.save("x.npy", np.zeros((8, 4)))
import legroom, legroom.gpu
data = legroom.open("x.npy")
calls = {
    "tensors": lambda: data.tensors(),
    "dataset": lambda: data.dataset(),
    "batches": lambda: next(iter(data.batches(2))),
    "cuda": lambda: data.batches(2, device="cuda"),
    "DataLoader": lambda: legroom.DataLoader,
    "collate": lambda: legroom.collate(),
    "tune": lambda: legroom.tune([1, 2], batch_size=1),
    "check": lambda: legroom.check([1, 2], batch_size=1),
    "limit": lambda: legroom.gpu.limit(0.5),
    "account": lambda: legroom.gpu.account(),
    "find": lambda: legroom.gpu.find_batch_size(print),
    "tf32": lambda: legroom.gpu.tf32(),
}
told = {}
for name, call in calls.items():
    try:
        call()
        told[name] = "no error"
    except legroom.errors.MissingPackage as error:
        told[name] = "missing" if "pip install torch" in str(error) else str(error)
    except BaseException as error:
        told[name] = repr(error)
print(json.dumps(told))
"""


def test_a_package_that_is_there_and_one_that_is_not() -> None:
    assert require("json", "torch", "a test") is json
    with pytest.raises(MissingPackage) as caught:
        require("no_such_package.part", "parquet", "reading Parquet", instead=("use CSV",))
    assert caught.value.what == "the package no_such_package is needed for reading Parquet"
    assert caught.value.fix == ("pip install pyarrow", "use CSV")
    with pytest.raises(MissingPackage) as caught:
        require("no_such_package", "", "a callback", package="'ray[train]'")
    assert caught.value.fix == ("pip install 'ray[train]'",)


def test_everything_that_needs_torch_reports_that_it_is_missing(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir(0o700)
    environment = {**os.environ, "LEGROOM_SHM": str(tmp_path / "shm"), "LEGROOM_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told and {name: word for name, word in told.items() if word != "missing"} == {}


@pytest.mark.parametrize(
    "arguments",
    [("tune", "--dataset", "data:train", "--batch", "2"), ("check", "--dataset", "data:train", "--batch", "2")],
)
def test_a_dataset_by_name_without_torch(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    # The dataset is drawn from in a child: its interpreter has no torch either.
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    (tmp_path / "data.py").write_text("train = [1, 2, 3]\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "legroom", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2 and "[missing-package]" in done.stderr and "pip install torch" in done.stderr
