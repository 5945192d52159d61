"""What `legroom run` brings into a script that cannot be edited."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from legroom.errors import BadLimit
from legroom.rescue.job_process import with_gpu_limit, with_loader


def _run(folder: Path, options: list[str], script: str, **more: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "legroom", "run", *options, "--", sys.executable, "train.py"], cwd=folder,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), **more},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_the_path_is_put_in_front_once() -> None:
    both = with_gpu_limit(with_loader({"PYTHONPATH": "/theirs"}), "0.8")
    parts = both["PYTHONPATH"].split(os.pathsep)
    assert parts[0].endswith("inject") and parts[1] == "/theirs" and len(parts) == 3
    assert both["LEGROOM_LOADER"] == "legroom" and both["LEGROOM_GPU_LIMIT"] == "0.8"
    with pytest.raises(BadLimit):
        with_gpu_limit({}, "1.5")


@pytest.mark.parametrize("amount", ["0", "1.5", "a lot", "-3GB", "80", "8", "16000"])
def test_a_bad_limit_is_an_error_before_anything_starts(amount: str, tmp_path: Path) -> None:
    done = _run(tmp_path, [f"--gpu-limit={amount}"], "print('started')")
    assert done.returncode == 2 and "started" not in done.stdout and "bad-limit" not in done.stdout
    assert amount in done.stderr


def test_torch_gets_our_loader_and_the_limit(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = """
import sys
assert not any(name.startswith("legroom") for name in sys.modules)  # nothing before torch
import torch
from torch.utils.data import DataLoader
print(DataLoader.__module__, [call[0].__module__ for call in torch.cuda._queued_calls if "legroom" in call[0].__module__])
"""
    done = _run(tmp_path, ["--loader", "legroom", "--gpu-limit", "8GB"], script)
    assert done.stdout.split() == ["legroom.loader.dataloader.dataloader", "['legroom.gpu.set_memory_limit']"], (
        done.stderr
    )
    assert _run(tmp_path, [], script).stdout.split() == ["torch.utils.data.dataloader", "[]"]


# As much of torch as the limit touches; CUDA starts at once and has no GPU.
FAKE = """
__version__ = "0"
class cuda:
    @staticmethod
    def _lazy_call(call): call()
    @staticmethod
    def device_count(): raise RuntimeError("no card of this fake")
"""


def test_a_limit_that_cannot_be_set_is_reported_and_the_script_runs(tmp_path: Path) -> None:
    _fake_torch(tmp_path, FAKE)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("print('theirs too')")
    done = _run(tmp_path, ["--gpu-limit", "0.5"], "import torch; print('ran')", PYTHONPATH=str(tmp_path / "theirs"))
    assert done.returncode == 0 and done.stdout.splitlines()[-2:] == ["theirs too", "ran"], done.stderr
    assert "legroom: GPU limit not set: RuntimeError: no card of this fake" in done.stderr


# Counts how often a limit is set.
COUNTS = """
__version__ = "0"
calls = 0
class cuda:
    @staticmethod
    def _lazy_call(call):
        global calls
        calls += 1
"""


def _fake_torch(folder: Path, text: str) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(text)


LOOKS_FOR_TORCH = """
import importlib.util, subprocess, sys
def look(): return importlib.util.find_spec("torch") is not None
assert look() and look()  # as transformers does when it is imported
import torch
print(torch.calls, flush=True)
if len(sys.argv) == 1: subprocess.run([sys.executable, __file__, "again"], check=True)
"""


def test_packages_that_look_for_torch_leave_the_hook_to_its_import(tmp_path: Path) -> None:
    _fake_torch(tmp_path, COUNTS)
    done = _run(tmp_path, ["--gpu-limit", "0.5"], LOOKS_FOR_TORCH)
    assert (done.returncode, done.stdout) == (0, "1\n1\n"), done.stderr


# A finder as coverage tools and debuggers install them: it asks the other finders through importlib and wraps the loader.
WRAPPED = """
import importlib.util, sys
class Finder:
    inside = False
    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.inside: return None
        self.inside = True
        try: return importlib.util.find_spec(name)
        finally: self.inside = False
sys.meta_path.insert({place}, Finder())
import torch
print(torch.calls)
"""


@pytest.mark.parametrize("place", [0, 1])
def test_a_finder_of_someone_else_beside_ours(place: int, tmp_path: Path) -> None:
    _fake_torch(tmp_path, COUNTS)
    done = _run(tmp_path, ["--gpu-limit", "0.5"], WRAPPED.replace("{place}", str(place)))
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
