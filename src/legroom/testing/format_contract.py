"""The tests that every data format passes. The values in a failed assertion are shown: pytest rewrites this module.

Subclass FormatContract in a test file, with samples: how to write a file, and what it holds by another way of reading
it. The files are opened as ``legroom.open`` does, so the format must be registered (`legroom.formats.Format`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from legroom.errors import LegroomError, MissingKey
from legroom.formats.base_reader import ArraySpec, BaseReader, TableSpec
from legroom.formats.detect import open_source
from legroom.formats.fill_output_arrays import Array

Arrays = dict[str, Array]
_CUTS = (0.0, 0.001, 0.3, 0.7, 0.999)
_DAMAGES = 24  # files with changed bytes
_MOST_READ = 256 << 20  # bytes that a damaged file may state; a caller that reserves memory refuses more


@dataclass(frozen=True)
class FormatSample:
    """How to write one file, and what a reader must find in it.

    Attributes:
        name: Of the test.
        format: The name of the format, as it is registered.
        write: Writes a file, or a directory, into an empty folder and returns its path.
        arrays: What the file holds, by name, read without Legroom. Ragged data are ``<name>/offsets`` and
            ``<name>/values``.
        table: The file's only table as pyarrow reads it, for a format of tables.
        raw: Arrays whose bytes are in the file as they are in memory: they must have an extent.
        large: Whether the data are so large that reading them to describe the file would show.
        attributes: What the file's description must have among its attributes.
        cut_shows: Whether a cut of the largest file is noticed. False where the format's own library reads on.
        dtype: For a format whose files do not state the type of their numbers: what `legroom.open` is given.
    """

    name: str
    format: str
    write: Callable[[Path], Path]
    arrays: Callable[[Path], Arrays] = lambda _: {}
    table: Callable[[Path], Any] | None = None
    raw: frozenset[str] = field(default_factory=frozenset)
    large: bool = True
    attributes: Mapping[str, Any] = field(default_factory=dict)
    cut_shows: bool = True
    dtype: str | None = None

    def __str__(self) -> str:
        return self.name


def _only(chosen: Callable[[FormatSample], bool]) -> Callable[[Any], Any]:
    """A test for some of the samples."""

    def mark(test: Any) -> Any:
        test.chosen = chosen
        return test

    return mark


_arrays = _only(lambda sample: sample.table is None)
_tables = _only(lambda sample: sample.table is not None)
_large = _only(lambda sample: sample.large)


def read_everything(reader: BaseReader, folder: Path) -> None:
    """Read every array and write every table."""
    description = reader.describe()
    if description.nbytes > _MOST_READ:
        return
    for item in description.items:
        if isinstance(item, ArraySpec):
            reader.extent(item.name)
            reader.read_into(item.name, np.empty(item.shape, item.dtype))
        else:
            reader.write_table(item.name, folder / "out")


def _read(reader: BaseReader, item: ArraySpec | TableSpec) -> Array:
    assert isinstance(item, ArraySpec), f"the table {item.name!r} is read from a file that was cut"
    out: Array = np.empty(item.shape, item.dtype)
    reader.read_into(item.name, out)
    return out


class FormatContract:
    """What every format promises. Each test runs for each of ``samples``."""

    samples: ClassVar[Sequence[FormatSample]] = ()
    _written: ClassVar[dict[str, Path]]  # by the sample's name

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._written = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "sample" in metafunc.fixturenames:
            chosen = getattr(metafunc.function, "chosen", lambda _: True)
            metafunc.parametrize("sample", [one for one in self.samples if chosen(one)], ids=str)

    @pytest.fixture
    def path(self, sample: FormatSample, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The sample's file or directory. It is written once for all tests, and must not be changed."""
        if sample.name not in self._written:
            self._written[sample.name] = sample.write(tmp_path_factory.mktemp(sample.name))
        return self._written[sample.name]

    # Describing.

    def test_it_is_recognised_by_content_alone(self, sample: FormatSample, path: Path, tmp_path: Path) -> None:
        nameless = tmp_path / "x"
        nameless.symlink_to(path)
        with open_source(nameless, dtype=sample.dtype) as reader:
            description = reader.describe()
        assert description.format == sample.format
        assert description.files[0] == nameless
        assert sample.attributes.items() <= dict(description.attributes).items(), description.attributes
        json.dumps(dict(description.attributes), allow_nan=False)

    @_arrays
    def test_the_specs_are_what_the_library_reads(self, sample: FormatSample, path: Path) -> None:
        expected = sample.arrays(path)
        with open_source(str(path), dtype=sample.dtype) as reader:
            specs = {item.name: item for item in reader.describe().items}
        assert set(specs) == set(expected)
        for name, array in expected.items():
            spec = specs[name]
            assert isinstance(spec, ArraySpec)
            assert spec.shape == array.shape, name
            assert spec.dtype == array.dtype.newbyteorder("="), name
            assert spec.dtype.isnative and not spec.dtype.hasobject and spec.dtype.metadata is None
            assert spec.nbytes == array.nbytes
            json.dumps(dict(spec.attributes), allow_nan=False)

    @pytest.mark.skipif(sys.platform != "linux", reason="bytes read are counted by Linux's /proc/self/io")
    @_large
    def test_describing_reads_no_data(self, sample: FormatSample, path: Path) -> None:
        def bytes_read() -> int:
            fields = Path("/proc/self/io").read_text().split()
            return int(fields[fields.index("rchar:") + 1])

        with open_source(path, dtype=sample.dtype) as reader:  # imports and caches
            size = reader.describe().nbytes
        assert size > 1 << 18, f"{sample} has {size} bytes: too few to show whether they are read (large=False)"
        before = bytes_read()
        with open_source(path, dtype=sample.dtype) as reader:
            reader.describe()
        assert bytes_read() - before < size / 4

    # Reading.

    @_arrays
    def test_the_arrays_are_what_the_library_reads(self, sample: FormatSample, path: Path) -> None:
        expected = sample.arrays(path)
        with open_source(path, dtype=sample.dtype) as reader:
            for spec in reader.describe().items:
                assert isinstance(spec, ArraySpec)
                out: Array = np.empty(spec.shape, spec.dtype)
                if spec.dtype == np.uint8:
                    out.fill(85)
                seen: list[int] = []
                reader.read_into(spec.name, out, seen.append)
                np.testing.assert_array_equal(out, expected[spec.name], err_msg=spec.name)
                assert sum(seen) == spec.nbytes, f"progress of {spec.name} adds up to {sum(seen)}, not {spec.nbytes}"
                assert all(step >= 0 for step in seen)

    @_arrays
    def test_an_extent_holds_the_arrays_bytes(self, sample: FormatSample, path: Path) -> None:
        expected = sample.arrays(path)
        found = set()
        with open_source(path, dtype=sample.dtype) as reader:
            for spec in reader.describe().items:
                extent = reader.extent(spec.name)
                if extent is None:
                    continue
                found.add(spec.name)
                raw = extent.path.read_bytes()[extent.offset : extent.offset + extent.nbytes]
                assert raw == np.ascontiguousarray(expected[spec.name]).tobytes(), spec.name
                assert extent.nbytes == spec.nbytes
        assert found >= sample.raw

    @_arrays
    def test_slabs_one_after_the_other_are_the_array(self, sample: FormatSample, path: Path) -> None:
        expected = sample.arrays(path)
        with open_source(path, dtype=sample.dtype) as reader:
            for spec in reader.describe().items:
                slabs = reader.slabs(spec.name)
                if slabs is None:
                    continue
                assert isinstance(spec, ArraySpec)
                assert [slab.start for slab in slabs] == list(np.cumsum([0, *(slab.nbytes for slab in slabs)])[:-1])
                parts = [b"".join(slab.decode()) for slab in slabs]
                assert [len(part) for part in parts] == [slab.nbytes for slab in slabs]
                native = np.ascontiguousarray(expected[spec.name]).astype(spec.dtype)
                assert b"".join(parts) == native.tobytes(), spec.name

    @_tables
    def test_the_table_is_what_the_library_reads(self, sample: FormatSample, path: Path, tmp_path: Path) -> None:
        pa = pytest.importorskip("pyarrow")
        assert sample.table is not None
        expected = sample.table(path)
        seen: list[int] = []
        with open_source(path, dtype=sample.dtype) as reader:
            (spec,) = reader.describe().items
            assert isinstance(spec, TableSpec)
            written = reader.write_table(spec.name, tmp_path / "out.arrow", seen.append)
        assert spec.rows == expected.num_rows
        assert dict(spec.columns) == {part.name: str(part.type) for part in expected.schema}
        assert written == (tmp_path / "out.arrow").stat().st_size == sum(seen)
        assert written <= spec.nbytes
        with pa.memory_map(str(tmp_path / "out.arrow")) as file:
            table = pa.ipc.open_file(file).read_all()
            assert table.equals(expected)
            assert pa.total_allocated_bytes() < table.nbytes or table.nbytes < 1 << 20  # mapped, not copied

    @_tables
    def test_columns_can_be_chosen(self, sample: FormatSample, path: Path, tmp_path: Path) -> None:
        pa = pytest.importorskip("pyarrow")
        assert sample.table is not None
        with open_source(path, dtype=sample.dtype) as whole:
            (spec,) = whole.describe().items
        assert isinstance(spec, TableSpec)
        names = list(spec.columns)
        chosen = [names[0], names[len(names) // 2]] if len(names) > 2 else names[:1]
        with open_source(path, keys=chosen, dtype=sample.dtype) as reader:
            (part,) = reader.describe().items
            assert isinstance(part, TableSpec)
            assert list(part.columns) == chosen
            assert reader.write_table(part.name, tmp_path / "out") <= part.nbytes <= spec.nbytes
        expected = sample.table(path).select(chosen)
        assert pa.ipc.open_file((tmp_path / "out").read_bytes()).read_all().equals(expected)

    # Names.

    def test_keys_choose_items(self, sample: FormatSample, path: Path) -> None:
        with open_source(path, dtype=sample.dtype) as reader:
            names = [item.name for item in reader.describe().items]
        with open_source(path, keys=names[-1], dtype=sample.dtype) as reader:
            assert [item.name for item in reader.describe().items] == names[-1:]
        for group in {name.partition("/")[0] for name in names if "/" in name}:
            below = [name for name in names if name.startswith(group + "/")]
            for key in (group, f"/{group}/"):
                with open_source(path, keys=[key], dtype=sample.dtype) as reader:
                    assert [item.name for item in reader.describe().items] == below

    def test_a_key_that_is_not_there_is_named_with_the_nearest(self, sample: FormatSample, path: Path) -> None:
        with open_source(path, dtype=sample.dtype) as reader:
            item = reader.describe().items[0]
        name = next(iter(item.columns)) if isinstance(item, TableSpec) else item.name
        with (
            pytest.raises(MissingKey) as caught,
            open_source(path, keys=[name, name + "_x"], dtype=sample.dtype) as reader,
        ):
            reader.describe()
        assert repr(name + "_x") in str(caught.value)
        assert any("did you mean" in step and name.partition("/")[0] in step for step in caught.value.fix)

    # Misuse.

    @_arrays
    def test_a_wrong_buffer_is_refused(self, sample: FormatSample, path: Path) -> None:
        with open_source(path, dtype=sample.dtype) as reader:
            spec = max(reader.describe().items, key=lambda item: item.nbytes)
            assert isinstance(spec, ArraySpec)
            good: Array = np.zeros(spec.shape, spec.dtype)
            locked = good.copy()
            locked.flags.writeable = False
            bad = [
                np.zeros((*spec.shape, 2), spec.dtype),
                np.zeros(spec.shape, np.dtype("i1") if spec.dtype != np.dtype("i1") else np.dtype("i2")),
                locked,
            ]
            if good.ndim and good.size > 1:
                bad.append(np.zeros((2 * spec.shape[0], *spec.shape[1:]), spec.dtype)[::2])
            for out in bad:
                with pytest.raises(ValueError, match="cannot read"):
                    reader.read_into(spec.name, out)
            with pytest.raises(TypeError, match="cannot read"):
                reader.read_into(spec.name, b"nothing")  # type: ignore[arg-type]
            reader.read_into(spec.name, good)

    def test_arrays_are_not_tables_nor_tables_arrays(self, sample: FormatSample, path: Path, tmp_path: Path) -> None:
        with open_source(path, dtype=sample.dtype) as reader:
            item = reader.describe().items[0]
            with pytest.raises(TypeError, match="use"):
                if isinstance(item, ArraySpec):
                    reader.write_table(item.name, tmp_path / "no")
                else:
                    reader.read_into(item.name, np.zeros(1))
            with pytest.raises(MissingKey):
                reader.extent("no such thing")

    # Files.

    def test_closing_twice_is_allowed_and_using_it_afterwards_is_not(self, sample: FormatSample, path: Path) -> None:
        reader = open_source(path, dtype=sample.dtype)
        name = reader.describe().items[0].name
        reader.close()
        reader.close()
        with pytest.raises(ValueError, match="was closed"):
            reader.extent(name)

    def test_descriptors_are_those_of_its_files_and_closed_with_it(self, sample: FormatSample, path: Path) -> None:
        files = [path, *path.rglob("*")] if path.is_dir() else [path]
        with open_source(path, dtype=sample.dtype) as reader:
            files += reader.describe().files
            own = {(stats.st_dev, stats.st_ino) for stats in map(os.stat, files)}
            descriptors = list(reader.descriptors())
            found = [os.fstat(one) for one in descriptors]
            noticed = bool(descriptors) or not reader.is_listed_among(b"")  # files that are opened when they are read
            assert noticed, "a file that is replaced while it is read could not be noticed"
            assert {(stats.st_dev, stats.st_ino) for stats in found} <= own
        for one, before in zip(descriptors, found, strict=True):
            try:
                now = os.fstat(one)
            except OSError:
                continue  # closed
            assert not os.path.samestat(now, before), "a file is open after close()"

    def test_nothing_is_written_to_the_source(self, sample: FormatSample, path: Path, tmp_path: Path) -> None:
        def stamps() -> list[tuple[Path, int, int]]:
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            return [(file, file.stat().st_mtime_ns, file.stat().st_size) for file in files]

        before = stamps()
        with open_source(path, dtype=sample.dtype) as reader:
            read_everything(reader, tmp_path)
        assert stamps() == before

    # Damage. What a format cannot notice, because it has no checksums, is read as it is.

    @_only(lambda sample: sample.cut_shows)
    def test_a_file_cut_anywhere_is_an_error_or_the_same_data(
        self, sample: FormatSample, path: Path, tmp_path: Path
    ) -> None:
        copy, largest = _copied(path, tmp_path)
        whole = largest.read_bytes()
        for share in _CUTS:
            largest.write_bytes(whole[: int(len(whole) * share)])
            try:
                with open_source(copy, dtype=sample.dtype) as reader:
                    read_everything(reader, tmp_path)
                    found = {item.name: _read(reader, item) for item in reader.describe().items}
            except LegroomError as problem:
                assert problem.what and problem.why, problem
                continue
            assert copy != largest, f"cut to {share} of its bytes, the file is read without an error"
            expected = sample.arrays(path)  # the codec of a chunk in a directory may not need its last bytes
            for name, array in found.items():
                np.testing.assert_array_equal(array, expected[name], err_msg=f"cut to {share}: {name}")

    def test_a_damaged_file_is_an_error_in_words_or_read(
        self, sample: FormatSample, path: Path, tmp_path: Path
    ) -> None:
        copy, largest = _copied(path, tmp_path)
        whole = largest.read_bytes()
        rng = random.Random(sample.name)
        for _ in range(_DAMAGES):
            changed = bytearray(whole)
            for _ in range(rng.randint(1, 6)):  # half of them in the first bytes, where most formats have a header
                changed[rng.randrange(min(len(whole), 512) if rng.random() < 0.5 else len(whole))] = rng.randrange(256)
            largest.write_bytes(changed)
            try:
                with open_source(copy, dtype=sample.dtype) as reader:
                    read_everything(reader, tmp_path)
            except LegroomError as problem:
                assert problem.what and problem.why, problem


def _copied(path: Path, folder: Path) -> tuple[Path, Path]:
    """A copy that may be damaged, and the largest file in it."""
    copy = folder / "copy"
    if not path.is_dir():
        shutil.copyfile(path, copy)
        return copy, copy
    shutil.copytree(path, copy)
    return copy, max((file for file in copy.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
