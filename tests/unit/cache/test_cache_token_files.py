"""Token files in the cache: the dtype is part of an entry's identity, and both files of a Megatron pair are."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from format_samples import megatron, read_megatron

import legroom
from legroom.cache import drop_and_gc, list_and_verify
from legroom.cli.cache import command
from legroom.errors import LegroomError, SourceChanged, UnknownFormat, UsageError

pytestmark = pytest.mark.usefixtures("shm", "old_files")


@pytest.fixture
def train(tmp_path: Path) -> Path:
    np.random.default_rng(1).integers(0, 50_000, 4000).astype(np.uint16).tofile(tmp_path / "train.bin")
    return tmp_path / "train.bin"


def keys() -> set[str | None]:
    return {entry.key for entry in list_and_verify.entries()}


def test_two_types_of_one_file_are_two_entries(train: Path) -> None:
    with legroom.open(train, dtype="uint16") as first, legroom.open(train, dtype="int32") as second:
        assert first.info.key != second.info.key
        assert first.info.digest == second.info.digest
        np.testing.assert_array_equal(first["tokens"], np.fromfile(train, np.uint16))
        np.testing.assert_array_equal(second["tokens"], np.fromfile(train, np.int32))
    for given in ("<u2", np.uint16, "i4"):
        moved: list[int] = []
        with legroom.open(train, dtype=given, progress=lambda done, _, moved=moved: moved.append(done)) as again:
            assert not moved
            assert again["tokens"].dtype == np.dtype(given)
    with pytest.raises(UnknownFormat):
        legroom.open(train)
    assert len(keys()) == 2


def test_types_of_the_same_width_are_not_exchanged(train: Path) -> None:
    for dtype in ("uint16", "int16", ">u2", "uint8", "uint16"):
        with legroom.open(train, dtype=dtype) as data:
            np.testing.assert_array_equal(data["tokens"], np.fromfile(train, dtype))


def test_the_catalogue_knows_every_type_of_a_file(train: Path) -> None:
    for dtype in ("uint16", "int32"):
        legroom.open(train, dtype=dtype).close()
    assert len(list_and_verify.entries(train)) == 2
    assert list_and_verify.info(train).digest is not None
    assert [(one.whole, one.source) for one in list_and_verify.verify(train)] == [(True, "same")] * 2
    assert not drop_and_gc.gc(stale=True).entries
    np.zeros(4000, np.uint16).tofile(train)
    assert {one.source for one in list_and_verify.verify()} == {"changed"}
    assert len(drop_and_gc.gc(stale=True).entries) == 2
    legroom.open(train, dtype="uint16").close()
    assert len(drop_and_gc.drop(train).entries) == 1


def test_the_command_line_takes_a_dtype(train: Path) -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(command, list(words), standalone_mode=False)

    assert run("load", str(train), "--dtype", "uint16").exit_code == 0
    for words in (("info",), ("list",), ("verify",), ("drop",)):
        result = run(*words, str(train))
        assert result.exit_code == 0, result.output
        assert "train.bin" in result.output
    assert not keys()


def test_data_can_be_sent_to_another_process(train: Path) -> None:
    with legroom.open(train, dtype="int32") as data:
        again = pickle.loads(pickle.dumps(data))
        np.testing.assert_array_equal(again["tokens"], data["tokens"])
        drop_and_gc.drop(force=True)
        rebuilt = pickle.loads(pickle.dumps(data))
        assert rebuilt["tokens"].dtype == np.int32


@pytest.mark.parametrize("backing", ["inplace", "disk", "shm"])
def test_every_backing_reads_tokens(train: Path, backing: str) -> None:
    with legroom.open(train, dtype="uint16", backing=backing) as data:
        tokens = np.fromfile(train, np.uint16)
        np.testing.assert_array_equal(data["tokens"], tokens)
        batch = next(iter(data.batches(4, sequence_length=10)))["tokens"]
        np.testing.assert_array_equal(np.asarray(batch), [tokens[i : i + 11] for i in range(0, 40, 10)])


def test_the_tokens_of_a_pair_are_mapped_in_place(tmp_path: Path) -> None:
    path = megatron(tmp_path, count=5000)
    with legroom.open(path, "sequences/values", backing="inplace") as data:
        np.testing.assert_array_equal(data["sequences/values"], np.fromfile(path.with_suffix(".bin"), np.uint16))
        assert next(iter(data.batches(4, sequence_length=10)))["tokens"].shape == (4, 11)


def test_a_part_of_ragged_data_can_be_opened_again(tmp_path: Path) -> None:
    path = megatron(tmp_path, count=5000)
    for _ in range(2):
        with legroom.open(path, "sequences/values") as data:
            assert list(data) == ["sequences/values"]
            assert next(iter(data.batches(4, sequence_length=10)))["tokens"].shape == (4, 11)
    with legroom.open(path, "sequences") as data:
        assert list(data) == ["sequences"]


def test_a_pair_is_one_entry_by_either_name(tmp_path: Path) -> None:
    path = megatron(tmp_path, count=5000)
    expected = read_megatron(path)
    with legroom.open(path) as data, legroom.open(path.with_suffix(".bin")) as same:
        key = data.info.key
        assert key == same.info.key
        for name, array in expected.items():
            np.testing.assert_array_equal(data[name], array)
        np.testing.assert_array_equal(
            same["sequences"][3], expected["sequences/values"][slice(*expected["sequences/offsets"][3:5])]
        )
    copies = tmp_path / "copies"
    copies.mkdir()
    for suffix in (".idx", ".bin"):
        shutil.copy(path.with_suffix(suffix), copies / f"other{suffix}")
    with legroom.open(copies / "other.bin") as copy:
        assert copy.info.key == key
    assert len(keys()) == 1
    for name in (path, path.with_suffix(".bin"), copies / "other.idx"):
        assert len(list_and_verify.entries(name)) == 1
        assert [one.source for one in list_and_verify.verify(name)] == ["same"]
    with legroom.open(str(tmp_path / "data*")) as both:
        assert len(both["sequences/values"]) == 5000


def test_a_pair_that_changed_is_loaded_again(tmp_path: Path) -> None:
    path = megatron(tmp_path, count=5000)
    tokens = path.with_suffix(".bin")
    with legroom.open(path) as data:
        first = data.info.key
    new = np.fromfile(tokens, np.uint16)[::-1].copy()
    new.tofile(tokens)  # the .idx is the same
    assert [one.source for one in list_and_verify.verify()] == ["changed"]
    with legroom.open(path) as data:
        assert data.info.key != first
        np.testing.assert_array_equal(data["sequences/values"], new)
    assert [entry.key for entry in drop_and_gc.gc(stale=True).entries] == [first]
    new[:-1].tofile(tokens)
    with pytest.raises(LegroomError, match="damaged"):
        legroom.open(path)
    tokens.unlink()
    with pytest.raises(LegroomError, match="is missing"):
        legroom.open(path)


def test_a_bin_replaced_during_the_load_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from legroom.cache import elect_builder_and_publish

    path = megatron(tmp_path, count=5000)
    tokens = path.with_suffix(".bin")
    opens = elect_builder_and_publish.open_source
    turns = iter(range(100))

    def then_replace(*arguments: Any, **more: Any) -> Any:
        reader = opens(*arguments, **more)
        reader.describe()
        np.full(5000, next(turns), np.uint16).tofile(tmp_path / "new")
        os.replace(tmp_path / "new", tokens)
        return reader

    monkeypatch.setattr(elect_builder_and_publish, "open_source", then_replace)
    with pytest.raises(SourceChanged):
        legroom.open(path)
    monkeypatch.undo()


def test_a_flat_file_beside_an_index_is_read_by_the_index(tmp_path: Path) -> None:
    path = megatron(tmp_path, count=5000)
    with pytest.raises(UsageError, match="dtype"):
        legroom.open(path.with_suffix(".bin"), dtype="int32")
    with legroom.open(path.with_suffix(".bin"), dtype="uint16") as data:
        assert len(data["sequences"]) == 61


def test_shards_of_tokens_are_joined(tmp_path: Path) -> None:
    parts = [np.arange(n, n + 100, dtype=np.uint16) for n in range(3)]
    for number, part in enumerate(parts):
        part.tofile(tmp_path / f"shard-{number}.bin")
    with legroom.open(str(tmp_path / "shard-*.bin"), dtype="uint16") as data:
        np.testing.assert_array_equal(data["tokens"], np.concatenate(parts))
