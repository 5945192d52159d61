"""Files that people pass by mistake: each is named, with what to do; those that are valid open as before."""

from __future__ import annotations

import gzip
import json
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from legroom.errors import DamagedSource, LegroomError, UnknownFormat, UnreadableSource
from legroom.formats.detect import open_source
from legroom.formats.unsupported_file_types import TYPES

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 4976698672\n".encode()
PAGE = b"\xef\xbb\xbf\n<!DOCTYPE html>\n<html><head><title>Sign in &amp; continue\n</title></head></html>"
S3 = b'<?xml version="1.0"?>\n<Error><Code>NoSuchKey</Code><Message>The key does not exist.</Message></Error>'
MNIST = b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 4) + bytes(range(24))
RECORD = bytes.fromhex("1800000000000000a37f4b22") + bytes(28)  # as the event files of TensorBoard begin
ONNX = b"\x08\x07\x12\x07pytorch\x1a\x032.1:" + bytes(40)
OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
BITMAP = b"BM" + struct.pack("<I", 64) + bytes(58)
# The name of a file, its content, and what the error says: the reason, then the steps.
SAMPLES = [
    ("a.safetensors", POINTER, "Git LFS pointer", "git lfs pull"),
    ("a.npy", POINTER, "4976698672 bytes", "git lfs pull"),
    ("a.h5", b"/annex/objects/SHA256E-s4--12.h5\n", "git-annex pointer", "git annex get"),
    ("a.h5", PAGE, "instead of the file: Sign in & continue", "curl -fL -o a.h5"),
    ("a.pt", b"<html>404</html>", "HTML page that a server sent", "404"),
    ("a.h5", S3, "NoSuchKey: The key does not exist.", "curl -fL"),
    ("a.h5", b'{"error":"Repository not found"}', "Repository not found", "curl -fL"),
    ("a.safetensors", b"Entry not found", "answer of a server: Entry not found", "login"),
    ("a.h5", bytes(600), "first 600 bytes are zeros", "download"),
    ("a.h5.part", b"\x01\x02\x03\x04" * 9, "part of a download", "wait until"),
    ("a.h5.crswap", b"\x01\x02\x03\x04" * 9, "part of a download", "wait until"),
    ("a.incomplete", b"a,b\n1,2\n", "part of a download", "wait until"),
    ("._a.h5", b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X", "AppleDouble", "-name '._*' -delete"),
    (".DS_Store", b"\x00\x00\x00\x01Bud1" + bytes(9), "file manager", "leave it out"),
    ("Thumbs.db", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(9), "file manager", "leave it out"),
    ("lock.mdb", b"\xde\xc0\xef\xbe" + bytes(60), "lock file", "pass the data file"),
    ("model.safetensors.index.json", b'{"weight_map": {}}', "index of a model", "legroom.weights('"),
    ("data.h5.dvc", b"outs:\n- md5: 1\n", "DVC pointer", "dvc pull"),
    ("train.py", b"import torch\n", "a program", "legroom run"),
    ("README.md", b"# Data\n", "beside the data", "pattern of the data files"),
    ("._SUCCESS.crc", b"crc\0\0\0\x02\0", "beside the data", "pattern of the data files"),
    ("index.json", b'{"shards": []}', "MosaicML MDS", "pass the directory"),
    (".zarray", b'{"zarr_format": 2}', "Zarr", "pass the directory"),
    ("a.csv.gz", gzip.compress(b"a,b\n1,2\n", mtime=0), "CSV (gzip)", "read_csv('"),
    ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n', mtime=0), "JSON Lines (gzip)", "input_stream('"),
    ("a.nii.gz", gzip.compress(b"abc", mtime=0), "NIfTI", "nibabel.load('"),
    ("a.bin.gz", gzip.compress(b"abc", mtime=0), "compressed with gzip", "gunzip -k"),
    ("a.zst", b"\x28\xb5\x2f\xfd" + bytes(9), "compressed with zstd", "unzstd"),
    ("a.xz", b"\xfd7zXZ\x00" + bytes(9), "compressed with xz", "unxz"),
    ("a.7z", b"7z\xbc\xaf\x27\x1c" + bytes(9), "content is 7z", "extract it"),
    ("a.rar", b"Rar!\x1a\x07\x01\x00" + bytes(9), "content is RAR", "extract it"),
    ("a.png", b"\x89PNG\r\n\x1a\n" + bytes(9), "content is PNG", "one subdirectory per class"),
    ("a.jpg", b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(9), "content is JPEG", "WebDataset tar"),
    ("a.gif", b"GIF89a" + bytes(9), "content is GIF", "WebDataset tar"),
    ("a.webp", b"RIFF\x10\0\0\0WEBPVP8 ", "content is WebP", "WebDataset tar"),
    ("a.bmp", BITMAP, "content is BMP", "WebDataset tar"),
    ("a.tif", b"II*\x00" + bytes(9), "content is TIFF", "WebDataset tar"),
    ("a.mp4", b"\0\0\0\x20ftypisom" + bytes(9), "content is MP4", "WebDataset tar"),
    ("a.mkv", b"\x1a\x45\xdf\xa3" + bytes(9), "content is Matroska", "WebDataset tar"),
    ("a.avi", b"RIFF\x10\0\0\0AVI LIST", "content is AVI", "WebDataset tar"),
    ("a.wav", b"RIFF\x10\0\0\0WAVEfmt ", "content is WAV", "WebDataset tar"),
    ("a.flac", b"fLaC" + bytes(9), "content is FLAC", "WebDataset tar"),
    ("a.ogg", b"OggS" + bytes(9), "content is Ogg", "WebDataset tar"),
    ("a.mp3", b"ID3\x04" + bytes(9), "content is MP3", "WebDataset tar"),
    ("a.pdf", b"%PDF-1.7\n\x01", "content is PDF", "WebDataset tar"),
    ("a.pt", OLD_TORCH, "before torch 1.6", "weights_only=True"),
    ("a.gguf", b"GGUF\x03" + bytes(9), "content is GGUF", "safetensors files"),
    ("a.ggml", b"tjgg\x03" + bytes(9), "content is GGML", "safetensors files"),
    ("a.onnx", ONNX, "content is ONNX", "safetensors files"),
    ("a.tflite", b"\x1c\0\0\0TFL3" + bytes(9), "content is TensorFlow Lite", "safetensors files"),
    ("a.pkl", b"\x80\x04]q\x00.", "pickle", "legroom.freeze"),
    ("a.db", b"SQLite format 3\0" + bytes(9), "content is SQLite", "pandas.read_sql"),
    ("a.tfrecord", RECORD, "content is TFRecord", "its own library"),
    ("a.dcm", bytes(128) + b"DICM" + bytes(9), "content is DICOM", "pydicom.dcmread('"),
    ("a.nii", b"\\\x01" + bytes(342) + b"n+1\0" + bytes(9), "content is NIfTI", "nibabel.load('"),
    ("a.orc", b"ORC\x01\x02" + bytes(9), "content is ORC", "read_table('"),
    ("a.avro", b"Obj\x01\x02" + bytes(9), "content is Avro", "its own library"),
    ("t10k-images-idx3-ubyte", MNIST, "content is IDX", "reshape((2, 3, 4))"),
    ("a.mat", b"MATLAB 5.0 MAT-file" + bytes(200), "MATLAB 5", "loadmat('"),
    ("a.nc", b"CDF\x01" + bytes(9), "netCDF 3", "nccopy"),
    ("lib.so", b"\x7fELF\x02" + bytes(9), "content is ELF", "convert it to one of"),
    ("a.xml", b"<?xml version='1.0'?><a/>", "content is XML", "its own library"),
    ("a.html", b"<html><body>x</body></html>", "content is HTML", "its own library"),
    ("train.bin", b"\x01\x02\x03\x04" * 9, "first bytes", "train.idx"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "why", "fix"), SAMPLES, ids=[f"{one[0]}-{one[2]}" for one in SAMPLES])
def test_what_is_passed_by_mistake_is_named_with_what_to_do(
    tmp_path: Path, name: str, content: bytes, why: str, fix: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnknownFormat) as caught:
        open_source(path)
    assert why in caught.value.why
    assert fix in "\n".join(caught.value.fix)
    assert "numpy.save;" not in str(caught.value)  # the advice for a text with tokens
    code = next((step.partition("\n")[2] for step in caught.value.fix if step.startswith("convert it in Python")), "")
    compile(code, "fix", "exec")


@pytest.mark.parametrize(
    ("name", "content"), [pytest.param(one[0], one[1], id=f"{one[0]}-{one[2]}") for one in SAMPLES if len(one[1]) >= 8]
)
def test_tokens_that_begin_like_another_type_open_with_their_dtype(tmp_path: Path, name: str, content: bytes) -> None:
    """Refused are only types whose marks tokens do not have by chance, and text given as other than its bytes."""
    never = any(one.never_tokens and one.marked(content) for one in TYPES) or name == "a.pkl"
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    if never:
        with pytest.raises(UnknownFormat):
            open_source(path, dtype="|u1")
        return
    if content.startswith((b"\xde\xc0",)):
        return
    with open_source(path, dtype="|u1") as reader:
        assert reader.describe().nbytes == len(content)


def test_the_conversion_of_mnist_works(tmp_path: Path) -> None:
    path = tmp_path / "images-idx3-ubyte"
    path.write_bytes(MNIST)
    with pytest.raises(UnknownFormat) as caught:
        open_source(path)
    exec(caught.value.fix[0].partition("\n")[2], {})
    assert np.array_equal(np.load(tmp_path / "images-idx3-ubyte.npy"), np.arange(24, dtype="u1").reshape(2, 3, 4))


def test_an_excel_workbook_is_not_any_zip_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.xlsx", "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
    with pytest.raises(UnknownFormat, match="Excel"):
        open_source(tmp_path / "a.xlsx")


def test_a_name_of_a_partial_download_does_not_keep_a_whole_file_from_opening(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    for name in ("a.npy.part", "a.lock", "Thumbs.db", "a.py"):
        (tmp_path / name).write_bytes((tmp_path / "a.npy").read_bytes())
        with open_source(tmp_path / name) as reader:
            assert reader.describe().format == "npy"


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("a.parquet.part", b"PAR1" + bytes(100), "part of a download"),
        ("_SUCCESS", b"", "beside the data"),
        ("a.npy.lock", b"", "lock file"),
        ("a.npy.incomplete", b"", "part of a download"),
    ],
)
def test_what_is_truncated_or_empty_may_be_no_data_file_by_its_name(
    tmp_path: Path, name: str, content: bytes, word: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DamagedSource, match=f"(is empty|is truncated).*{word}"):
        open_source(tmp_path / name)


def test_a_damaged_file_that_begins_with_zeros_keeps_its_reason(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(5001))
    with pytest.raises(DamagedSource, match="5001 bytes"), open_source(tmp_path / "train.bin", dtype="<u2") as reader:
        reader.describe()


def shards(folder: Path) -> None:
    one = {
        "format": "mds", "version": 2, "samples": 1, "compression": None, "hashes": [], "zip_data": None,
        "column_names": ["x"], "column_encodings": ["bytes"], "column_sizes": [None],
        "raw_data": {"basename": "shard.00000.mds", "bytes": 900, "hashes": {}},
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [one]}))


def test_a_missing_shard_is_one_that_the_index_lists(tmp_path: Path) -> None:
    shards(tmp_path)
    with (
        open_source(tmp_path) as reader,
        pytest.raises(UnreadableSource, match=r"index\.json lists the shard shard\.0"),
    ):
        reader.describe()


@pytest.mark.parametrize("name", ["index.json", "shard.00000.mds"])
def test_a_pointer_of_git_lfs_in_a_directory_is_named(tmp_path: Path, name: str) -> None:
    shards(tmp_path)
    (tmp_path / name).write_bytes(POINTER)
    with open_source(tmp_path) as reader, pytest.raises(DamagedSource, match="Git LFS pointer"):
        reader.describe()


def test_a_broken_link_of_hugging_faces_cache_is_downloaded_again(tmp_path: Path) -> None:
    folder = tmp_path / "datasets--org--name" / "snapshots" / "12ab" / "data"
    folder.mkdir(parents=True)
    (folder / "a.parquet").symlink_to("../../../blobs/34cd")
    with pytest.raises(UnreadableSource) as caught:
        open_source(folder / "a.parquet")
    assert "hf download org/name data/a.parquet --repo-type dataset" in caught.value.fix[0]


def test_files_of_file_managers_beside_classes_are_passed_over(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(b"image")
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store"):
        (tmp_path / name).write_bytes(b"x")
        (tmp_path / "cat" / name).write_bytes(b"x")
    with open_source(tmp_path) as reader:
        assert reader.describe().attributes["classes"] == ["cat", "dog"]
    (tmp_path / "__MACOSX").mkdir()
    with open_source(tmp_path) as reader, pytest.raises(LegroomError, match="macOS") as caught:
        reader.describe()
    assert str(tmp_path / "__MACOSX") in caught.value.fix[0]


def test_a_directory_that_is_no_dataset_is_named(tmp_path: Path) -> None:
    cached = tmp_path / "models--org--name"
    (cached / "snapshots" / "12ab").mkdir(parents=True)
    (cached / "blobs").mkdir()
    checkpoint = tmp_path / "step_100"
    checkpoint.mkdir()
    (checkpoint / ".metadata").write_bytes(b"x")
    (checkpoint / "__0_0.distcp").write_bytes(b"x")
    for path, why, fix in (
        (cached, "cache of Hugging Face", str(cached / "snapshots" / "12ab")),
        (checkpoint, "DCP", "dcp_to_torch"),
    ):
        with pytest.raises(UnreadableSource) as caught:
            open_source(path)
        assert why in caught.value.why and fix in caught.value.fix[0]


def test_an_empty_tar_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    tarfile.open(path, "w").close()
    with pytest.raises(UnknownFormat, match="a tar archive without files") as caught:
        open_source(path)
    assert "dtype" not in str(caught.value)
    path.write_bytes(bytes(4096) + b"x" * 512)
    with pytest.raises(UnknownFormat, match="first 4096 bytes are zeros"):
        open_source(path)
