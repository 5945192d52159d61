"""The newest whole checkpoint: torn ones of every kind are passed over, with the reason."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

import pytest

from legroom.rescue import newest_checkpoint
from legroom.rescue.newest_checkpoint import newest_complete, stamps, why_incomplete


def _zip(path: Path, size: int = 5000) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
        archive.writestr("archive/data/0", os.urandom(size))
    return path.read_bytes()


def _safetensors(path: Path, size: int = 1000) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\1" * size)
    return path.read_bytes()


def _hdf5(path: Path) -> bytes:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file["w"] = list(range(2000))
    return path.read_bytes()


MAKERS = {".pt": _zip, ".safetensors": _safetensors, ".h5": _hdf5}


@pytest.mark.parametrize("suffix", MAKERS)
@pytest.mark.parametrize("cut", [0, 1, 9, 100, 0.5, -1])
def test_a_file_cut_anywhere_is_torn(suffix: str, cut: float, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    whole = MAKERS[suffix](path)
    assert why_incomplete(path) is None
    at = int(len(whole) * cut) if isinstance(cut, float) else cut
    path.write_bytes(whole[:at])
    assert why_incomplete(path)


def test_blocks_that_never_reached_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    whole = bytearray(_zip(path))
    second = whole.index(b"PK\x03\x04", 10)
    whole[second : second + 2000] = bytes(2000)
    path.write_bytes(whole)
    assert "never reached the disk" in (why_incomplete(path) or "")


def test_torch_s_own_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "a.pt"
    torch.save({"w": torch.rand(1000)}, path)
    assert why_incomplete(path) is None
    path.write_bytes(path.read_bytes()[:-10])
    assert why_incomplete(path)
    torch.save({"w": torch.rand(1000)}, path, _use_new_zipfile_serialization=False)
    assert why_incomplete(path) is None


def test_the_newest_whole_one_is_taken_and_the_torn_ones_are_named(tmp_path: Path) -> None:
    for at, name in enumerate(("step9.pt", "step10.pt", "step11.pt", "step12.pt")):
        data = _zip(tmp_path / name)
        if name in ("step11.pt", "step12.pt"):
            (tmp_path / name).write_bytes(data[:200] if name == "step11.pt" else b"")
        os.utime(tmp_path / name, ns=(10**18 + at, 10**18 + at))
    found = newest_complete(f"{tmp_path}/step*.pt")
    assert found.path == str(tmp_path / "step10.pt")
    assert len(found.skipped) == 2 and "step12.pt: empty" in found.skipped[0]
    assert newest_complete(f"{tmp_path}/*.ckpt").path is None


def test_what_was_there_before_is_left_out_however_it_is_named_now(tmp_path: Path) -> None:
    pattern = f"{tmp_path}/*.pt"
    for name in ("old.pt", "older.pt"):
        _zip(tmp_path / name)
    os.utime(tmp_path / "older.pt", (1, 1))
    before = stamps(pattern)
    assert newest_complete(pattern).path == str(tmp_path / "old.pt")  # unless asked to leave them out
    (tmp_path / "old.pt").rename(tmp_path / "previous.pt")
    (tmp_path / "last.pt").symlink_to(tmp_path / "older.pt")
    found = newest_complete(pattern, before)
    assert found.path is None and found.older == str(tmp_path / "previous.pt")
    _zip(tmp_path / "step1.pt")
    os.utime(tmp_path / "step1.pt", (2, 2))  # a file server's clock is behind
    assert newest_complete(pattern, before).path == str(tmp_path / "step1.pt")
    (tmp_path / "step1.pt").unlink()
    _zip(tmp_path / "older.pt")  # written again under the same name
    assert newest_complete(pattern, before).path in (str(tmp_path / "older.pt"), str(tmp_path / "last.pt"))


def test_a_directory_that_is_written_into_again_is_new(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-last"
    folder.mkdir()
    _zip(folder / "model.pt")
    before = stamps(f"{tmp_path}/checkpoint-*")
    (folder / "notes.txt").write_text("resumed")
    assert newest_complete(f"{tmp_path}/checkpoint-*", before).path is None
    _zip(folder / "model.pt")
    os.utime(folder / "model.pt", (5, 5))
    assert newest_complete(f"{tmp_path}/checkpoint-*", before).path == str(folder)


def test_files_of_one_moment_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    for name in ("step9.pt", "step10.pt"):
        _zip(tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    assert newest_complete(f"{tmp_path}/*.pt").path == str(tmp_path / "step10.pt")


def test_directories(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    assert why_incomplete(folder) == "empty"
    (folder / "config.json").write_text("{}")
    assert why_incomplete(folder) == "it contains no weights"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _safetensors(folder / "model-1.safetensors")
    assert "model-2.safetensors is missing" in (why_incomplete(folder) or "")
    _safetensors(folder / "model-2.safetensors")
    assert why_incomplete(folder) is None
    _zip(folder / "optimizer.pt")
    assert "trainer_state.json" in (why_incomplete(folder) or "")
    (folder / "trainer_state.json").write_text("{}")
    assert why_incomplete(folder) is None
    (folder / "model-2.safetensors").write_bytes(b"\x10")
    assert "model-2.safetensors" in (why_incomplete(folder) or "")
    distributed = tmp_path / "dcp"
    distributed.mkdir()
    (distributed / "__0_0.distcp").write_bytes(b"x" * 100)
    assert ".metadata is missing" in (why_incomplete(distributed) or "")


ODD_HEADERS = ([], {"w": {"data_offsets": [1]}}, {"w": {"data_offsets": [0, "x"]}}, {"w": None})


@pytest.mark.parametrize("header", ODD_HEADERS, ids=str)
def test_a_header_of_another_shape_is_damage_and_no_error(header: object, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(100))
    assert why_incomplete(path)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": []}', '{"weight_map": {"w": []}}', "[" * 100_000])
def test_an_index_of_another_shape_is_damage_and_no_error(index: str, tmp_path: Path) -> None:
    _safetensors(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert why_incomplete(tmp_path)


def test_of_the_checkpoints_before_the_run_only_the_newest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(5):
        _zip(tmp_path / f"step{step}.pt")
        os.utime(tmp_path / f"step{step}.pt", (step, step))
    read: list[str] = []
    monkeypatch.setattr(newest_checkpoint, "why_incomplete", lambda path: read.append(path.name))
    pattern = f"{tmp_path}/*.pt"
    found = newest_complete(pattern, stamps(pattern))
    assert (found.path, found.older, read) == (None, str(tmp_path / "step4.pt"), ["step4.pt"])
