"""Opening by content, and the words for everything that cannot be opened."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rigs

from legroom.errors import DamagedSource, MissingPackage, UnknownFormat, UnreadableSource, UnsupportedData, UsageError
from legroom.formats import image_folder_reader
from legroom.formats.detect import _is_old_arrow_stream, open_source


def test_a_missing_file_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSource, match="no such file") as caught:
        open_source(tmp_path / "nowhere.h5")
    assert "nowhere.h5" in str(caught.value)


def test_paths_in_commands_are_quoted_for_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / "a;b c"
    folder.mkdir()
    with pytest.raises(UnreadableSource) as caught:
        open_source(folder / "nowhere.h5")
    assert caught.value.fix[0].endswith(f"\nls '{folder}'")
    (folder / "x y.nc").write_bytes(b"CDF\x01" + bytes(60))
    (folder / "image 1.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(60))
    (folder / "big.npy").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n")
    for name, command in (
        ("x y.nc", f"nccopy -k nc4 '{folder}/x y.nc' out.nc"),
        ("image 1.png", f"tar -cf out.tar '{folder}/image 1.png'"),
        ("big.npy", f"cd '{folder}' && git lfs"),
    ):
        with pytest.raises(UnknownFormat) as refused:
            open_source(folder / name)
        assert command in "\n".join(refused.value.fix)


def test_a_dangling_link_reports_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("gone/data.h5")
    with pytest.raises(UnreadableSource) as caught:
        open_source(tmp_path / "link")
    assert str(tmp_path / "gone" / "data.h5") in caught.value.why


def test_a_dangling_link_in_a_parent_folder_reports_its_target(tmp_path: Path) -> None:
    (tmp_path / "disk").symlink_to("/no/such/disk")
    with pytest.raises(UnreadableSource) as caught:
        open_source(tmp_path / "disk" / "data.h5")
    assert "/no/such/disk" in caught.value.why


def test_a_link_to_itself_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UnreadableSource):
        open_source(tmp_path / "loop")


def test_a_directory_of_no_known_format_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSource, match="none of these: MosaicML MDS, Zarr"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("text", "kind", "reads"),
    [
        ("a,b\n1,2\n3,4\n", "a CSV file", "pyarrow.csv.read_csv('{path}')"),
        ('\ufeffname,text\nx,"one, two"\n', "a CSV file", "pyarrow.csv.read_csv('{path}')"),
        ("a\tb\n1\t2\n", "a CSV file", "ParseOptions(delimiter='\\t'))"),
        ('{"a": 1}\n{"a": 2}\n', "a JSON Lines file", "pyarrow.json.read_json('{path}')"),
        ('[{"a": 1},\n {"a": 2}]\n', "a JSON file", "json.load(open('{path}'))"),
        ('{\n "a": 1\n}\n', "a JSON file", "json.load(open('{path}'))"),
        ("To be, or not to be\nthat is the question\n", "a text file", "dtype='uint8'"),
    ],
)
@pytest.mark.parametrize("dtype", [None, "<u2"])
def test_text_is_refused_with_its_conversion(
    tmp_path: Path, text: str, kind: str, reads: str, dtype: str | None
) -> None:
    path = tmp_path / "data.txt"
    path.write_text(text)
    with pytest.raises(UnknownFormat) as caught:
        open_source(path, dtype=dtype)
    assert kind in caught.value.why if dtype is None else "dtype='uint16' was given" in caught.value.why
    assert reads.format(path=path) in caught.value.fix[0]
    assert not any("uint16" in line for line in caught.value.fix)


def test_the_conversion_of_a_csv_file_works(tmp_path: Path) -> None:
    path = tmp_path / "it's.csv"
    path.write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(UnknownFormat) as caught:
        open_source(path)
    exec(caught.value.fix[0].partition("\n")[2], {})
    with open_source(path.with_suffix(".parquet")) as reader:
        (table,) = reader.describe().items
    assert list(table.columns) == ["a", "b"]  # type: ignore[union-attr]


@pytest.mark.parametrize("image", [False, True])
def test_a_directory_with_other_files_is_not_to_be_emptied(tmp_path: Path, image: bool) -> None:
    """`cache load /` was answered with "leave nothing but the directories of the classes in it"."""
    for name in ("bin", "etc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("1.jpg" if image else "passwd")).write_bytes(b"1")
    (tmp_path / "vmlinuz").write_bytes(b"1")
    with pytest.raises(UnreadableSource) as caught:
        open_source(tmp_path)
    assert caught.value.fix[0].startswith("pass ") and all("leave" not in line for line in caught.value.fix)


def test_a_directory_in_which_one_cannot_be_listed_is_judged_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cache load /` ended at a directory in /dev/fd that no longer existed."""
    for name in ("dev", "etc"):
        (tmp_path / name).mkdir()
    listed = image_folder_reader.names_in

    def names_in(path: Path) -> dict[str, bool]:
        if path.name == "dev":
            raise UnreadableSource("gone")
        return listed(path)

    monkeypatch.setattr(image_folder_reader, "names_in", names_in)
    with pytest.raises(UnreadableSource, match="its subdirectories have no images"):
        open_source(tmp_path)


GROUPS = {".zgroup": '{"zarr_format": 2}', "zarr.json": '{"zarr_format": 3, "node_type": "group", "attributes": {}}'}


@pytest.mark.parametrize("mark", GROUPS)
def test_a_group_of_zarr_without_arrays_does_not_hide_other_data(tmp_path: Path, mark: str) -> None:
    """A folder of images by class with such a file in it was opened as an empty dataset."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(b"image")
    with open_source(tmp_path) as reader:
        assert reader.describe().format == "imagefolder"
    (tmp_path / mark).write_text(GROUPS[mark])
    with open_source(tmp_path) as reader, pytest.raises(UnreadableSource) as caught:
        reader.describe()
    assert "zarr" in caught.value.why and "cat/, dog/" in caught.value.why
    assert caught.value.fix == (f"remove {tmp_path / mark}",)


@pytest.mark.parametrize("mark", GROUPS)
def test_a_group_of_zarr_without_arrays_beside_data_files(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).write_text(GROUPS[mark])
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / mark).write_text(GROUPS[mark])
    (tmp_path / "README").touch()
    with open_source(tmp_path) as reader:  # nothing else is there: an empty group
        assert reader.describe().items == ()
    np.save(tmp_path / "a.npy", np.arange(3))
    with open_source(tmp_path) as reader, pytest.raises(UnreadableSource, match=r"other data: \*\.npy"):
        reader.describe()


def test_a_directory_of_data_files_is_refused_with_their_pattern(tmp_path: Path) -> None:
    for name in ("1.h5", "2.h5", "notes.txt", "labels.npy"):
        (tmp_path / name).touch()
    with pytest.raises(UnreadableSource) as caught:
        open_source(tmp_path)
    assert f"'{tmp_path}/*.h5'" in caught.value.fix[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no fifos here")
def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableSource, match="not a regular file"):
        open_source(tmp_path / "pipe")


def test_a_path_no_filesystem_can_have_is_unreadable() -> None:
    with pytest.raises(UnreadableSource):
        open_source("data\0.h5")
    with pytest.raises(UnreadableSource):
        open_source("x" * 5000)


@pytest.mark.real("user")
def test_a_file_without_read_permission_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "data.npy"
    np.save(path, np.zeros(3))
    rigs.open_to_all(tmp_path)
    path.chmod(0o600)
    script = (
        "from legroom.formats.detect import open_source\n"
        f"try: open_source({str(path)!r})\n"
        "except Exception as problem: print(problem.code, problem.why)"
    )
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run(
        rigs.as_user(65534, [sys.executable, "-c", script]),
        capture_output=True, text=True, env={"PYTHONPATH": str(source), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.stdout.startswith("unreadable-source this user has no read permission"), done.stderr


def test_an_empty_file_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "x.h5").touch()
    with pytest.raises(DamagedSource, match="empty"):
        open_source(tmp_path / "x.h5")


def test_an_unknown_format_shows_its_first_bytes_and_what_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"image\xff\x01" * 9)
    with pytest.raises(UnknownFormat) as caught:
        open_source(tmp_path / "x")
    assert "image" in caught.value.why
    assert "69 6d 61 67 65" in caught.value.why
    assert any("Parquet" in step and "safetensors" in step for step in caught.value.fix)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (pickle.dumps([1]), "pickle"),
        (b"\x1f\x8b\x08" + bytes(20), "gunzip"),
        (b"FEA1" + bytes(20), "Feather version 1"),
        (b"PARE" + bytes(20), "encrypted"),
        (b"MATLAB 5.0 MAT-file", "v7.3"),
    ],
)
def test_known_unsupported_formats_are_named(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UnknownFormat) as caught:
        open_source(tmp_path / "x")
    assert word in str(caught.value)


def test_a_torch_checkpoint_is_not_unpickled(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", b"cos\nsystem\n(S'false'\ntR.")
    with open_source(tmp_path / "model.pt") as reader, pytest.raises(UnsupportedData, match=r"needs os\.system"):
        reader.describe()


def test_another_zip_archive_is_unsupported(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("readme.txt", b"hello")
    with pytest.raises(UnknownFormat, match="zip archive without"):
        open_source(tmp_path / "x.zip")


@pytest.mark.parametrize(
    "content", [b"PAR1", b"PAR1" + bytes(100), b"ARROW1\0\0" + bytes(50), b"PK\x03\x04" + bytes(90)]
)
def test_a_file_without_its_end_marker_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DamagedSource) as caught:
        open_source(tmp_path / "x")
    assert caught.value.fix[-1].startswith("or wait until it is written: it changed ")
    os.utime(tmp_path / "x", (1_600_000_000, 1_600_000_000))
    with pytest.raises(DamagedSource) as caught:
        open_source(tmp_path / "x")
    assert len(caught.value.fix) == 1


@pytest.mark.parametrize(
    ("package", "content"),
    [("pyarrow", b"PAR1" + bytes(20) + b"PAR1"), ("pyarrow", b"ARROW1\0\0" + bytes(20) + b"ARROW1"), ("zarr", None)],
)
def test_a_missing_package_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, content: bytes | None
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / "x"
    if content is None:
        path.mkdir()
        (path / "zarr.json").write_text("{}")
    else:
        path.write_bytes(content)
    with pytest.raises(MissingPackage) as caught:
        open_source(path)
    assert caught.value.fix == (f"pip install {package}",)


@pytest.mark.parametrize("keys", [[], [1], ""])
def test_keys_that_select_nothing_are_refused(tmp_path: Path, keys: object) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    if keys == "":
        with open_source(tmp_path / "x.npy", keys="/") as reader:
            assert len(reader.describe().items) == 1
        return
    with pytest.raises(UsageError):
        open_source(tmp_path / "x.npy", keys=keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("mark", [".zgroup", "zarr.json"])
def test_a_group_of_zarr_without_arrays_does_not_hide_images_beside_it(tmp_path: Path, mark: str) -> None:
    (tmp_path / "1.jpg").write_bytes(b"\xff\xd8")
    kind = '{"zarr_format": 2}' if mark == ".zgroup" else '{"zarr_format": 3, "node_type": "group", "attributes": {}}'
    (tmp_path / mark).write_text(kind)
    with pytest.raises(UnreadableSource, match=r"1\.jpg") as caught, open_source(tmp_path) as reader:
        reader.describe()
    assert f"remove {tmp_path / mark}" in caught.value.fix[0]


def test_tokens_that_begin_like_an_arrow_stream_are_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for second in (8, 16, 240, 1 << 20):
        tokens = np.concatenate([[-1, second], rng.integers(-1, 5000, 400)]).astype(np.int32)
        tokens.tofile(tmp_path / "x.bin")
        with open_source(tmp_path / "x.bin", dtype="int32") as reader:
            out: Any = np.empty(402, np.int32)
            reader.read_into(reader.describe().items[0].name, out)
        np.testing.assert_array_equal(out, tokens)


@pytest.mark.parametrize("columns", [0, 1, 300])
@pytest.mark.parametrize("notes", [0, 10, 5000])
def test_an_arrow_stream_of_before_0_15_is_recognized(tmp_path: Path, columns: int, notes: int) -> None:
    arrow = pytest.importorskip("pyarrow")
    fields = [(f"column {number}", arrow.int64()) for number in range(columns)]
    schema = arrow.schema(fields, metadata={"a": "b" * notes} if notes else None)
    for version in arrow.ipc.MetadataVersion:
        if version < arrow.ipc.MetadataVersion.V4:
            continue  # pyarrow writes none
        options = arrow.ipc.IpcWriteOptions(use_legacy_format=True, metadata_version=version)
        with arrow.ipc.new_stream(str(tmp_path / "x"), schema, options=options):
            pass
        with open_source(tmp_path / "x") as reader:
            assert type(reader).__name__ == "ArrowReader"
        with pytest.raises(UsageError, match="arrow-stream"), open_source(tmp_path / "x", dtype="int32"):
            pass


def test_hardly_any_other_bytes_are_an_arrow_stream_of_before_0_15() -> None:
    arrow = pytest.importorskip("pyarrow")
    sink = arrow.BufferOutputStream()
    options = arrow.ipc.IpcWriteOptions(use_legacy_format=True)
    with arrow.ipc.new_stream(sink, arrow.schema([("a", arrow.int64())]), options=options) as to:
        to.write_batch(arrow.record_batch([[1, 2]], names=["a"]))
    whole = sink.getvalue().to_pybytes()
    assert _is_old_arrow_stream(whole, len(whole))
    rows = whole[4 + int.from_bytes(whole[:4], "little") :]
    assert not _is_old_arrow_stream(rows, len(rows))  # a message, but of a batch
    for end in range(64):
        _is_old_arrow_stream(whole[:end], end)  # raises nothing
    chance = np.random.default_rng(0)
    for _ in range(20_000):  # most bytes as they are: they pass most of the checks
        changed = np.frombuffer(whole, np.uint8).copy()
        changed[chance.integers(0, 64, 3)] = chance.integers(0, 256, 3)
        _is_old_arrow_stream(changed.tobytes(), len(changed))
    for dtype, most in (("u2", 50_257), ("u2", 32), ("i4", 32), ("i4", 4096), ("i8", 32), ("f4", 2)):
        for _ in range(5_000):
            tokens = chance.integers(0, most, 256).astype(dtype).tobytes()
            assert not _is_old_arrow_stream(tokens, len(tokens))


@pytest.mark.parametrize("columns", [1, 40])
def test_an_arrow_stream_is_no_file_of_tokens(tmp_path: Path, columns: int) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({f"column {number}": [1, 2] for number in range(columns)}, metadata={"a": "b" * 500})
    with arrow.ipc.new_stream(str(tmp_path / "x"), table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(UsageError, match="arrow-stream"), open_source(tmp_path / "x", dtype="int32"):
        pass
