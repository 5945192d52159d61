"""Copies in GPU memory, as `legroom cache list` and `legroom doctor` show them: once each, with their users."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import legroom
from legroom.advice.choose_settings import safe_settings
from legroom.cache import list_gpu_copies
from legroom.cache.list_gpu_copies import FOLDER, gpu_copies, holders
from legroom.cli import doctor
from legroom.cli.cache import command as cache_command
from legroom.loader import shared_model_weights
from legroom.loader.shared_gpu_memory import share
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.snapshot import snapshot
from legroom.records.watch_sample import GpuCopyRow

torch = pytest.importorskip("torch")

from cuda_fake import FakeDriver  # noqa: E402

from .test_shared_gpu_memory import SIZE, line, process, stop  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="GPU memory is shared on Linux only")


@pytest.fixture(autouse=True)
def _long_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process that is not stopped may take seconds to answer, too."""
    for name in ("PATIENCE_S", "_LOOK_S"):
        monkeypatch.setattr(list_gpu_copies, name, 60.0)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("LEGROOM_SHM", "LEGROOM_DIR"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, os.fspath(folder))
    driver = FakeDriver()
    monkeypatch.setattr(shared_model_weights, "open_driver", lambda device: driver)
    torch.save({"a": torch.randn(300, 300)}, tmp_path / "model.pt")
    with legroom.weights(tmp_path / "model.pt", "cuda", shared=True) as found:
        yield found


def test_a_copy_is_listed_once_with_its_users(tmp_path: Path, weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy,) = gpu_copies()
    assert copy.name == str(tmp_path / "model.pt") and copy.users == (os.getpid(),) and copy.gpu == "gpu-0"
    assert copy.bytes >= 300 * 300 * 4
    (store,) = [path for path in tmp_path.glob("legroom_*/legroom-*") if (path / FOLDER).exists()]
    with process(store) as first, process(store) as second:
        assert {line(first)[0], line(second)[0]} == {"made", "got"}  # whichever came first
        both = next(found for found in gpu_copies() if found.name == "a")
        assert set(both.users) == {first.pid, second.pid} and len(gpu_copies()) == 2
        assert both.bytes >= SIZE
        stop(second.pid)  # it cannot answer, and is left out soon
        monkeypatch.setattr(list_gpu_copies, "_LOOK_S", 0.2)
        users: tuple[int, ...] = ()
        until = time.monotonic() + 60
        while not users and time.monotonic() < until:  # the first may be late, too
            users = next((found.users for found in gpu_copies() if found.name == "a"), ())
        assert users == (first.pid,)
        monkeypatch.setattr(list_gpu_copies, "_LOOK_S", 60.0)
    assert [found.name for found in gpu_copies()] == [copy.name]
    weights.close()
    assert gpu_copies() == ()


def test_cache_list_shows_them(tmp_path: Path, weights: Any) -> None:
    shown = CliRunner().invoke(cache_command, ["list"]).output
    told = " ".join(shown.split())
    assert "GPU-gpu-0: " in told and f"one copy for 1 process ({os.getpid()})" in told
    (copy,) = json.loads(CliRunner().invoke(cache_command, ["list", "--json"]).output)["gpu_copies"]
    assert copy["users"] == [os.getpid()] and copy["name"] == str(tmp_path / "model.pt")
    weights.close()
    assert "GPU-gpu-0" not in CliRunner().invoke(cache_command, ["list"]).output
    assert json.loads(CliRunner().invoke(cache_command, ["list", "--json"]).output)["gpu_copies"] == []


def test_doctor_shows_them() -> None:
    machine = snapshot(Host())
    copy = GpuCopyRow("3f2a1b2c-0000", "ab", "/data/x.h5: images", 20 << 30, (7, 8))
    text = " ".join(doctor.as_text(machine, (), safe_settings(machine), (), True, (copy,)).split())
    assert "that processes share (each counts once) GPU-3f2a1b2c: 20 GB of /data/x.h5: images, one copy for 2" in text
    assert doctor.as_object(machine, (), (), (), (copy,))["gpu_copies"][0]["users"] == (7, 8)
    assert "Copies in GPU memory" not in doctor.as_text(machine, (), safe_settings(machine), (), True)


def test_a_process_with_many_copies_still_answers(tmp_path: Path) -> None:
    copies = [
        share(FakeDriver().api(), tmp_path, f"{n}", 1, lambda _: None, check_room=lambda: None, title="x" * 5000)
        for n in range(150)
    ]
    (holder,) = holders(tmp_path, 60.0)
    assert len(holder["copies"]) == 100 and len(next(iter(holder["about"].values()))["name"]) == 200
    for copy in copies:
        copy.close()
