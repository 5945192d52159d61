"""Windows of token files: which tokens they hold, in which order, and that other data have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_data import write as write_rows
from format_samples import llm_c, megatron, read_megatron

from legroom.errors import UsageError
from legroom.loader.batches.legroom_open import Data, open

COUNT = 1003


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    monkeypatch.chdir(tmp_path)
    made = np.random.default_rng(4).integers(0, 50_000, COUNT).astype(np.uint16)
    made.tofile("train.bin")
    return made


def opened() -> Data:
    return open("train.bin", dtype="uint16")


def expected(tokens: np.ndarray[Any, Any], length: int, stride: int) -> list[list[int]]:
    return [tokens[i : i + length + 1].tolist() for i in range(0, len(tokens) - length, stride)]


def rows(batches: Any) -> list[list[int]]:
    return [row for batch in batches for row in np.asarray(batch["tokens"]).tolist()]


@pytest.mark.parametrize("length", [1, 7, 64, 1002])
@pytest.mark.parametrize("stride", [None, 1, 5, 8, 65, 200])
@pytest.mark.parametrize("format", ["torch", "numpy"])
def test_windows_are_slices(tokens: Any, length: int, stride: int | None, format: str) -> None:
    found = opened().batches(16, sequence_length=length, stride=stride, format=format)
    wanted = expected(tokens, length, stride or length)
    assert rows(found) == wanted
    assert len(found) == -(-len(wanted) // 16)
    first = next(iter(found))
    assert list(first) == ["tokens"]
    assert tuple(first["tokens"].shape) == (min(16, len(wanted)), length + 1)
    assert str(first["tokens"].dtype).removeprefix("torch.") == "uint16"


def test_every_input_has_its_target_and_every_token_is_an_input_once(tokens: Any) -> None:
    batches = opened().batches(4, sequence_length=10, shuffle=True, seed=1, format="numpy")
    inputs = [int(token) for batch in batches for token in batch["tokens"][:, :-1].reshape(-1)]
    assert sorted(inputs) == sorted(tokens[: len(inputs)].tolist())
    assert COUNT - len(inputs) <= 10
    for batch in batches:
        for row in batch["tokens"]:
            starts = np.flatnonzero(tokens[:-10] == row[0])
            assert any((tokens[at : at + 11] == row).all() for at in starts)


def test_a_batch_may_be_changed(tokens: Any) -> None:
    data = opened()
    for format in ("torch", "numpy"):
        for batch in data.batches(4, sequence_length=10, format=format):
            batch["tokens"][:] = 0
        np.testing.assert_array_equal(data["tokens"], tokens)


def test_the_order_is_that_of_seed_and_epoch(tokens: Any) -> None:
    data = opened()
    first = rows(data.batches(8, sequence_length=9, shuffle=True, seed=3, epoch=2))
    assert first == rows(data.batches(5, sequence_length=9, shuffle=True, seed=3, epoch=2))
    assert first != rows(data.batches(8, sequence_length=9, shuffle=True, seed=3, epoch=3))
    assert sorted(first) == sorted(expected(tokens, 9, 9))


def test_ranks_share_the_windows(tokens: Any) -> None:
    data = opened()
    parts = [
        rows(data.batches(4, sequence_length=9, shuffle=True, epoch=0, rank=rank, world_size=3, uneven="all"))
        for rank in range(3)
    ]
    assert sorted(row for part in parts for row in part) == sorted(expected(tokens, 9, 9))
    short = data.batches(50, sequence_length=9, drop_last=True)
    assert [len(batch["tokens"]) for batch in short] == [50, 50]


def test_a_stride_longer_than_the_window_leaves_out_tokens_between(tokens: Any) -> None:
    found = rows(opened().batches(50, sequence_length=9, stride=30))
    assert found == expected(tokens, 9, 30)


def test_a_loop_resumes_at_the_exact_window(tokens: Any) -> None:
    def fresh(**more: Any) -> Any:
        settings = {"sequence_length": 9, "stride": 4, "shuffle": True, "seed": 5, **more}
        return opened().batches(8, **settings)

    whole = rows(fresh())
    batches = fresh()
    loop = iter(batches)
    seen = [row for _ in range(7) for row in next(loop)["tokens"].tolist()]
    state = batches.state_dict()
    resumed = fresh()
    resumed.load_state_dict(state)
    assert seen + rows(resumed) == whole
    smaller = opened().batches(3, sequence_length=9, stride=4, shuffle=True, seed=5)
    smaller.load_state_dict(state)
    assert seen + rows(smaller) == whole


def test_a_state_of_other_windows_is_refused(tokens: Any) -> None:
    data = opened()
    state = data.batches(8, sequence_length=9, stride=4).state_dict()
    for length, stride in ((10, 4), (8, 4), (9, 5)):
        with pytest.raises(UsageError, match="other windows"):
            data.batches(8, sequence_length=length, stride=stride).load_state_dict(state)
    with pytest.raises(UsageError, match="other windows"):
        open("train.bin", dtype="int16").batches(8, sequence_length=9, stride=4).load_state_dict(state)
    with pytest.raises(UsageError, match="other windows"):
        data.batches(8).load_state_dict(state)
    with pytest.raises(UsageError, match="other windows"):
        data.batches(8, sequence_length=9).load_state_dict(data.batches(8).state_dict())
    assert "windows" not in data.batches(8).state_dict()


def test_loops_of_different_windows_do_not_share_buffers(tokens: Any) -> None:
    data = opened()
    for length, stride in ((10, 4), (10, 5), (12, 4), (10, 4)):
        assert rows(data.batches(8, sequence_length=length, stride=stride)) == expected(tokens, length, stride)
    assert np.concatenate([batch["tokens"] for batch in data.batches(8)]).tolist() == tokens.tolist()


def test_windows_cross_the_borders_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    path = megatron(tmp_path, count=COUNT)
    flat = read_megatron(path)["sequences/values"]
    for name in (path, path.with_suffix(".bin")):
        data = open(name)
        assert rows(data.batches(8, sequence_length=31)) == expected(flat, 31, 31)
        assert rows(open(name, keys="sequences").batches(8, sequence_length=31)) == expected(flat, 31, 31)
    assert len(data["sequences"]) == 61
    assert [len(row) for row in data["sequences"]] == data["documents/values"].tolist()
    both = open([path, path])
    joined = np.concatenate([flat, flat])
    assert rows(both.batches(8, sequence_length=31)) == expected(joined, 31, 31)
    assert len(both["documents"]) == 2 * len(data["documents"])
    assert both["documents"].offsets[-1] == len(both["sequences"]) == 122


def test_the_header_of_llm_c_is_in_no_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    path = llm_c(tmp_path, count=COUNT)
    found = rows(open(path).batches(8, sequence_length=31))
    assert found == expected(np.fromfile(path, np.uint16, offset=1024), 31, 31)


def test_other_data_have_no_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=np.uint16))
    np.savez(tmp_path / "x.npz", tokens=np.arange(100, dtype=np.uint16))
    for path in (write_rows(tmp_path), tmp_path / "tokens.npy", tmp_path / "x.npz"):
        with pytest.raises(UsageError, match="needs a token file"):
            open(path).batches(4, sequence_length=8)
    data = open(megatron(tmp_path, count=COUNT, modes=True), keys=["documents", "modes"])
    with pytest.raises(KeyError):  # the lengths and modes are no tokens
        data.batches(4, sequence_length=8)


@pytest.mark.parametrize(
    "settings",
    [
        {"sequence_length": 0},
        {"sequence_length": True},
        {"sequence_length": 2.5},
        {"sequence_length": 8, "stride": 0},
        {"stride": 8},
        {"sequence_length": COUNT},
        {"sequence_length": 1 << 62},
        {"sequence_length": 8, "keys": "tokens"},
        {"sequence_length": 8, "resident": True, "device": "cuda"},
    ],
    ids=str,
)
def test_settings_that_make_no_windows_are_refused(tokens: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        opened().batches(4, **settings)


def test_the_error_for_other_data_names_the_file_that_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_SHM", str(tmp_path))
    monkeypatch.setenv("LEGROOM_DIR", str(tmp_path))
    for name in ("first.npy", "second.npy"):
        np.save(tmp_path / name, np.arange(100))
    open(tmp_path / "first.npy").close()
    with open(tmp_path / "second.npy") as data, pytest.raises(UsageError, match=r"second\.npy has the format npy"):
        data.batches(4, sequence_length=8)
