"""Formats that other packages add by an entry point: read everywhere, never instead of our own, and blamed by name."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doc_pages import blocks_of

import legroom
from legroom.cache.list_and_verify import info
from legroom.cli.main import run
from legroom.errors import DamagedSource, FormatPluginFailed, UnknownFormat, UnreadableSource, UsageError
from legroom.formats.detect import FORMATS, open_source
from legroom.formats.plugin_formats import GROUP

READER = """
import numpy as np
from legroom.formats import ArraySpec, BaseReader, Description, Extent, Format, SourceFile, damaged

SCALE = 1


class PointsReader(BaseReader):
    def __init__(self, path, selection):
        super().__init__(path, selection)
        self.file = SourceFile(path)

    def _describe(self):
        rows = int.from_bytes(self.file.read_at(4, 4), "little")
        if self.file.size != 8 + 12 * rows:
            raise damaged(self.path, f"{rows} rows need {8 + 12 * rows} bytes, it has {self.file.size}")
        return Description("points", (ArraySpec("xyz", (rows, 3), np.dtype("f4")),), {"unit": "m"}, (self.path,))

    def _extent(self, spec):
        return Extent(self.path, 8, spec.nbytes) if SCALE == 1 else None

    def _read(self, spec, out, progress):
        self.file.read_into(8, memoryview(out).cast("B"))
        out *= SCALE
        progress(spec.nbytes)

    def descriptors(self):
        return [self.file.fileno()]

    def _close(self):
        self.file.close()


FORMAT = Format("points", PointsReader, recognizes=lambda one: one.head.startswith(b"PNTS"), at_offsets=True)
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write a package and its metadata as pip would, into a folder of sys.path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # bytecode of the same second and size would be used again
    modules: set[str] = set()

    def put(text: str, package: str = "acme_points", version: str = "1.0", point: str = "FORMAT") -> None:
        (site / f"{package}.py").write_text(text)
        for old in site.glob(f"{package}-*.dist-info/*"):
            old.unlink()
        info = site / f"{package}-{version}.dist-info"
        for old in site.glob(f"{package}-*.dist-info"):
            old.rmdir()
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{package} = {package}:{point}\n")
        sys.modules.pop(package, None)
        importlib.invalidate_caches()
        modules.add(package)

    yield put
    for name in modules:
        sys.modules.pop(name, None)


def points(folder: Path, rows: int = 50) -> tuple[Path, np.ndarray[Any, Any]]:
    array = np.arange(3 * rows, dtype="f4").reshape(rows, 3)
    path = folder / "data.pts"
    path.write_bytes(b"PNTS" + rows.to_bytes(4, "little") + array.tobytes())
    return path, array


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("shm", "disk"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("LEGROOM_SHM", str(tmp_path / "shm"))
    monkeypatch.setenv("LEGROOM_DIR", str(tmp_path / "disk"))


def test_a_registered_format_is_opened_cached_batched_and_checked(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, array = points(tmp_path)
    with pytest.raises(UnknownFormat):
        legroom.open(path)
    install(READER)
    data = legroom.open(path)
    np.testing.assert_array_equal(data["xyz"], array)
    assert data.info.format == "points" and data.info.attributes == {"unit": "m"}
    batches = list(data.batches(7, shuffle=False, device="cpu", format="numpy"))
    np.testing.assert_array_equal(np.concatenate([batch["xyz"] for batch in batches]), array)
    data.close()
    assert run(["cache", "load", str(path), "--json"]) == 0
    assert '"points"' in capsys.readouterr().out
    assert run(["check", "--data", str(path), "--batch", "4", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)


def test_a_type_of_tokens_does_not_override_a_registered_format(install: Install, tmp_path: Path) -> None:
    path, array = points(tmp_path)
    install(READER)
    with pytest.raises(UsageError, match="dtype='uint8' cannot be used") as caught:
        legroom.open(path, dtype="uint8")
    assert "its format, points, states" in caught.value.why
    install("import no_such_module", "acme_broken")
    path.write_bytes(b"JUNK" + array.tobytes())
    assert len(legroom.open(path, dtype="uint8")["tokens"]) == path.stat().st_size


def test_several_files_and_a_process_without_the_cache(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    (first, array), (second, _) = points(tmp_path), points(tmp_path / "b", 20)
    install(READER)
    assert legroom.open([first, second])["xyz"].shape == (70, 3)
    np.testing.assert_array_equal(legroom.open(first, backing="inplace")["xyz"], array)
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    np.testing.assert_array_equal(legroom.open(first)["xyz"], array)


def test_another_version_of_the_package_has_an_entry_of_its_own(install: Install, tmp_path: Path) -> None:
    path, array = points(tmp_path)
    install(READER)
    first = legroom.open(path)
    install(READER.replace("SCALE = 1", "SCALE = 2"), version="2.0")
    second = legroom.open(path)
    np.testing.assert_array_equal(second["xyz"], 2 * array)
    assert first.info.key != second.info.key and first.info.digest == second.info.digest
    install(READER)
    again = legroom.open(path)
    np.testing.assert_array_equal(again["xyz"], array)
    assert again.info.key == first.info.key


def test_attaching_reads_no_file_again(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    path, array = points(tmp_path)
    os.utime(path, (time.time() - 60, time.time() - 60))
    install(READER)
    ages = [time.time_ns(), time.time_ns() + 5_000_000_000]
    monkeypatch.setattr(time, "time_ns", lambda: ages[-1])  # ctime cannot be set: two seconds must have passed
    legroom.open(path).close()
    monkeypatch.setattr("legroom.cache.elect_builder_and_publish.build", lambda *_, **__: pytest.fail("built again"))
    np.testing.assert_array_equal(legroom.open(path)["xyz"], array)


def test_our_own_formats_are_not_taken_over(install: Install, tmp_path: Path) -> None:
    install("raise RuntimeError('imported')")
    np.save(tmp_path / "a.npy", np.arange(4))
    with open_source(tmp_path / "a.npy") as reader:
        assert reader.describe().format == "npy"
    assert "acme_points" not in sys.modules


BROKEN = {
    "cannot be imported": ("import no_such_module_at_all", "no_such_module_at_all"),
    "another object": ("FORMAT = 3", "not a legroom.formats.Format"),
    "no such object": ("", "FORMAT"),
    "fails to recognize": (READER.replace('one.head.startswith(b"PNTS")', "1 / 0"), "ZeroDivisionError"),
    "another class": (READER.replace('Format("points", PointsReader', 'Format("points", dict'), "TypeError"),
    "fails to describe": (READER.replace("rows = int", "rows = 1 // 0 + int"), "ZeroDivisionError"),
    "another format": (READER.replace('Description("points"', 'Description("npy"'), "registered is 'points'"),
    "objects": (READER.replace('np.dtype("f4")', 'np.dtype("O")'), "no objects"),
    "a shape of floats": (READER.replace("(rows, 3)", "(rows / 1, 3)"), "shape"),
    "not JSON": (READER.replace('{"unit": "m"}', '{"unit": b"m"}'), "JSON"),
    "half of a ragged pair": (READER.replace('"f4"))', '"f4"), ragged="xyz")'), "ragged"),
    "a file elsewhere": (READER.replace("(self.path,))", '(self.path, self.path.parent / "other"))'), "outside"),
    "an extent too long": (READER.replace("Extent(self.path, 8,", "Extent(self.path, 9,"), "ends after the file"),
    "fails to read": (
        READER.replace("SCALE = 1", "SCALE = 2").replace("out *= SCALE", "raise KeyError('x')"),
        "KeyError",
    ),
}


@pytest.mark.parametrize("text, why", BROKEN.values(), ids=BROKEN)
def test_a_package_that_fails_is_named(text: str, why: str, install: Install, tmp_path: Path) -> None:
    install(text)
    path, _ = points(tmp_path)
    with pytest.raises(FormatPluginFailed, match="acme_points") as caught:
        legroom.open(path)
    assert why in caught.value.why
    assert any("pip uninstall acme_points" in step for step in caught.value.fix)


def test_its_own_errors_and_those_of_callbacks_pass(install: Install, tmp_path: Path) -> None:
    install(READER.replace("SCALE = 1", "SCALE = 2"))
    path, _ = points(tmp_path)
    with open_source(path) as reader:
        (spec,) = reader.describe().items

        def refuse(_: int) -> None:
            raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            reader.read_into("xyz", np.empty(spec.shape, spec.dtype), refuse)  # type: ignore[union-attr]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedSource, match="50 rows need"):
        legroom.open(path)


def test_two_packages_for_one_file_are_refused(install: Install, tmp_path: Path) -> None:
    install(READER)
    install(READER, package="other_points")
    path, _ = points(tmp_path)
    with pytest.raises(FormatPluginFailed, match="several packages") as caught:
        legroom.open(path)
    assert "acme_points" in caught.value.why and "other_points" in caught.value.why


def test_a_broken_package_does_not_disturb_another(install: Install, tmp_path: Path) -> None:
    install("import no_such_module_at_all", package="a_broken_one")
    install(READER)
    path, array = points(tmp_path)
    np.testing.assert_array_equal(legroom.open(path)["xyz"], array)


DIRECTORY = READER.replace("SourceFile(path)", 'SourceFile(path / "data.pts")').replace(
    "recognizes=lambda one: one.head.startswith(b\"PNTS\")",
    'recognizes_directory=lambda path: (path / "data.pts").exists(), directory_files=lambda path: [path / "data.pts"]',
).replace("Extent(self.path,", "Extent(self.path / 'data.pts',")  # fmt: skip


def test_a_directory_of_a_registered_format(install: Install, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    _, array = points(folder)
    with pytest.raises(UnreadableSource):
        legroom.open(folder)
    install(DIRECTORY)
    data = legroom.open(folder)
    np.testing.assert_array_equal(data["xyz"], array)
    (folder / "notes.txt").write_text("not part of the data")
    assert legroom.open(folder).info.key == data.info.key
    install(DIRECTORY.replace("[path /", "[path.parent /"), version="1.1")
    with pytest.raises(FormatPluginFailed, match="acme_points"):
        legroom.open(folder)


def test_our_own_records_are_complete() -> None:
    assert len({one.name for one in FORMATS}) == len(FORMATS)
    for one in FORMATS:
        module, _, name = str(one.reader).partition(":")
        assert hasattr(importlib.import_module(module), name)
        assert one.recognizes or one.recognizes_directory or one.name == "imagefolder"  # by its contents, last of all


def test_the_reader_of_the_page_passes_the_contract_tests(tmp_path: Path) -> None:
    """docs/howto/add-format.md: its package, with the metadata that pip would install, and its test file."""
    for block in blocks_of("docs/howto/add-format.md"):
        if name := block.marks.get("file"):
            (tmp_path / name).write_text(block.text)
            assert name != "points_reader.py" or len(block.text.splitlines()) <= 40
    pytest.importorskip("setuptools")
    build = "import sys\nfrom setuptools import build_meta\nbuild_meta.prepare_metadata_for_build_wheel(sys.argv[1])"
    built = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    (info,) = tmp_path.glob("*.dist-info")
    assert (info / "top_level.txt").read_text().split() == ["points_reader"]
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_points.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout and "failed" not in ran.stdout


def test_a_reader_by_name_is_imported_for_its_first_file(install: Install, tmp_path: Path) -> None:
    install(READER, package="acme_readers", point="NOTHING")
    path, array = points(tmp_path)
    install(
        "from legroom.formats import Format\n"
        'FORMAT = Format("points", "acme_readers:PointsReader", recognizes=lambda one: one.head[:4] == b"PNTS")'
    )
    np.testing.assert_array_equal(legroom.open(path)["xyz"], array)


def _contract(folder: Path, reader: str, test: str = "array") -> str:
    """What pytest prints when the contract runs for the reader of a package, in a process of its own."""
    (folder / "acme_points.py").write_text(reader)
    info = folder / "acme_points-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme_points\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\npoints = acme_points:FORMAT\n")
    (folder / "test_it.py").write_text(CONTRACT)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py", "-k", test],
        cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return ran.stdout


CONTRACT = """
import numpy as np
from legroom.testing import FormatContract, FormatSample

POINTS = np.arange(150, dtype="f4").reshape(50, 3)


def write(folder):
    path = folder / "cloud.pts"
    path.write_bytes(b"PNTS" + len(POINTS).to_bytes(4, "little") + POINTS.tobytes())
    return path


class TestPoints(FormatContract):
    samples = [FormatSample("points", "points", write, lambda path: {"xyz": POINTS}, large=False)]
"""


def test_a_failed_contract_shows_the_values(tmp_path: Path) -> None:
    told = _contract(tmp_path, READER.replace("(rows, 3)", "(rows, 2)"), "specs")
    assert "(50, 2) == (50, 3)" in told


@pytest.mark.parametrize("method", ["_describe", "_read", "descriptors", "_close"])
def test_a_method_that_a_reader_lacks_is_named(method: str, install: Install, tmp_path: Path) -> None:
    left_open = READER.replace(
        "    def descriptors", "    def __del__(self):\n        self.file.close()\n\n    def descriptors"
    )
    install(left_open.replace("SCALE = 1", "SCALE = 2").replace(f"def {method}(", "def other("))
    path, _ = points(tmp_path)
    with pytest.raises(FormatPluginFailed, match="acme_points") as caught:
        legroom.open(path)
    assert caught.value.why == f"NotImplementedError: PointsReader has no method {method}"


def test_a_table_reader_lacks_a_method_too(install: Install, tmp_path: Path) -> None:
    _write_table(tmp_path / "x")
    install(TABLE.replace("def _batches", "def other"))
    with pytest.raises(FormatPluginFailed) as caught:
        legroom.open(tmp_path / "x")
    assert caught.value.why == "NotImplementedError: Reader has no method _batches"


def test_without_pytest_the_contract_says_to_install_it(tmp_path: Path) -> None:
    code = "import sys; sys.modules['pytest'] = None; import legroom.testing"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ModuleNotFoundError: legroom.testing needs pytest, which is not installed: pip install pytest" in ran.stderr


def test_pytest_is_needed_by_nothing_but_the_contract_tests() -> None:
    code = "import sys, legroom, legroom.formats.detect, legroom.cache.find_or_build_entry\nassert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


TABLE = """
import io
import pyarrow as pa
from legroom.formats import Description, Format, TableReader


class Reader(TableReader):
    def _table(self):
        return pa.ipc.open_stream(io.BytesIO(self._file.read_at(4, self._file.size - 4))).read_all()

    def _describe(self):
        table = self._table()
        self.chosen = self._columns(table.schema)
        spec = self._spec(self._schema(), table.num_rows, 2 * table.nbytes + 10_000)
        return Description("tabl", (spec,), {}, (self.path,))

    def _schema(self):
        return self._table().select(self.chosen).schema

    def _batches(self):
        yield from self._table().select(self.chosen).to_batches()


FORMAT = Format("tabl", Reader, recognizes=lambda one: one.head.startswith(b"TABL"))
"""

SLABS = READER.replace("Extent(self.path, 8, spec.nbytes) if SCALE == 1 else None", "None").replace(
    "    def descriptors",
    """    def _slabs(self, spec):
        half = spec.nbytes // 2
        return [Slab(at, half, lambda at=at: iter([memoryview(self.file.read_at(8 + at, half))])) for at in (0, half)]

    def descriptors""",
).replace("SourceFile, damaged", "Slab, SourceFile, damaged")  # fmt: skip


def _write_table(path: Path) -> Any:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"id": list(range(100)), "text": ["x" * i for i in range(100)]})
    with pa.OSFile(str(path), "wb") as file:
        file.write(b"TABL")
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    return table


def test_a_package_may_read_tables(install: Install, tmp_path: Path) -> None:
    table = _write_table(tmp_path / "x")
    install(TABLE)
    assert legroom.open(tmp_path / "x")["table"].equals(table)
    assert legroom.open(tmp_path / "x", keys="id")["table"].column_names == ["id"]
    install(TABLE.replace("2 * table.nbytes + 10_000", "10"), version="1.1")  # it holds more than it states
    with pytest.raises(DamagedSource, match="more than the 10 bytes"):
        legroom.open(tmp_path / "x")


def test_slabs_of_a_package_are_decoded_and_checked(install: Install, tmp_path: Path) -> None:
    path, array = points(tmp_path, rows=1000)
    install(SLABS)
    np.testing.assert_array_equal(legroom.open(path)["xyz"], array)
    install(SLABS.replace("for at in (0, half)", "for at in (0, half + 1)"), version="1.1")
    with pytest.raises(FormatPluginFailed, match="acme_points") as caught:
        legroom.open(path)
    assert "gap" in caught.value.why
    install(SLABS.replace("8 + at, half)", "8 + at, half - 4)"), version="1.2")
    with pytest.raises(FormatPluginFailed, match="acme_points") as caught:
        legroom.open(path)
    assert "4 bytes less" in caught.value.why


def test_a_package_that_is_broken_does_not_keep_image_folders_from_being_read(install: Install, tmp_path: Path) -> None:
    (tmp_path / "x" / "cat").mkdir(parents=True)
    (tmp_path / "x" / "cat" / "1.jpg").write_bytes(b"one")
    (tmp_path / "empty").mkdir()
    install("import no_such_module")
    assert legroom.open(tmp_path / "x").info.format == "imagefolder"
    (tmp_path / "empty" / "what.pts").write_bytes(b"PNTS")
    with pytest.raises(FormatPluginFailed, match="acme_points"):
        legroom.open(tmp_path / "empty")


def _write_token_file(folder: Path) -> Path:
    np.arange(1000, dtype=np.uint16).tofile(folder / "train.bin")
    return folder / "train.bin"


def _write_text(folder: Path) -> Path:
    (folder / "t.txt").write_text("hello world\n" * 40)
    return folder / "t.txt"


def _write_gzip(folder: Path) -> Path:
    (folder / "a.tar.gz").write_bytes(gzip.compress(bytes(1000)))
    return folder / "a.tar.gz"


def _make_empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def _make_mixed(folder: Path) -> Path:
    (folder / "mixed").mkdir()
    np.save(folder / "mixed" / "a.npy", np.arange(3))
    (folder / "mixed" / "notes.csv").write_text("a,b\n")
    return folder / "mixed"


@pytest.mark.parametrize(
    "write, advice",
    [
        (_write_token_file, "dtype='uint16'"),
        (_write_text, "numpy.save"),
        (_write_gzip, "gunzip -k"),
        (_make_empty, "pass a file in it"),
        (_make_mixed, "*.npy"),
    ],
)
def test_a_package_that_is_broken_does_not_hide_what_is_known(
    write: Callable[[Path], Path], advice: str, install: Install, tmp_path: Path
) -> None:
    path = write(tmp_path)
    with pytest.raises((UnknownFormat, UnreadableSource)) as without:
        legroom.open(path)
    install("import no_such_module")
    with pytest.raises((UnknownFormat, UnreadableSource)) as caught:
        legroom.open(path)
    assert any(advice in step for step in caught.value.fix)
    assert caught.value.why == without.value.why and caught.value.fix[:-1] == without.value.fix
    assert "acme_points" in caught.value.fix[-1] and "no_such_module" in caught.value.fix[-1]


def test_a_check_of_a_token_file_beside_a_broken_package_asks_for_the_size(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("import no_such_module")
    for name in ("train.bin", "train.tokens"):
        path = _write_token_file(tmp_path).rename(tmp_path / name)
        assert run(["check", "--data", str(path), "--batch", "4"]) == 2
        told = capsys.readouterr().err
        assert "--sample-bytes 4KB" in told and "acme_points" in told and "dtype" not in told


def test_a_file_of_a_broken_package_may_still_be_one_of_tokens(install: Install, tmp_path: Path) -> None:
    path = _write_token_file(tmp_path).rename(tmp_path / "train.tokens")
    install("import no_such_module")
    with pytest.raises(FormatPluginFailed, match="acme_points") as caught:
        legroom.open(path)
    assert any("dtype='uint16'" in step for step in caught.value.fix)
    assert len(legroom.open(path, dtype="uint16")["tokens"]) == 1000


@pytest.mark.parametrize("whole", ["broken", "uninstalled"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_entries_are_listed_verified_and_dropped_by_path_without_the_package(
    kind: str, whole: str, install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:  # its data may be in other files, which its reader finds
        file["x"] = np.arange(5)
    legroom.open(tmp_path / "a.h5").close()
    folder = tmp_path / "folder"
    folder.mkdir()
    path, _ = points(folder)
    if kind == "directory":
        path = folder
    install(READER if kind == "file" else DIRECTORY)
    legroom.open(path).close()
    key = info(path).key
    install("raise RuntimeError('imported')" if whole == "broken" else READER)
    if whole == "uninstalled":
        for record in (tmp_path / "site").glob("*.dist-info/entry_points.txt"):
            record.unlink()
        importlib.invalidate_caches()
    for verb in ("list", "info", "verify", "drop"):
        assert run(["cache", verb, str(path), "--json"]) == 0, capsys.readouterr()
        told = capsys.readouterr().out
        assert key in told and str(tmp_path / "a.h5") not in told
        if verb == "verify":
            (checked,) = json.loads(told)["entries"]
            assert checked["whole"] and checked["source_state"] == ("same" if kind == "file" else "not-checked")
    assert "acme_points" not in sys.modules or whole == "uninstalled"
