"""Directories of Hugging Face datasets: order, splits, columns, and what is refused instead of ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from format_samples import hf_downloaded, hf_saved, hf_stream, hf_table

import legroom
from legroom.errors import DamagedSource, LegroomError, MissingKey, NoRoom, UnsupportedData
from legroom.formats.decoding_memory_budget import Allowed, DecodingMemory
from legroom.formats.detect import open_source

pa = pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variable in (("shm", "LEGROOM_SHM"), ("disk", "LEGROOM_DIR")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))


def small() -> Any:
    return pa.table(
        {"id": pa.array(range(10)), "text": [str(i) * i for i in range(10)], "score": [i / 2 for i in range(10)]}
    )


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_files_are_read_in_the_order_of_state_json(tmp_path: Path) -> None:
    folder = hf_saved(tmp_path / "x", small(), 3)
    names = [file["filename"] for file in json.loads((folder / "state.json").read_text())["_data_files"]]
    assert legroom.open(folder)["table"]["id"].to_pylist() == list(range(10))
    changed(folder / "state.json", _data_files=[{"filename": name} for name in reversed(names)])
    assert legroom.open(folder)["table"]["id"].to_pylist() == [8, 9, 4, 5, 6, 7, 0, 1, 2, 3]
    changed(folder / "state.json", _data_files=[{"filename": names[1]}])
    assert legroom.open(folder)["table"]["id"].to_pylist() == [4, 5, 6, 7]


def test_the_columns_of_set_format_are_shown(tmp_path: Path) -> None:
    folder = hf_saved(tmp_path / "x", small(), _format_columns=["text", "id"], _format_type="torch")
    assert legroom.open(folder)["table"].column_names == ["id", "text"]
    with pytest.raises(MissingKey):
        legroom.open(folder, keys="score")
    changed(folder / "state.json", _output_all_columns=True)
    assert legroom.open(folder)["table"].column_names == ["id", "text", "score"]
    changed(folder / "state.json", _output_all_columns=False, _format_columns=["no such column"])
    with pytest.raises(DamagedSource, match="no such column"):
        legroom.open(folder)


def dictionary(folder: Path) -> Path:
    folder.mkdir()
    hf_saved(folder / "train", small(), 2)
    hf_saved(folder / "test", small().slice(0, 2))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return folder


def test_each_split_of_a_dataset_dict_is_a_table(tmp_path: Path) -> None:
    folder = dictionary(tmp_path / "x")
    data = legroom.open(folder)
    assert list(data) == ["train", "test"]
    assert data["train"].equals(small()) and data["test"].equals(small().slice(0, 2))
    assert list(legroom.open(folder, keys="test")) == ["test"]
    part = legroom.open(folder, keys=["train/id"])
    assert part.columns == {"train": ("id",)} or list(part) == ["train"]
    with pytest.raises(MissingKey, match="validation"):
        legroom.open(folder, keys="validation")
    with pytest.raises(MissingKey) as caught:
        data["validation"]
    assert caught.value.why.startswith("it holds train, test, train/id, ")


def test_files_that_map_has_cached_are_not_part_of_the_data(tmp_path: Path) -> None:
    folder = hf_saved(tmp_path / "x", small(), 2)
    before = legroom.open(folder).info.key
    (folder / "cache-0123456789abcdef.arrow").write_bytes(b"of a later map()")
    assert legroom.open(folder).info.key == before
    changed(folder / "state.json", _fingerprint="another")
    assert legroom.open(folder).info.key != before


@pytest.mark.parametrize("name", ["_indices_data_files", "_indices_files"])
def test_an_indices_mapping_is_refused(name: str, tmp_path: Path) -> None:
    folder = hf_saved(tmp_path / "x", small(), **{name: [{"filename": "indices.arrow"}]})
    with pytest.raises(UnsupportedData, match="indices mapping") as caught:
        legroom.open(folder)
    assert "flatten_indices" in str(caught.value)


BAD_STATES = {
    "a file elsewhere": {"_data_files": [{"filename": "../other.arrow"}]},
    "an absolute path": {"_data_files": [{"filename": "/etc/passwd"}]},
    "a file twice": {"_data_files": [{"filename": "data-00000-of-00001.arrow"}] * 2},
    "no such file": {"_data_files": [{"filename": "data-00001-of-00001.arrow"}]},
    "no file": {"_data_files": []},
    "no list": {"_data_files": 3},
    "no name": {"_data_files": [{}]},
    "columns that are no list": {"_format_columns": "id"},
    "an unknown field": {"_rows_to_skip": 3},
}


@pytest.mark.parametrize("state", BAD_STATES.values(), ids=BAD_STATES)
def test_a_state_that_cannot_be_followed_is_refused(state: dict[str, Any], tmp_path: Path) -> None:
    folder = hf_saved(tmp_path / "x", small(), **state)
    with pytest.raises(LegroomError):
        legroom.open(folder)


def test_a_missing_field_of_the_state_is_damaged(tmp_path: Path) -> None:
    folder = hf_saved(tmp_path / "x", small())
    state = json.loads((folder / "state.json").read_text())
    for name in state:
        (folder / "state.json").write_text(json.dumps({other: state[other] for other in state if other != name}))
        with pytest.raises(DamagedSource, match=name):
            legroom.open(folder)


def test_json_that_is_none_is_damaged(tmp_path: Path) -> None:
    folder = hf_saved(tmp_path / "x", small())
    for text in ("", "[", "[]", "3", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")):
        (folder / "dataset_info.json").write_text(text)
        with pytest.raises(DamagedSource):
            legroom.open(folder)


def test_features_that_are_not_those_of_the_files_are_refused(tmp_path: Path) -> None:
    folder = hf_saved(tmp_path / "x", small())
    info = folder / "dataset_info.json"
    features = json.loads(info.read_text())["features"]
    changed(info, features=features | {"id": {"dtype": "int32", "_type": "Value"}})
    with pytest.raises(UnsupportedData, match="features"):
        legroom.open(folder)
    changed(info, features={name: features[name] for name in ("id", "text")})
    with pytest.raises(UnsupportedData):
        legroom.open(folder)
    changed(info, features=None)
    assert legroom.open(folder)["table"].equals(small())


def test_types_are_compared_where_a_file_states_no_features(tmp_path: Path) -> None:
    folder = hf_saved(tmp_path / "x", small())
    (file,) = folder.glob("*.arrow")
    with pa.ipc.new_stream(str(file), small().schema) as writer:
        writer.write_table(small())
    assert legroom.open(folder)["table"].equals(small())
    features = json.loads((folder / "dataset_info.json").read_text())["features"]
    changed(folder / "dataset_info.json", features=features | {"id": {"dtype": "int32", "_type": "Value"}})
    with pytest.raises(UnsupportedData, match="int64"):
        legroom.open(folder)


def test_files_with_other_columns_or_dictionaries_are_refused(tmp_path: Path) -> None:
    folder = hf_saved(tmp_path / "x", small(), 2)
    changed(folder / "dataset_info.json", features=None)
    hf_stream(folder / "data-00001-of-00002.arrow", small().rename_columns(["id", "words", "score"]))
    with pytest.raises(DamagedSource, match="columns"):
        legroom.open(folder)
    table = pa.table({"kind": pa.array(["a", "b"]).dictionary_encode()})
    with pa.ipc.new_stream(str(folder / "data-00000-of-00002.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UnsupportedData, match="dictionary"):
        legroom.open(folder)


def test_a_stream_without_its_end_is_damaged(tmp_path: Path) -> None:
    folder = hf_saved(tmp_path / "x", hf_table())
    (file,) = folder.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-8])  # complete batches: pyarrow alone does not notice
    with pytest.raises(DamagedSource, match="end marker"):
        legroom.open(folder)


def test_the_cache_of_load_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    hf_downloaded(folder)
    data = legroom.open(folder)
    assert list(data) == ["train"] and data["train"].num_rows == 4000
    info = json.loads((folder / "dataset_info.json").read_text())
    split = info["splits"]["train"]
    for wrong in (
        {"shard_lengths": [1499, 2501]},
        {"shard_lengths": [1500, 2500, 0]},
        {"num_examples": 3999},
        {"shard_lengths": ["1500", 2500]},
    ):
        changed(folder / "dataset_info.json", splits={"train": split | wrong})
        with pytest.raises(LegroomError):
            legroom.open(folder)
    changed(folder / "dataset_info.json", splits={"train": split})
    (folder / "other-train-00000-of-00002.arrow").touch()
    with pytest.raises(UnsupportedData, match="there are 2"):
        legroom.open(folder)
    changed(folder / "dataset_info.json", splits=None)
    with pytest.raises(UnsupportedData, match=r"state\.json"):
        legroom.open(folder)


def test_memory_for_decoding_is_counted(tmp_path: Path) -> None:
    folder = hf_saved(tmp_path / "x", hf_table(), 2)
    memory = DecodingMemory(lambda: Allowed(1000, "a test allows 1000 bytes"))
    with open_source(folder, memory=memory) as reader, pytest.raises(NoRoom):
        reader.write_table("table", tmp_path / "out")


def test_datasets_shows_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets = pytest.importorskip("datasets", reason="the datasets library is not installed")
    table = hf_table()
    made = datasets.Dataset(table).with_format(None)
    whole = {
        "plain": made,
        "shuffled": made.shuffle(seed=3),
        "selected": made.select(range(7, 900, 3)),
        "columns": made.with_format("numpy", columns=["id", "tokens"]),
        "concatenated": datasets.concatenate_datasets([made, made.select([5, 3])]),
        "mapped": made.map(lambda row: {"length": len(row["text"])}),
    }
    for name, dataset in whole.items():
        dataset.save_to_disk(tmp_path / name, num_shards=2)
        shown = datasets.load_from_disk(str(tmp_path / name))
        expected = shown.data.table
        if shown._format_columns is not None:
            expected = expected.select(shown._format_columns)
        assert legroom.open(tmp_path / name)["table"].equals(expected.combine_chunks()), name
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk(tmp_path / "dict")
    data = legroom.open(tmp_path / "dict")
    for split, shown in datasets.load_from_disk(str(tmp_path / "dict")).items():
        assert data[split].equals(shown.data.table)
    assert datasets.load_from_disk(str(hf_saved(tmp_path / "ours", table, 3))).data.table.equals(table)


def test_load_dataset_shows_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="the datasets library is not installed")
    (tmp_path / "a.csv").write_text("x,y\n1,a\n2,b\n3,c\n")
    (tmp_path / "b.csv").write_text("x,y\n4,d\n")
    files = {"train": str(tmp_path / "a.csv"), "test": str(tmp_path / "b.csv")}
    shown = datasets.load_dataset("csv", data_files=files, cache_dir=str(tmp_path / "cache"))
    folder = Path(shown["train"].cache_files[0]["filename"]).parent
    data = legroom.open(folder)
    for split, dataset in shown.items():
        assert data[split].equals(dataset.data.table), split


def test_a_dataset_saved_over_a_dataset_dict_is_what_is_read(tmp_path: Path) -> None:
    """datasets looks for a Dataset first, and leaves the files of the other one in the directory."""
    folder = tmp_path / "x"
    folder.mkdir()
    hf_saved(folder / "train", small())
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert list(legroom.open(folder)) == ["train"]
    hf_saved(folder, small().slice(7))
    data = legroom.open(folder)
    assert list(data) == ["table"] and data["table"]["id"].to_pylist() == [7, 8, 9]


@pytest.mark.parametrize("noted", [True, False])  # in the Arrow files, or in dataset_info.json alone
def test_tables_whose_numbers_are_other_classes_are_not_joined(noted: bool, tmp_path: Path) -> None:
    folders = []
    for names in (["cat", "dog"], ["dog", "fox"]):
        folder = hf_saved(tmp_path / names[0], pa.table({"label": pa.array([0, 1])}))
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        changed(folder / "dataset_info.json", features=features)
        for file in folder.glob("*.arrow"):
            table = pa.ipc.open_stream(file.read_bytes()).read_all()
            notes = {"huggingface": json.dumps({"info": {"features": features}})} if noted else {}
            with pa.ipc.new_stream(str(file), table.schema.with_metadata(notes)) as writer:
                writer.write_table(table)
        folders.append(folder)
    assert len(legroom.open([folders[0], folders[0]])["table"]) == 4
    with pytest.raises(UnsupportedData, match="join") as caught:
        legroom.open(folders)
    assert "different huggingface" in caught.value.why


@pytest.mark.parametrize("mark", [".zgroup", "zarr.json", "index.json", "data.mdb"])
def test_a_directory_with_the_marks_of_two_formats_is_refused(tmp_path: Path, mark: str) -> None:
    folder = hf_saved(tmp_path / "x", small())
    (folder / mark).write_text("{}")
    with pytest.raises(LegroomError, match="several formats"):
        legroom.open(folder)
