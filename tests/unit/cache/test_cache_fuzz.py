"""Two thousand ways to damage an entry: it is built anew, or an error says so; never wrong data, never a crash."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import legroom
from legroom.cache import find_or_build_entry, manifest
from legroom.cache.manifest import Damaged, OtherFormat

MUTATIONS = 300  # about 30 of each kind; the soak damages entries at random
ARRAYS = {
    "first": np.arange(600, dtype=np.int32).reshape(20, 30),
    "twin": np.arange(600, dtype=np.int32).reshape(20, 30)[::-1].copy(),
    "small": np.float64(2.5),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.npz"
    np.savez(path, **ARRAYS)
    return path


def entry(shm: Path) -> Path:
    (found,) = (folder for folder in shm.iterdir() if manifest.is_key(folder.name))
    return found


def flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def stuff(data: bytes, chance: random.Random) -> bytes:
    where = chance.randrange(len(data))
    return data[:where] + chance.randbytes(chance.randrange(1, 40)) + data[where:]


def other_value(data: bytes, chance: random.Random) -> bytes:
    """Another value somewhere in the manifest, its own checksum made to fit: a program wrote it, a wrong one."""
    value = json.loads(data)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(value)
    node, key = chance.choice(places)
    nonsense = [None, True, -1, 0, 1, 1 << 60, 1.5, float("nan"), "", "x", "../../etc/passwd", [], {}, ["O"], [1 << 40] * 3,
                "|O", "<f8", ">i4", "<i4", "a/b.npy", ".npy", "manifest.json", "twin.npy", "0" * 32]  # fmt: skip
    if chance.random() < 0.2:
        del node[key]
    else:
        node[key] = chance.choice(nonsense)
    value.pop("manifest_crc32", None)
    body = json.dumps(value, indent=1).encode().removeprefix(b"{\n") + b"\n"
    return manifest.OPENING % zlib.crc32(body) + body


def rewrite(file: Path, change: Callable[[bytes, random.Random], bytes], chance: random.Random) -> None:
    data = change(file.read_bytes(), chance)
    file.chmod(0o600)
    file.write_bytes(data)
    file.chmod(0o400)


def damage(folder: Path, chance: random.Random) -> str:
    files = sorted(folder.glob("*.npy"))
    kind = chance.randrange(10)
    if kind < 3:
        rewrite(folder / "manifest.json", chance.choice([flip, cut, stuff]), chance)
        return "manifest bytes"
    if kind < 6:
        rewrite(folder / "manifest.json", other_value, chance)
        return "manifest value"
    if kind == 6:
        rewrite(chance.choice(files), chance.choice([cut, stuff]), chance)
        return "file length"
    if kind == 7:
        file = chance.choice(files)
        rewrite(file, lambda data, c: flip(data[:128], c) + data[128:], chance)
        return "header"
    if kind == 8:
        one, two = chance.sample(files, 2)
        one.rename(folder / "x")
        two.rename(one)
        (folder / "x").rename(two)
        return "swapped"
    file = chance.choice([*files, folder / "manifest.json"])
    what = chance.randrange(3)
    file.unlink()
    if what == 0:
        file.mkdir()
    elif what == 1:
        file.symlink_to(chance.choice(files))
    return "replaced"


@pytest.mark.usefixtures("old_files")
def test_damaged_entries_are_built_anew(shm: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(20)
    built = 0
    whole = False  # whether the entry is there and as the cache itself made it
    monkeypatch.setattr(find_or_build_entry.log, "warning", lambda *_: None)
    for number in range(MUTATIONS):
        if not whole:
            legroom.open(path).close()
        whole = False
        what = damage(entry(shm), chance)
        try:
            again = legroom.open(path)
        except legroom.LegroomError:
            shutil.rmtree(shm)
            continue
        for name, array in ARRAYS.items():
            assert np.array_equal(again[name], array), (number, what)
        built += 1
        again.close()
        del again
        whole = sum(manifest.is_key(name) for name in os.listdir(shm)) == 1
        if not whole:  # an entry of a newer format is left alone, and stands beside
            for folder in shm.iterdir():
                if manifest.is_key(folder.name):
                    shutil.rmtree(folder)
    assert built > MUTATIONS * 0.99


def test_a_flipped_bit_in_the_data_is_noticed_by_its_time(shm: Path, path: Path, old_files: None) -> None:
    legroom.open(path)
    time.sleep(0.02)  # two changes within a tick of the file system's clock have one time
    rewrite(entry(shm) / "first.npy", lambda data, c: data[:-1] + bytes([data[-1] ^ 1]), random.Random(0))
    assert np.array_equal(legroom.open(path)["first"], ARRAYS["first"])


def test_an_older_format_is_built_anew_and_a_newer_left_alone(shm: Path, path: Path, old_files: None) -> None:
    info = legroom.open(path).info
    key = info.key
    assert key is not None
    file = shm / key / "manifest.json"

    def version(number: int) -> None:
        text = file.read_text().replace('"format": 1', f'"format": {number}', 1)
        file.chmod(0o600)
        file.write_text(text)

    version(0)
    assert legroom.open(path).info.key == key
    assert '"format": 1' in file.read_text()
    version(2)
    beside = legroom.open(path)
    assert beside.info.key not in (None, key) and str(beside.info.key).startswith(f"{info.digest}-")
    assert '"format": 2' in file.read_text()
    assert legroom.open(path).info.key == beside.info.key
    assert np.array_equal(beside["twin"], ARRAYS["twin"])


@pytest.mark.parametrize(
    "dtype",
    ["<f4", "|u1", "<U7", "|S3", "<M8[ns]", "<m8[us]", "<c16", "|b1", "|V5", "<f2",
     [("a", "<i4"), ("b", "<f8", (2, 3))], [("ü", "<i2"), ("x", [("y", "|u1")])]],
)  # fmt: skip
def test_headers_are_npy(dtype: Any, tmp_path: Path) -> None:
    kind = np.dtype(dtype)
    for shape in ((), (0,), (3, 4), (7, 0, 2)):
        array = np.zeros(shape, kind)
        header = manifest.npy_header(shape, kind)
        assert len(header) % 64 == 0
        (tmp_path / "a.npy").write_bytes(header + array.tobytes())
        loaded = np.load(tmp_path / "a.npy")
        assert (loaded.shape, loaded.dtype) == (shape, kind)
    assert manifest.dtype_from_json(json.loads(json.dumps(manifest.dtype_to_json(kind)))) == kind


@pytest.mark.parametrize(
    "value",
    ["|O", "O", ">f4", "f4,f4", "", "x" * 100, None, 3, [], [["a"]], [["a", "|O"]], [[1, "<f4"]], [["a", "<f4", [-1]]]],
)
def test_dtypes_that_are_none_of_ours(value: Any) -> None:
    with pytest.raises(ValueError):
        manifest.dtype_from_json(value)


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b'{"format": "1"}', b"[" * 100_000, b"\xff\xfe"])
def test_manifests_that_are_none(data: bytes) -> None:
    with pytest.raises(Damaged):
        manifest.from_json(data, "0" * 32)
    with pytest.raises(OtherFormat):
        manifest.from_json(b'{"format": 7}', "0" * 32)


def test_names_become_safe_file_names() -> None:
    taken: set[str] = set()
    names = ["a", "A", "a/b", "../x", "", ".", "ü" * 300, "x" * 300, "con:*?", "a\nb", "%2F", "-rf", "manifest"]
    files = [manifest.file_name(name, ".npy", taken) for name in names]
    assert len({file.lower() for file in files}) == len(names)
    for file in files:
        assert manifest.FILE_NAME.fullmatch(file) and len(os.fsencode(file)) < 240
    assert files[2] == "a%2Fb.npy"
