"""WebDataset shards: which files form a sample, what is refused, and what hostile headers cost."""

from __future__ import annotations

import gzip
import io
import random
import sys
import tarfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import legroom
from legroom.errors import DamagedSource, LegroomError, NoRoom, SourceChanged, UnknownFormat, UnsupportedData
from legroom.formats import gather_byte_ranges
from legroom.formats.decoding_memory_budget import UNLIMITED, Allowed, DecodingMemory
from legroom.formats.detect import open_source
from legroom.formats.file_reads_and_errors import SourceFile
from legroom.formats.tar_members import members
from legroom.formats.tar_reader import split_name

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))
from archive_samples import read_webdataset, samples, write_tar

BLOCK = 512


def read(path: Path, keys: Any = None, memory: DecodingMemory = UNLIMITED) -> dict[str, list[bytes]]:
    """The rows of every column."""
    found = {}
    with open_source(path, keys, memory) as reader:
        for spec in reader.describe().items:
            out: Any = np.empty(spec.shape, spec.dtype)  # type: ignore[union-attr]
            reader.read_into(spec.name, out)
            found[spec.name] = out
    names = [name.removesuffix("/offsets") for name in found if name.endswith("/offsets")]
    return {
        name: [
            found[f"{name}/values"][a:b].tobytes()
            for a, b in zip(found[f"{name}/offsets"], found[f"{name}/offsets"][1:], strict=False)
        ]
        for name in names
    }


def header(
    name: bytes, size: bytes | int, kind: bytes = b"0", magic: bytes = b"ustar\x0000", prefix: bytes = b""
) -> bytes:
    size = b"%011o\0" % size if isinstance(size, int) else size
    block = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size + b"0" * 11 + b"\0" + b" " * 8 + kind
    block = (block.ljust(257, b"\0") + magic).ljust(345, b"\0") + prefix
    block = block.ljust(BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def member(name: bytes, data: bytes, kind: bytes = b"0", **fields: Any) -> bytes:
    return header(name, len(data), kind, **fields) + data + b"\0" * (-len(data) % BLOCK)


def pax(records: dict[str, str], kind: bytes = b"x") -> bytes:
    text = b""
    for key, value in records.items():
        body = f" {key}={value}\n".encode()
        length = len(body) + 1
        while len(str(length)) + len(body) != length:
            length = len(str(length)) + len(body)
        text += str(length).encode() + body
    return member(b"PaxHeader", text, kind)


END = b"\0" * (2 * BLOCK)


@pytest.fixture
def tar(tmp_path: Path) -> Any:
    def write(*parts: bytes, end: bytes = END) -> Path:
        (tmp_path / "x.tar").write_bytes(b"".join(parts) + end)
        return tmp_path / "x.tar"

    return write


# Samples.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jpg", ("a", "jpg")),
        ("a/b.SEG.Png", ("a/b", "seg.png")),
        ("a.b/c.d.e", ("a.b/c", "d.e")),
        ("a", (None, "")),
        ("a.b/c", (None, "")),
        (".hidden", (None, "")),
        ("a/.hidden", ("a/", "hidden")),
        ("a.b/.hidden", (None, "")),
        ("/.x", ("/", "x")),
        ("a.", ("a", "")),
        ("__meta__.json", ("__meta__", "json")),
        ("__meta__", (None, "")),
        ("__a.b__", (None, "")),
        ("__meta__/a.jpg", (None, "")),
        ("x/__meta__/a.jpg", ("x/__meta__/a", "jpg")),
        ("___/a.jpg", ("___/a", "jpg")),
    ],
)
def test_a_name_is_split_at_the_first_dot_of_its_last_component(name: str, expected: Any) -> None:
    assert split_name(name) == expected


def test_names_are_split_as_the_webdataset_package_does() -> None:
    tariterators = pytest.importorskip("webdataset.tariterators")

    @settings(max_examples=3000, database=None, derandomize=True)
    @given(name=st.text("ab./_ÄB", max_size=12))
    def check(name: str) -> None:
        key, column = split_name(name)
        if key is None and name.startswith("__"):
            return  # the package's other functions skip these
        prefix, suffix = tariterators.base_plus_ext(name)
        assert (key, column) == (prefix, "" if suffix is None else suffix.lower())

    check()


def test_the_samples_are_those_of_the_webdataset_package(tmp_path: Path) -> None:
    tariterators = pytest.importorskip("webdataset.tariterators")
    files = [*samples(30, 50_000), ("README", b"no dot"), ("__info__.txt", b"x"), ("__x__/a.jpg", b"skipped")]
    del files[-2]
    path = write_tar(tmp_path / "x.tar", files)
    with path.open("rb") as stream:
        opened = [{"url": "x", "stream": stream}]
        expected = list(tariterators.group_by_keys(tariterators.tar_file_expander(opened)))
    found = read(path)
    assert [one["__key__"].encode() for one in expected] == found["__key__"]
    for column in ("jpg", "cls", "seg.png"):
        assert [one[column] for one in expected] == found[column]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_read_as_tarfile_reads_them_and_links_of_no_sample_are_skipped(
    tmp_path: Path, format: int
) -> None:
    folder = "directory/" * (10 if format == tarfile.USTAR_FORMAT else 60)
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=format) as archive:
        for kind, name in ((tarfile.DIRTYPE, "d.jpg"), (tarfile.SYMTYPE, "s"), (tarfile.LNKTYPE, "l")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "y" * (150 if format != tarfile.USTAR_FORMAT else 50)
            archive.addfile(info)
        for number in range(3):
            for column in ("jpg", "txt"):
                name = f"{folder}ä{number}.{column}"
                info = tarfile.TarInfo(name)
                info.size = len(name)
                archive.addfile(info, io.BytesIO(name.encode()))
    expected = read_webdataset(path)
    found = read(path)
    assert b"".join(found["jpg"]) == expected["jpg/values"].tobytes()
    assert found["__key__"] == [f"{folder}ä{number}".encode() for number in range(3)]


def link(name: str, target: str, kind: bytes = tarfile.LNKTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def file(name: str, data: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info, data


def write_members(path: Path, format: int, *members: Any) -> Path:
    with tarfile.open(path, "w", format=format) as archive:
        for one in members:
            info, data = one if isinstance(one, tuple) else (one, b"")
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_links_to_files_of_the_archive_are_these_files_as_tarfile_reads_them(tmp_path: Path, format: int) -> None:
    long = "directory/" * (9 if format == tarfile.USTAR_FORMAT else 30)
    path = write_members(
        tmp_path / "x.tar", format,
        file(f"{long}ä0.jpg", b"old"), file(f"{long}ä0.cls", b"0"),
        link("a/1.jpg", f"{long}ä0.jpg"), file("a/1.cls", b"1"),
        link("a/2.jpg", "../z/9.jpg", tarfile.SYMTYPE), link("a/2.cls", "1.cls", tarfile.SYMTYPE),
        link("./a/3.jpg", "a//2.jpg"), link("./a/3.cls", "./a/2.cls"),
        link("without_a_dot", "nowhere"),
        file("z/9.jpg", b"first of that name"), file("z/9.cls", b"9"),
        link("y/8.jpg", "../latest", tarfile.SYMTYPE), file("y/8.cls", b"8"),
        file("z/9.jpg", b"last"), file("z/9.cls", b""),
        link("latest", "z/9.jpg"),
    )  # fmt: skip
    expected: dict[str, list[bytes]] = {"jpg": [], "cls": []}
    with tarfile.open(path) as archive:
        for one in archive.getmembers():
            if column := split_name(one.name)[1]:
                opened = archive.extractfile(one)
                assert opened is not None
                expected[column].append(opened.read())
    found = read(path)
    assert {name: found[name] for name in expected} == expected
    assert expected["jpg"] == [b"old", b"old", b"last", b"last", b"first of that name", b"last", b"last"]
    assert found["__key__"][2:5] == [b"a/2", b"./a/3", b"z/9"]
    data = legroom.open(path)
    assert [bytes(row) for row in data["jpg"]] == expected["jpg"]


@pytest.mark.parametrize(
    ("links", "why"),
    [
        ([link("k.jpg", "nowhere.jpg")], r"'k'.*\n?.*'k.jpg' is a link: its target 'nowhere.jpg' is not in"),
        ([link("k.jpg", "later.jpg")], "'later.jpg' is not in the archive"),
        ([link("k.jpg", "/j.jpg", tarfile.SYMTYPE)], "'/j.jpg' is not in the archive"),
        ([link("k.jpg", "../j.jpg", tarfile.SYMTYPE)], "'../j.jpg' is not in the archive"),
        ([link("k.jpg", "")], "'' is not in the archive"),
        ([link("k.jpg", "k.jpg", tarfile.SYMTYPE)], "leads back to itself"),
        ([link("k.jpg", "k.jpg")], "'k.jpg' is not in the archive"),
        ([link("k.jpg", "b", tarfile.SYMTYPE), link("b", "c", tarfile.SYMTYPE), link("c", "b", tarfile.SYMTYPE)],
         "leads back to itself"),
        ([link("pipe", "", tarfile.FIFOTYPE), link("k.jpg", "pipe")], "'pipe' is not a regular file"),
    ],
)  # fmt: skip
def test_a_link_that_leads_to_no_file_of_the_archive_is_refused_with_the_reason(
    tmp_path: Path, links: list[Any], why: str
) -> None:
    start = [file("j.jpg", b"j"), file("j.cls", b"1")]
    path = write_members(
        tmp_path / "x.tar", tarfile.PAX_FORMAT, *start, *links, file("k.cls", b"2"), file("later.jpg", b"3")
    )
    with pytest.raises(UnsupportedData, match=why) as caught:
        read(path)
    assert "--hard-dereference" in caught.value.fix[0]


def test_links_that_need_not_be_read_are_no_reason_to_refuse(tmp_path: Path) -> None:
    directory = tarfile.TarInfo("data")
    directory.type = tarfile.DIRTYPE
    path = write_members(
        tmp_path / "x.tar", tarfile.GNU_FORMAT, directory,
        file("j.jpg", b"j"), file("j.cls", b"1"), link("j.cls", "j.cls"),  # tar was given it twice
        link("v1.0", "data", tarfile.SYMTYPE), link("readme", "nowhere"),
        link("k.jpg", "nowhere"), file("k.cls", b"2"),
    )  # fmt: skip
    assert read(path, ["cls"]) == {"cls": [b"1", b"2"]}
    with pytest.raises(UnsupportedData, match="nowhere"):
        read(path)


def test_many_links_cost_little_and_their_memory_is_counted(tmp_path: Path) -> None:
    count = 3000
    chain = [link(f"{number}.jpg", f"{number + 1}.jpg", tarfile.SYMTYPE) for number in range(count)]
    path = write_members(tmp_path / "x.tar", tarfile.GNU_FORMAT, *chain, file(f"{count}.jpg", b"end"))
    started = time.process_time()
    assert read(path)["jpg"] == [b"end"] * (count + 1)
    assert time.process_time() - started < 30  # not every link by every other
    with pytest.raises(NoRoom):
        read(path, memory=DecodingMemory(lambda: Allowed(count * 100, "here")))


def test_a_key_that_comes_again_later_is_another_sample(tar: Any) -> None:
    path = tar(*(member(name + b".a", name) for name in (b"x", b"y", b"x")))
    assert read(path)["__key__"] == [b"x", b"y", b"x"]  # as in webdataset


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([b"k.jpg", b"k.JPG"], r"'k'.*\n?.*two files '.jpg'"),
        ([b"j.jpg", b"j.cls", b"k.jpg"], r"'k'.*\n?.*no '.cls', which sample 'j' has"),
        ([b"j.jpg", b"k.jpg", b"k.cls"], r"'j'.*\n?.*no '.cls', which sample 'k' has"),
        ([b"j.cls", b"k.jpg"], r"sample 'k'|sample 'j'"),
        ([b"k."], r"sample 'k'"),
        ([b"k.__url__"], r"sample 'k'"),
    ],
)
def test_what_webdataset_refuses_or_a_ragged_array_cannot_hold_is_refused_with_the_key(
    tar: Any, names: list[bytes], why: str
) -> None:
    with pytest.raises(UnsupportedData, match=why):
        read(tar(*(member(name, b"1") for name in names)))


@pytest.mark.parametrize(
    ("names", "key", "first", "other", "second"),
    [
        ("a.jpg b.jpg a.cls b.cls", "a", "a.jpg", "b.jpg", "a.cls"),
        ("a.jpg a.cls b.jpg c.jpg c.cls b.cls", "b", "b.jpg", "c.jpg", "b.cls"),
        ("a.jpg a.txt b.jpg b.txt b.cls a.cls", "a", "a.txt", "b.jpg", "a.cls"),
        ("a.jpg README b.jpg b.cls a.cls", "a", "a.jpg", "b.jpg", "a.cls"),
    ],
)
@pytest.mark.parametrize("keys", [None, ["cls"]])
def test_files_of_a_sample_that_do_not_follow_one_another_are_named(
    tar: Any, names: str, key: str, first: str, other: str, second: str, keys: list[str] | None
) -> None:
    with pytest.raises(UnsupportedData, match=f"sample '{key}'") as caught:
        read(tar(*(member(name.encode(), b"1") for name in names.split())), keys)
    assert f"'{other}' of another sample is between '{first}' and '{second}'" in caught.value.why
    assert "tar --sort=name" in caught.value.fix[0]


def test_a_sample_that_comes_twice_and_lacks_a_column_both_times_is_refused_for_that(tar: Any) -> None:
    for names in ("a.jpg b.jpg b.cls a.jpg", "a.jpg b.jpg b.cls"):
        with pytest.raises(UnsupportedData, match=r"sample 'a'.*\n?.*no '.cls', which sample 'b' has"):
            read(tar(*(member(name.encode(), b"1") for name in names.split())))


def test_files_that_do_not_follow_one_another_are_named_in_an_archive_that_is_cut_later_on(tar: Any) -> None:
    damaged = tar(member(b"a.jpg", b"1"), member(b"b.jpg", b"1"), member(b"a.cls", b"1"), member(b"b.cls", b"1"))
    damaged.write_bytes(damaged.read_bytes()[:-600])  # what comes after the refused sample cannot be read
    with pytest.raises(UnsupportedData, match=r"'b\.jpg' of another sample is between"):
        read(damaged)


def test_keys_leave_out_what_some_samples_lack(tar: Any) -> None:
    path = tar(*(member(name, name) for name in (b"j.jpg", b"j.txt", b"k.jpg", b"l.jpg", b"l.txt", b"l.x")))
    assert read(path, ["jpg"]) == {"jpg": [b"j.jpg", b"k.jpg", b"l.jpg"]}
    assert read(path, ["__key__"]) == {"__key__": [b"j", b"k", b"l"]}
    with pytest.raises(UnsupportedData, match=r"sample 'k'"):
        read(path, ["txt"])


def test_keys_with_dots_that_make_all_files_one_sample_are_warned_of(
    tar: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tar(*(member(name, b"1") for name in (b"my.photo.1.jpg", b"my.photo.2.jpg")))
    assert list(read(path)) == ["photo.1.jpg", "photo.2.jpg", "__key__"]  # as in webdataset
    assert "one sample 'my' with 2 files: a key ends at the first dot" in caplog.text
    caplog.clear()
    read(tar(*(member(b"%d.%d.jpg" % (row, view), b"1") for row in range(2) for view in range(3))))
    read(tar(member(b"a.left.jpg", b"1"), member(b"a.right.jpg", b"2")))
    assert not caplog.text


def test_an_archive_without_samples_is_refused(tar: Any) -> None:
    with pytest.raises(UnsupportedData, match="has no samples"):
        read(tar(member(b"README", b"x"), member(b"__x__/a.jpg", b"x")))


def test_more_extensions_than_a_dataset_has_are_refused(tar: Any) -> None:
    with pytest.raises(UnsupportedData, match="1000 different extensions"):
        read(tar(*(member(b"k.%d" % number, b"") for number in range(1001))))


# Damage.


def test_a_shard_cut_between_two_files_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", samples(5, 3000))
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        cuts = [*[one.offset for one in archive][1:], len(whole) - 1024, len(whole) - 512]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(DamagedSource, match="truncated"):
            read(path)
    path.write_bytes(whole)
    assert len(read(path)["jpg"]) == 5


def test_zeros_that_fill_the_last_record_are_allowed_and_more_files_are_not(tar: Any) -> None:
    one = member(b"k.a", b"1")
    assert read(tar(one, end=END + b"\0" * 9000))["a"] == [b"1"]
    with pytest.raises(UnsupportedData, match="continues after the end"):
        read(tar(one, END, member(b"l.a", b"2")))
    with pytest.raises(UnsupportedData, match="continues after the end"):
        read(tar(one, end=END + b"\0" * (17 << 20)))


def test_a_changed_byte_in_a_header_is_noticed(tar: Any) -> None:
    good = member(b"j.a", b"1") + member(b"k.a", b"2")
    for at in (0, 130, 500, 1024, 1024 + 130):
        changed = bytearray(good)
        changed[at] ^= 1
        with pytest.raises((DamagedSource, UnknownFormat)):
            read(tar(bytes(changed)))


def test_changed_headers_with_right_checksums_are_refused_or_read_as_tarfile_reads_them(tmp_path: Path) -> None:
    rng = random.Random(3)
    long = [(f"{'directory/' * 12}{number}.a", b"x" * number) for number in range(3)]
    good = [write_tar(tmp_path / "x", long, kind).read_bytes() for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
    good.append(write_tar(tmp_path / "x", samples(2, 700)).read_bytes())
    fields = [range(100), range(124, 136), range(156, 157), range(257, 265), range(345, 360), range(512, 560)]
    same = 0
    for _ in range(1500):
        data = bytearray(rng.choice(good))
        block = rng.choice([at for at in range(0, len(data), BLOCK) if data[at + 257 : at + 262] == b"ustar"])
        data[block + rng.choice(rng.choice(fields))] = rng.choice([*b"\0 ./xLgKS75120", rng.randrange(256)])
        whole = sum(data[block : block + 148]) + sum(data[block + 156 : block + BLOCK]) + 8 * 32
        data[block + 148 : block + 156] = b"%06o\0 " % whole
        (tmp_path / "x").write_bytes(data)
        try:
            with SourceFile(tmp_path / "x") as file:
                read = [(kind, name, file.read_at(start, size)) for kind, name, start, size, _ in members(file)]
            found = [(name, data) for kind, name, data in read if kind == b"0"]
        except LegroomError:
            continue
        with tarfile.open(tmp_path / "x") as archive:
            expected = [(one.name, archive.extractfile(one).read()) for one in archive if one.isreg()]  # type: ignore[union-attr]
        assert found == expected
        same += 1
    assert same > 500


def test_sums_of_signed_bytes_are_accepted(tar: Any) -> None:
    block = bytearray(header("ä.a".encode(), 1))
    signed = sum(byte - 256 if byte > 127 else byte for byte in block[:148] + b" " * 8 + block[156:])
    block[148:156] = b"%06o\0 " % signed
    assert read(tar(bytes(block), b"1".ljust(BLOCK, b"\0")))["a"] == [b"1"]


@pytest.mark.parametrize(
    "size",
    [b"7" * 11 + b"\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"99999999999\0", b"-0000000001\0", b"0x1         "],
)
def test_a_size_that_the_file_does_not_have_costs_nothing(tar: Any, size: bytes) -> None:
    path = tar(header(b"k.a", size), b"1".ljust(BLOCK, b"\0"))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedSource):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_an_extended_header_of_gigabytes_is_refused(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "x.tar"
    with path.open("wb") as file:
        file.write(header(b"PaxHeader", 3 << 30, kind))
        file.truncate(4 << 30)  # a hole
    with pytest.raises(DamagedSource, match="extended header at byte 0"):
        read(path)


def test_records_of_an_extended_header_are_parsed_in_one_pass(tar: Any) -> None:
    def seconds(count: int) -> float:
        path = tar(pax({f"k{number}": "v" for number in range(count)}), member(b"k.a", b"1"))
        began = time.process_time()  # not that of other programs
        assert read(path)["a"] == [b"1"]
        return time.process_time() - began

    seconds(10)
    assert seconds(40_000) < 40 * max(0.02, seconds(2000))  # quadratic: 400 times
    # Global headers are not copied for every file.
    comment = pax({"comment": "c" * 500_000}, b"g")
    files = [member(b"%d.a" % number, b"1") for number in range(2000)]
    began = time.process_time()
    assert len(read(tar(comment, *files))["a"]) == 2000
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "text",
    [b"5 a=", b"99 a=b\n", b"0 a=b\n", b"-1 a=b\n", b"x a=b\n", b"6 ab\n\n", b"999999999999999999999 a=b\n", b"5 =b\n"],
)
def test_records_with_wrong_lengths_are_refused(tar: Any, text: bytes) -> None:
    with pytest.raises(DamagedSource, match="not a list of records"):
        read(tar(member(b"p", text, b"x"), member(b"k.a", b"1")))


@pytest.mark.parametrize(
    "parts",
    [
        [pax({"path": "k.a"}), member(b"L", b"l.a\0", b"L"), member(b"x", b"1")],
        [pax({"path": "k.a"}), pax({"path": "l.a"}), member(b"x", b"1")],
        [pax({"path": "k.a"}, b"g"), member(b"x", b"1")],
        [pax({"size": "1", "path": "k.a"}, b"g"), member(b"x", b"1")],
        [pax({"size": "-1"}), member(b"k.a", b"1")],
        [member(b"k.a", b"1"), member(b"L", b"l.a\0", b"L")],
        [member(b"k.a", b"1", magic=b"\0" * 8, prefix=b"14733561124\0")],
    ],
)
def test_headers_that_programs_read_differently_are_refused(tar: Any, parts: list[bytes]) -> None:
    with pytest.raises(DamagedSource):
        read(tar(*parts))


def test_an_archive_of_gnu_tar_with_more_times_is_refused_in_words(tar: Any) -> None:
    with pytest.raises(UnsupportedData, match="with more times") as caught:
        read(tar(member(b"k.a", b"1", magic=b"ustar  \0", prefix=b"14733561124\0")))
    assert "without -g" in caught.value.fix[0]


def test_the_size_of_an_extended_header_counts(tar: Any) -> None:
    body = b"12345".ljust(BLOCK, b"\0")
    assert read(tar(pax({"size": "5"}), header(b"k.a", 0), body))["a"] == [b"12345"]


@pytest.mark.parametrize(
    "parts",
    [
        [member(b"k.a", b"1", b"S", magic=b"ustar  \0")],
        [pax({"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "k.a"}), member(b"k.a", b"1")],
    ],
)
def test_sparse_files_are_refused_by_name(tar: Any, parts: list[bytes]) -> None:
    with pytest.raises(UnsupportedData, match=r"'k.a' in .* is a sparse file"):
        read(tar(*parts))


@pytest.mark.parametrize("name", [b"\xff\xfe.a", b"k\n.a"])
def test_names_that_are_not_text_are_refused(tar: Any, name: bytes) -> None:
    with pytest.raises(UnsupportedData, match="not text"):
        read(tar(member(name, b"1")))


def test_a_compressed_archive_is_refused_with_the_command(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", samples(2, 100))
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(UnknownFormat, match="gunzip -k"):
        read(tmp_path / "x.tar.gz")


@pytest.mark.parametrize("first", [b"PAR1.a", b"PK\x03\x04.a", b"ARROW1.a"])
def test_an_archive_is_recognized_whatever_its_first_file_is_called_or_holds(tar: Any, first: bytes) -> None:
    body = b"\x89HDF\r\n\x1a\n"  # where HDF5 looks for its signature after a user block
    assert read(tar(member(first, body)))["a"] == [body]


# Memory and reading.


def test_the_list_of_files_is_counted_before_it_is_taken(tmp_path: Path) -> None:
    files = [(f"{number:08d}.a", b"") for number in range(20_000)]
    path = write_tar(tmp_path / "x.tar", files)
    counted = []

    class Counting(DecodingMemory):
        def require(self, nbytes: int, what: str) -> None:
            counted.append(nbytes)

    with open_source(path, memory=Counting()) as reader:
        tracemalloc.start()
        try:
            reader.describe()
            taken, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak <= sum(counted) + (1 << 20)
    assert taken < 60 * len(files)  # 10 million files: 600 MB
    little = DecodingMemory(lambda: Allowed(1 << 20, "a small machine"))
    with pytest.raises(NoRoom, match="the list of files"):
        read(path, memory=little)


def test_reading_counts_its_buffers(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", samples(4, 100))
    allowed = [1 << 30]
    with open_source(path, memory=DecodingMemory(lambda: Allowed(allowed[0], "a small machine"))) as reader:
        size = reader.describe().nbytes
        assert reader.decoding("jpg/values") == gather_byte_ranges.SLAB_MEMORY and size
        allowed[0] = 1 << 20
        time.sleep(0.11)  # the last measurement is stale
        spec: Any = next(one for one in reader.describe().items if one.name == "jpg/values")
        with pytest.raises(NoRoom):
            reader.read_into("jpg/values", np.empty(spec.shape, spec.dtype))


@pytest.mark.parametrize("sizes", [(0, 1, 5), (1 << 20, 3, (1 << 20) + 1), (9 << 20, 0, 17)])
def test_large_small_and_empty_files_are_cut_into_slabs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(gather_byte_ranges, "_MOST_ROWS", 7)
    rng = np.random.default_rng(1)
    files = [(f"{number:04d}.{kind}", rng.bytes(sizes[number % 3] if kind == "a" else number % 4)) for number in range(40 if max(sizes) < 1 << 20 else 6) for kind in ("a", "b")]  # fmt: skip
    path = write_tar(tmp_path / "x.tar", files)
    found = read(path)
    for kind in ("a", "b"):
        assert found[kind] == [data for name, data in files if name.endswith(kind)]
    with open_source(path) as reader:
        slabs = reader.slabs("a/values")
        assert slabs is not None and b"".join(b"".join(slab.decode()) for slab in slabs) == b"".join(found["a"])


# Through the cache.


def test_shards_are_joined_and_their_rows_are_samples(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    every = samples(12, 2000)
    write_tar(tmp_path / "s-0.tar", every[:15])
    write_tar(tmp_path / "s-1.tar", every[15:])
    with legroom.open(tmp_path / "s-*.tar") as data:
        assert set(data) == {"jpg", "cls", "seg.png", "__key__"}
        assert [row.tobytes() for row in data["jpg"]] == [body for name, body in every if name.endswith("jpg")]
        assert list(data["__key__"]) == [f"train/{number:05d}" for number in range(12)]
        assert len(data.dataset()) == 12
        batches = list(data.batches(5, format="numpy"))
        assert [len(batch["jpg"]) for batch in batches] == [5, 5, 2]
        assert batches[1]["jpg"][0].tobytes() == every[15][1]
        assert "jpg/values" not in batches[0]


def test_shards_with_different_extensions_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "s-0.tar", [("a.jpg", b"1"), ("a.txt", b"2")])
    write_tar(tmp_path / "s-1.tar", [("b.jpg", b"3")])
    with pytest.raises(UnsupportedData, match=r"cannot join txt"):
        legroom.open(tmp_path / "s-*.tar")
    with legroom.open(tmp_path / "s-*.tar", keys=["jpg"]) as data:
        assert [row.tobytes() for row in data["jpg"]] == [b"1", b"3"]


def test_more_shards_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = len(list(Path("/proc/self/fd").iterdir())) + 60 if Path("/proc/self/fd").exists() else 256
    for number in range(many):
        write_tar(tmp_path / f"{number:04d}.tar", [(f"{number}.a", b"%d" % number)])
    resource.setrlimit(resource.RLIMIT_NOFILE, (many, limits[1]))
    try:
        with legroom.open(tmp_path / "*.tar") as data:
            assert [int(row.tobytes()) for row in data["a"]] == list(range(many))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_shard_that_is_replaced_is_noticed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("a.a", b"1")])
    with open_source(path) as reader:
        reader.describe()
        time.sleep(0.02)
        path.unlink()
        write_tar(path, [("a.a", b"2")])
        with pytest.raises(SourceChanged):
            reader.read_into("a/values", np.empty(1, np.uint8))


def test_shards_in_remote_storage_are_read(tmp_path: Path) -> None:
    for package in ("fsspec", "aiohttp"):  # torch brings the first
        pytest.importorskip(package)
    from object_server import object_server

    files = samples(20, 30_000)
    body = [write_tar(tmp_path / "x", part).read_bytes() for part in (files[:30], files[30:])]
    with object_server(a__tar=body[0], b__tar=body[1]) as server:
        urls = [server.url("a.tar"), server.url("b.tar")]
        with legroom.open(urls) as data:
            assert [row.tobytes() for row in data["jpg"]] == [data for name, data in files if name.endswith("jpg")]
        with legroom.open(urls[0], keys=["cls"]) as data:
            assert len(data["cls"]) == 10 and list(data) == ["cls"]


def apple_files() -> bytes:
    names = ("d/._a.jpg", "d/a.jpg", "d/._a.cls", "d/a.cls", "d/._b.jpg", "d/b.jpg", "d/b.cls", "._c.jpg")
    return b"".join(member(name.encode(), name.encode()) for name in names) + bytes(2 * BLOCK)


def test_what_macos_writes_beside_files_is_in_no_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "mac.tar"
    path.write_bytes(apple_files())
    with caplog.at_level("INFO", "legroom"):
        found = read(path)
    assert found == {"jpg": [b"d/a.jpg", b"d/b.jpg"], "cls": [b"d/a.cls", b"d/b.cls"], "__key__": [b"d/a", b"d/b"]}
    assert "4 files named ._* are skipped" in caplog.text


def test_the_advice_for_a_lacking_column_is_python(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    names = (b"a.jpg", b"a.cls", b"a.txt", b"b.jpg", b"b.cls")
    path.write_bytes(b"".join(member(name, b"1") for name in names) + bytes(2 * BLOCK))
    with pytest.raises(UnsupportedData) as caught:
        read(path)
    assert caught.value.fix == ("load only what all samples have: keys=['jpg', 'cls']",)
    assert list(read(path, ["jpg", "cls"])) == ["jpg", "cls"]


@pytest.mark.parametrize("names", [("d/.DS_Store", "d/a.jpg"), ("d/a.jpg", "d/.DS_Store"), ("d/a.jpg", "d/.x.y")])
def test_a_hidden_file_is_named_with_the_command_that_leaves_it_out(names: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(b"".join(member(name.encode(), b"1") for name in names) + bytes(2 * BLOCK))
    with pytest.raises(UnsupportedData) as caught:
        read(path)
    assert "'d/' are the files in d/ whose names begin with a dot" in caught.value.why
    assert "--exclude='.[!/]*'" in caught.value.fix[0]
