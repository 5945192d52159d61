"""The types of files that Legroom does not read, in one table: how each is recognized, and what to do with it.

Some stand in the place of the file that was meant: a Git LFS pointer, the error page of a server, part of a download.
CSV, JSON and other text are recognized in token_reader.py, formats that Legroom reads in detect.py.
"""

from __future__ import annotations

import os
import re
import shlex
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from html import unescape
from math import prod
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.formats.file_reads_and_errors import SourceFile
from legroom.messages import phrase, say
from legroom.system.lazy_and_optional_imports import lazy_import
from legroom.units import format_size

_LOOK = 4096  # bytes at the start of a file
_PAGE = 1 << 16  # of HTML, in which its title is searched
_MOST_EMPTY_TAR = 1 << 20  # bytes: tar fills the last record of an archive with zeros
_MOST_ANSWER = 1000  # bytes of a server's answer without markup; data are larger
_MOST_SHOWN = 200

Facts = Mapping[str, object]
_NO_FACTS: Facts = {}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """What a file is, in sentences, and what to do."""

    why: str
    fix: tuple[str, ...]
    converts: bool = False  # the advice is to convert it, to any of the formats that are read
    may_be_tokens: bool = False  # a flat token file may begin like this by chance
    by_name: bool = False  # its content is unknown


@dataclass(frozen=True, slots=True)
class FileType:
    """One type of file: it is recognized by its first bytes, and where no type is, by its name.

    ``why``, ``fix`` and ``code`` have the fields {name}, {path}, {folder}, {file}, {command} and those of ``facts``.
    In ``fix``, paths are quoted for the shell; {directory} is the folder without quotes.
    """

    name: str = ""
    marks: tuple[bytes, ...] = ()  # at the position ``at``; one of them is enough
    at: int = 0
    facts: Callable[[SourceFile, bytes], Facts | None] | None = None  # None: it is not this type after all
    endings: tuple[str, ...] = ()  # of names
    why: str = phrase("its content is {name}, which is not read")
    fix: tuple[str, ...] = ()
    code: str = ""  # Python that converts it; {out} is the path without its endings
    command: str = ""
    stands_in: bool = False  # for the file that was meant
    converts: bool = False
    may_be_tokens: bool = False
    never_tokens: bool = False  # refused also if the caller gives the type of flat tokens

    def marked(self, head: bytes) -> bool:
        return any(head.startswith(mark, self.at) for mark in self.marks)

    def told(self, path: Path, facts: Facts) -> Unsupported:
        fields: dict[str, object] = {
            "name": self.name, "path": path, "folder": path.parent, "file": path.name, "command": self.command, **facts,
        }  # fmt: skip
        quoted = {name: shlex.quote(str(fields[name])) for name in ("path", "folder", "file")}
        steps = [say(step, **{**fields, **quoted, "directory": path.parent}) for step in self.fix]
        if code := str(facts.get("code", "")) or self.code:
            out = path.with_name(path.name.lstrip(".").partition(".")[0] or "out")
            code = re.sub(
                r"\{(path|out)(\S*?)\}", lambda one: repr(f"{path if one[1] == 'path' else out}{one[2]}"), code
            )
            steps.insert(0, say("convert it in Python:\n{code}", code=code))
        return Unsupported(say(self.why, **fields), tuple(steps), self.converts, self.may_be_tokens)


def unsupported_type(file: SourceFile) -> Unsupported | None:
    """What this file is, by its first bytes, else by its name; None if neither is known."""
    return _found(file, TYPES)


def never_tokens(file: SourceFile) -> Unsupported | None:
    """The same for a file that was given as flat tokens: only by marks that tokens do not have by chance.

    The marks of gzip and zip are two or three bytes: what follows decides.
    """
    head = file.read_at(0, min(4, file.size))
    if (head.startswith(_GZIP) and not _is_gzip(file)) or (head.startswith(ZIP) and not is_zip(file)):
        return None
    return _found(file, [one for one in TYPES if one.never_tokens], by_name=False)


_GZIP = b"\x1f\x8b\x08"
ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_GZIP_LOOK, _MOST_PLAIN = 1 << 16, 1 << 20  # compressed bytes that are decompressed, and their result


def _is_gzip(file: SourceFile) -> bool:
    """Whether what follows the mark of gzip can be decompressed, as far as it is read."""
    data = file.read_at(0, min(_GZIP_LOOK, file.size))
    flags = data[3] if len(data) > 10 else 0xFF
    if flags & 0xE0:
        return False
    at = 10
    if flags & 4:  # an extra field
        at += 2 + int.from_bytes(data[at : at + 2], "little")
    for flag in (8, 16):  # a name, a comment
        at = data.find(b"\0", at) + 1 if flags & flag else at
        if not at:
            return False
    at += 2 if flags & 2 else 0
    zlib = lazy_import("legroom.formats.decompress_deflate").zlib_module()
    stream = zlib.decompressobj(-15)
    try:
        plain = stream.decompress(data[at:], _MOST_PLAIN)
    except zlib.error:
        return False
    tail = stream.unused_data[:8]  # the checksum and the length
    if not stream.eof or len(tail) < 8:
        return bool(plain)
    return bool(struct.unpack("<II", tail) == (zlib.crc32(plain), len(plain)))


def is_zip(file: SourceFile) -> bool:
    """Whether the file has the end of a zip archive."""
    with file.as_stream() as stream:
        return bool(lazy_import("zipfile").is_zipfile(stream))


def stands_in(path: Path) -> Unsupported | None:
    """What is in the place of this file, if it is not itself: for a file whose content is not what it should be."""
    try:
        if not os.path.isfile(path):  # a pipe would be waited for
            return None
        with SourceFile(path) as file:
            return _found(file, [one for one in TYPES if one.stands_in])
    except (OSError, ValueError, LegroomError):
        return None


def unsupported_directory(path: Path) -> Unsupported | None:
    """What a directory is that has no format of datasets: an entry in the cache of Hugging Face, a DCP checkpoint."""
    try:
        if path.name.startswith(("models--", "datasets--")) and (snapshots := os.listdir(path / "snapshots")):
            why = say("it is a repository in the cache of Hugging Face")
            return Unsupported(why, tuple(say("pass {path}", path=path / "snapshots" / one) for one in snapshots[:3]))
        if (path / ".metadata").is_file() and any(name.endswith(".distcp") for name in os.listdir(path)):
            names = shlex.join((str(path), f"{path}.pt"))
            command = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {names}"
            return Unsupported(
                say("it is a distributed checkpoint of torch (DCP)"),
                (say("convert it to one file:\n{command}", command=command),),
            )
    except OSError:
        return None
    return None


def _found(file: SourceFile, types: list[FileType] | tuple[FileType, ...], by_name: bool = True) -> Unsupported | None:
    head = file.read_at(0, min(_LOOK, file.size))
    for one in types:
        if one.marks and not one.marked(head):
            continue
        facts = one.facts(file, head) if one.facts is not None else _NO_FACTS if one.marks else None
        if facts is not None:
            return one.told(file.path, facts)
    name = file.path.name.lower()
    for one in types if by_name else ():
        if name.endswith(one.endings):  # an empty tuple ends no name
            return replace(one.told(file.path, _NO_FACTS), by_name=True)
    return None


# What decides beyond a mark.


def _lfs_pointer(file: SourceFile, head: bytes) -> Facts | None:
    oid, size = re.search(rb"^oid (\S+)", head, re.M), re.search(rb"^size (\d{1,18})$", head, re.M)
    if oid is None or size is None:
        return None
    return {"oid": oid[1].decode("utf-8", "replace"), "size": format_size(int(size[1])), "bytes": int(size[1])}


def _html_page(file: SourceFile, head: bytes) -> Facts | None:
    start = _stripped(head).lower()
    if file.path.suffix in (".html", ".htm") or not start.startswith(
        (b"<!doctype html", b"<html", b"<head", b"<title")
    ):
        return None
    title = re.search(rb"<title[^>]*>(.*?)</title", file.read_at(0, min(_PAGE, file.size)), re.S | re.I)
    return {"text": _one_line(unescape(title[1].decode("utf-8", "replace"))) if title else say("without a title")}


def _xml_error(file: SourceFile, head: bytes) -> Facts | None:
    text = _stripped(head).decode("utf-8", "replace")
    if not text.startswith("<") or not re.match(r"(<\?xml[^>]*>\s*)?<Error\b", text):
        return None
    parts = [re.search(f"<{part}>(.*?)</{part}>", text, re.S) for part in ("Code", "Message")]
    return {"text": _one_line(": ".join(unescape(part[1]) for part in parts if part)) or _one_line(text)}


def _short_answer(file: SourceFile, head: bytes) -> Facts | None:
    """One line of text, or a JSON object, in a file that is named as data."""
    if file.size > _MOST_ANSWER or not file.path.name.lower().endswith(_DATA):
        return None
    try:
        text = head.decode("utf-8").strip()
    except UnicodeDecodeError:
        return None
    error = text.startswith("{") and re.search(r'"(error|errors|message|detail|details|code|status)"\s*:', text)
    sentence = "\n" not in text and text[:1].isalpha() and text.isprintable()
    return {"text": _one_line(text)} if error or sentence else None


def _empty_tar(file: SourceFile, head: bytes) -> Facts | None:
    if not file.path.name.lower().endswith(".tar") or not 1024 <= file.size <= _MOST_EMPTY_TAR or file.size % 512:
        return None
    return None if any(head) or any(file.read_at(0, file.size)) else {"count": file.size}


def _zeros(file: SourceFile, head: bytes) -> Facts | None:
    return {"count": len(head)} if len(head) >= 512 and not any(head) else None


def _pickle(file: SourceFile, head: bytes) -> Facts | None:
    return _NO_FACTS if len(head) > 1 and 2 <= head[1] <= 5 else None  # the protocol


def _named(*endings: str) -> Callable[[SourceFile, bytes], Facts | None]:
    return lambda file, head: _NO_FACTS if file.path.name.lower().endswith(endings) else None


def _onnx(file: SourceFile, head: bytes) -> Facts | None:
    """Protobuf has no magic number: field 1 is the version of ONNX, field 2 the name of its producer."""
    version, producer = head[1:2], head[4 : 4 + head[3]] if len(head) > 8 else b""
    if not version or not 1 <= version[0] <= 30 or head[2:3] not in (b"\x12", b"\x3a", b"\x42"):
        return None
    return _NO_FACTS if file.path.suffix == ".onnx" or (head[2:3] == b"\x12" and producer.isalnum()) else None


def _tfrecord(file: SourceFile, head: bytes) -> Facts | None:
    """A record is its length, the masked CRC-32C of the length, the data and their CRC."""
    if len(head) < 16:
        return None
    length, stored = struct.unpack("<QI", head[:12])
    crc = 0xFFFFFFFF
    for byte in head[:8]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return _NO_FACTS if masked == stored and length <= file.size - 16 else None


def _idx(file: SourceFile, head: bytes) -> Facts | None:
    """The format of MNIST: big-endian lengths, and exactly as many bytes after them."""
    dtype = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}.get(head[2] if len(head) > 4 else 0)
    if dtype is None or not 1 <= head[3] <= 4 or len(head) < 4 + 4 * head[3]:
        return None
    shape = struct.unpack(f">{head[3]}I", head[4 : 4 + 4 * head[3]])
    start = 4 + 4 * len(shape)
    if start + prod(shape) * int(dtype[2]) != file.size:
        return None
    read = f"numpy.fromfile({{path}}, {dtype!r}, offset={start}).reshape({shape})"
    return {"code": f"import numpy\nnumpy.save({{out.npy}}, {read})"}


def _bitmap(file: SourceFile, head: bytes) -> Facts | None:
    return _NO_FACTS if int.from_bytes(head[2:6], "little") == file.size else None


def _stripped(head: bytes) -> bytes:
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SHOWN else line[: _MOST_SHOWN - 1] + "…"


# The table. What stands in for another file comes first; names are asked in the same order.

_DATA = (
    ".npy", ".npz", ".h5", ".hdf5", ".safetensors", ".parquet", ".arrow", ".feather", ".pt", ".pth", ".ckpt", ".bin",
    ".tar", ".zip", ".gz", ".zst", ".mds", ".mdb", ".nc", ".mat", ".pkl", ".onnx", ".gguf", ".idx",
)  # fmt: skip
_PARTIAL = (
    ".part", ".partial", ".incomplete", ".crdownload", ".download", ".opdownload", ".filepart", ".aria2", ".crswap",
    ".tmp",
)  # fmt: skip
_DOWNLOAD = (
    phrase("open its address in a browser: it may need a login, or not be there (404)"),
    phrase("download it again so that an error is not saved as the file: curl -fL -o {file} ADDRESS"),
)
_IMAGES = (
    phrase("for images by class, pass the directory that has one subdirectory per class"),
    phrase("for other images, put them into a WebDataset tar:\ntar -cf out.tar {path}"),
)
_MEDIA = (
    phrase("keep such files as they are in a WebDataset tar, and decode them in the dataset:\ntar -cf out.tar {path}"),
)
_MODEL = (phrase("use the safetensors files of the model, or its torch checkpoint"),)
_DECOMPRESS = (phrase("decompress it first: {command} {path}"),)
_WHOLE = phrase("the whole file is compressed with {name}")
_ADVISED = phrase("write its samples with its own library to one of the formats that are read")
_NETCDF = phrase("convert it to netCDF 4, which is HDF5: nccopy -k nc4 {path} out.nc")


def _python(name: str, modules: str, code: str, *marks: bytes, **more: Any) -> FileType:
    return FileType(name, marks, code=f"import {modules}\n{code}", converts=True, **more)


TYPES = (
    FileType(
        marks=(b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/"),
        facts=_lfs_pointer,
        why=phrase("it is a Git LFS pointer, not the file: that one has {size} ({bytes} bytes) and the oid {oid}"),
        fix=(phrase("fetch the files in the clone:\ncd {folder} && git lfs install && git lfs pull"),),
        stands_in=True,
        never_tokens=True,
    ),
    FileType(
        marks=(b"/annex/objects/", b"../.git/annex/objects/", b".git/annex/objects/"),
        why=phrase("it is a git-annex pointer, not the file"),
        fix=(phrase("fetch it in the clone:\ngit annex get {path}"),),
        stands_in=True,
        never_tokens=True,
    ),
    FileType(
        facts=_html_page,
        why=phrase("it is an HTML page that a server sent instead of the file: {text}"),
        fix=_DOWNLOAD,
        stands_in=True,
    ),
    FileType(
        facts=_xml_error,
        why=phrase("it is an error that a server sent instead of the file: {text}"),
        fix=_DOWNLOAD,
        stands_in=True,
    ),
    FileType(
        facts=_short_answer,
        why=phrase("its whole content is this text, which may be the answer of a server: {text}"),
        fix=_DOWNLOAD,
        stands_in=True,
    ),
    FileType(
        facts=_empty_tar,
        why=phrase("it is a tar archive without files: all of its {count} bytes are zeros"),
        fix=(
            phrase("write files into it; if it is a download that has only reserved its space, wait for it"),
        ),
    ),
    FileType(
        facts=_zeros,
        why=phrase("its first {count} bytes are zeros"),
        fix=(phrase("it may be a download that has only reserved its space: wait for it, or download the file again"),),
        may_be_tokens=True,
    ),
    FileType(
        marks=(b"\x00\x05\x16\x07", b"\x00\x05\x16\x00"),
        why=phrase("it has what macOS keeps beside a file (AppleDouble), not the file's data"),
        fix=(phrase("pass the file without ._ before its name, and remove these:\nfind {folder} -name '._*' -delete"),),
        stands_in=True,
    ),
    FileType(
        endings=_PARTIAL,
        why=phrase("by its name it is part of a download, or is still being written"),
        fix=(phrase("wait until it is complete, or download the file again"),),
        stands_in=True,
    ),
    FileType(
        marks=(b"\xde\xc0\xef\xbe",),
        endings=(".lock", ".lck", "-lock"),
        why=phrase("it is a lock file without data"),
        fix=(phrase("pass the data file or directory that it belongs to"),),
        stands_in=True,
    ),
    FileType(
        marks=(b"\x00\x00\x00\x01Bud1", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
        facts=lambda file, head: _NO_FACTS if head[0] == 0 or file.path.name.lower() == "thumbs.db" else None,
        why=phrase("it has settings of a file manager, not data"),
        fix=(phrase("leave it out"),),
        stands_in=True,
    ),
    FileType(
        endings=(".safetensors.index.json", ".bin.index.json"),
        why=phrase("it is the index of a model in several files"),
        fix=(phrase("pass its directory:\nlegroom.weights('{directory}')"),),
    ),
    FileType(
        endings=(".dvc",),
        why=phrase("it is a DVC pointer, not the file"),
        fix=(phrase("fetch it, then pass the file of the same name without .dvc:\ndvc pull {path}"),),
    ),
    FileType(
        endings=(".py", ".ipynb", ".sh"),
        why=phrase("it is a program, not data"),
        fix=(phrase("to run it under Legroom: legroom run -- COMMAND …"),),
    ),
    FileType(
        endings=(
            ".md", "readme", "readme.txt", "license", "license.txt", ".gitattributes", ".gitignore", "_success", ".crc",
        ),
        why=phrase("by its name it lies beside the data, but has none"),
        fix=(phrase("leave it out: pass a pattern of the data files, such as '{folder}/*.parquet'"),),
        stands_in=True,
    ),
    # Compressed files and archives.
    _python(
        "CSV (gzip)", "pyarrow.csv, pyarrow.parquet",
        "pyarrow.parquet.write_table(pyarrow.csv.read_csv({path}), {out.parquet})",
        b"\x1f\x8b\x08", facts=_named(".csv.gz"), never_tokens=True,
    ),
    _python(
        "JSON Lines (gzip)", "pyarrow.json, pyarrow.parquet",
        "pyarrow.parquet.write_table(pyarrow.json.read_json(pyarrow.input_stream({path})), {out.parquet})",
        b"\x1f\x8b\x08", facts=_named(".jsonl.gz", ".json.gz"), never_tokens=True,
    ),
    _python(
        "NIfTI (gzip)", "nibabel, numpy", "numpy.save({out.npy}, nibabel.load({path}).get_fdata())",
        b"\x1f\x8b\x08", facts=_named(".nii.gz"), never_tokens=True,
    ),
    FileType("gzip", (b"\x1f\x8b\x08",), why=_WHOLE, fix=_DECOMPRESS, command="gunzip -k", never_tokens=True),
    FileType("bzip2", (b"BZh",), why=_WHOLE, fix=_DECOMPRESS, command="bunzip2 -k", never_tokens=True),
    FileType("xz", (b"\xfd7zXZ\x00",), why=_WHOLE, fix=_DECOMPRESS, command="unxz -k", never_tokens=True),
    FileType("zstd", (b"\x28\xb5\x2f\xfd",), why=_WHOLE, fix=_DECOMPRESS, command="unzstd", never_tokens=True),
    FileType("lz4", (b"\x04\x22\x4d\x18",), why=_WHOLE, fix=_DECOMPRESS, command="unlz4", never_tokens=True),
    _python(
        "Excel", "pandas", "pandas.read_excel({path}).to_parquet({out.parquet})",
        b"PK\x03\x04", facts=_named(".xlsx", ".xlsm"), never_tokens=True,
    ),
    _python(
        "Excel", "pandas", "pandas.read_excel({path}).to_parquet({out.parquet})",
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", facts=_named(".xls"),
    ),
    FileType(
        "zip",
        ZIP,
        why=phrase("it is a zip archive without .npy members"),
        fix=(phrase("extract it and pass one of its files"),),
        converts=True,
        never_tokens=True,
    ),
    FileType(
        "7z",
        (b"7z\xbc\xaf\x27\x1c",),
        fix=(phrase("extract it and pass one of its files"),),
        converts=True,
        never_tokens=True,
    ),
    FileType("RAR", (b"Rar!\x1a\x07",), fix=(phrase("extract it and pass one of its files"),), converts=True),
    # Images, video, audio, documents.
    FileType("PNG", (b"\x89PNG\r\n",), fix=_IMAGES, converts=True, never_tokens=True),
    FileType("JPEG", (b"\xff\xd8\xff",), fix=_IMAGES, converts=True, never_tokens=True),
    FileType("GIF", (b"GIF87a", b"GIF89a"), fix=_IMAGES, converts=True),
    FileType("WebP", (b"WEBP",), 8, fix=_IMAGES, converts=True),
    FileType("BMP", (b"BM",), facts=_bitmap, fix=_IMAGES, converts=True),
    FileType("TIFF", (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+"), fix=_IMAGES, converts=True),
    FileType("MP4", (b"ftyp",), 4, fix=_MEDIA, converts=True),
    FileType("Matroska, WebM", (b"\x1a\x45\xdf\xa3",), fix=_MEDIA, converts=True),
    FileType("AVI", (b"AVI LIST",), 8, fix=_MEDIA, converts=True),
    FileType("WAV", (b"WAVEfmt ",), 8, fix=_MEDIA, converts=True),
    FileType("FLAC", (b"fLaC",), fix=_MEDIA, converts=True),
    FileType("Ogg", (b"OggS",), fix=_MEDIA, converts=True),
    FileType("MP3", (b"ID3\x02", b"ID3\x03", b"ID3\x04"), fix=_MEDIA, converts=True),
    FileType("PDF", (b"%PDF-",), fix=_MEDIA, converts=True, never_tokens=True),
    # Models.
    FileType(
        "",
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",),
        why=phrase("it is a torch checkpoint in the format before torch 1.6, which is not read"),
        code="import torch\n"
        "torch.save(torch.load({path}, map_location='cpu', weights_only=True), {out.new.pt})",
        never_tokens=True,
    ),
    FileType("GGUF", (b"GGUF",), fix=_MODEL, never_tokens=True),
    FileType("GGML", (b"tjgg", b"lmgg", b"fmgg"), fix=_MODEL),
    FileType("ONNX", (b"\x08",), facts=_onnx, fix=_MODEL),
    FileType("TensorFlow Lite", (b"TFL3",), 4, fix=_MODEL),
    # Data of other libraries.
    FileType(
        "pickle",
        (b"\x80",),
        facts=_pickle,
        endings=(".pkl", ".pickle", ".joblib"),
        why=phrase("it looks like a pickle file; reading one runs code"),
        fix=(
            phrase("if you trust it, load it in Python: keep its lists and dicts with legroom.freeze, "
                   "its arrays with numpy.savez"),
        ),
        converts=True,
        may_be_tokens=True,
    ),
    _python(
        "SQLite", "pandas, sqlite3",
        "pandas.read_sql('SELECT * FROM TABLE', sqlite3.connect({path})).to_parquet({out.parquet})",
        b"SQLite format 3", never_tokens=True,
    ),
    FileType("TFRecord", facts=_tfrecord, fix=(_ADVISED,), converts=True),
    _python(
        "DICOM", "numpy, pydicom", "numpy.save({out.npy}, pydicom.dcmread({path}).pixel_array)", b"DICM", at=128
    ),
    _python(
        "NIfTI", "nibabel, numpy", "numpy.save({out.npy}, nibabel.load({path}).get_fdata())",
        b"n+1\x00", b"ni1\x00", at=344,
    ),
    _python(
        "ORC", "pyarrow.orc, pyarrow.parquet",
        "pyarrow.parquet.write_table(pyarrow.orc.read_table({path}), {out.parquet})", b"ORC",
    ),
    FileType("Avro", (b"Obj\x01",), fix=(_ADVISED,), converts=True),
    FileType("IDX", (b"\x00\x00",), facts=_idx, converts=True),
    FileType(
        marks=(b"MATLAB 5",),
        why=phrase("it is a MATLAB 5 file"),
        fix=(phrase("save it in MATLAB with -v7.3, which is HDF5"),),
        code="import numpy, scipy.io\n"
        "arrays = scipy.io.loadmat({path})\n"
        "numpy.savez({out.npz}, **{k: arrays[k] for k in arrays if k[0] != '_'})",
        converts=True,
        never_tokens=True,
    ),
    FileType(
        marks=(b"FEA1",),
        why=phrase("it is Feather version 1"),
        fix=(phrase("rewrite it: pyarrow.feather.write_feather(table, path)"),),
        never_tokens=True,
        converts=True,
    ),
    FileType(
        marks=(b"PARE",),
        why=phrase("it is Parquet with an encrypted footer"),
        fix=(phrase("write it without encryption"),),
        never_tokens=True,
        converts=True,
    ),
    FileType(
        marks=(b"CDF\x01", b"CDF\x02"), why=phrase("it is netCDF 3"), fix=(_NETCDF,), never_tokens=True, converts=True
    ),
    FileType("ELF", (b"\x7fELF",), converts=True, never_tokens=True),
    FileType("XML", (b"<?xml", b"\xef\xbb\xbf<?xml"), fix=(_ADVISED,), converts=True),
    FileType(
        "HTML",
        (b"<!doctype html", b"<!DOCTYPE html", b"<!DOCTYPE HTML", b"<html", b"<HTML"),
        fix=(_ADVISED,),
        converts=True,
    ),
)  # fmt: skip
