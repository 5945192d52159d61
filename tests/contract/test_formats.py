"""What every format promises, checked for all of them alike against the library that wrote the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_samples import SAMPLES, Sample

from legroom.errors import LegroomError, MissingKey
from legroom.formats.base_reader import ArraySpec, TableSpec
from legroom.formats.detect import open_source

ARRAYS = [sample for sample in SAMPLES if sample.table is None]
TABLES = [sample for sample in SAMPLES if sample.table is not None]
FOLDERS = ("zarr-2", "zarr-3", "mds", "mds-gz", "mds-zstd", "imagefolder")
every_format = pytest.mark.parametrize("sample", SAMPLES, ids=str)
every_large_format = pytest.mark.parametrize("sample", [one for one in SAMPLES if one.large], ids=str)
every_single_file = pytest.mark.parametrize("sample", [one for one in SAMPLES if one.name not in FOLDERS], ids=str)
every_array_format = pytest.mark.parametrize("sample", ARRAYS, ids=str)
every_table_format = pytest.mark.parametrize("sample", TABLES, ids=str)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each sample is written once for all tests of this file."""
    made: dict[str, Path] = {}

    def find(sample: Sample) -> Path:
        if sample.name not in made:
            made[sample.name] = sample.write(tmp_path_factory.mktemp(sample.name))
        return made[sample.name]

    return find


@every_format
def test_it_is_recognised_by_content_alone(sample: Sample, path_of: Any, tmp_path: Path) -> None:
    nameless = tmp_path / "x"
    nameless.symlink_to(path_of(sample))
    with open_source(nameless) as reader:
        description = reader.describe()
    assert description.format == sample.format
    assert description.files[0] == nameless


@every_array_format
def test_the_specs_are_what_the_library_reads(sample: Sample, path_of: Any) -> None:
    expected = sample.arrays(path_of(sample))
    with open_source(str(path_of(sample))) as reader:
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


@every_array_format
def test_the_arrays_are_what_the_library_reads(sample: Sample, path_of: Any) -> None:
    expected = sample.arrays(path_of(sample))
    with open_source(path_of(sample)) as reader:
        for spec in reader.describe().items:
            assert isinstance(spec, ArraySpec)
            out = np.full(spec.shape, 85, np.uint8) if spec.dtype == np.uint8 else np.empty(spec.shape, spec.dtype)
            seen: list[int] = []
            reader.read_into(spec.name, out, seen.append)
            np.testing.assert_array_equal(out, expected[spec.name], err_msg=spec.name)
            assert sum(seen) == spec.nbytes
            assert all(step >= 0 for step in seen)


@every_array_format
def test_an_extent_holds_the_arrays_bytes(sample: Sample, path_of: Any) -> None:
    expected = sample.arrays(path_of(sample))
    found = set()
    with open_source(path_of(sample)) as reader:
        for spec in reader.describe().items:
            extent = reader.extent(spec.name)
            if extent is None:
                continue
            found.add(spec.name)
            raw = extent.path.read_bytes()[extent.offset : extent.offset + extent.nbytes]
            assert raw == np.ascontiguousarray(expected[spec.name]).tobytes(), spec.name
            assert extent.nbytes == spec.nbytes
    assert found >= sample.raw


@every_array_format
def test_slabs_one_after_the_other_are_the_array(sample: Sample, path_of: Any) -> None:
    expected = sample.arrays(path_of(sample))
    with open_source(path_of(sample)) as reader:
        for spec in reader.describe().items:
            slabs = reader.slabs(spec.name)
            if slabs is None:
                continue
            assert [slab.start for slab in slabs] == list(np.cumsum([0, *(slab.nbytes for slab in slabs)])[:-1])
            parts = [b"".join(slab.decode()) for slab in slabs]
            assert [len(part) for part in parts] == [slab.nbytes for slab in slabs]
            native = np.ascontiguousarray(expected[spec.name]).astype(spec.dtype)
            assert b"".join(parts) == native.tobytes(), spec.name


@every_table_format
def test_the_table_is_what_the_library_reads(sample: Sample, path_of: Any, tmp_path: Path) -> None:
    import pyarrow as pa

    assert sample.table is not None
    expected = sample.table(path_of(sample))
    seen: list[int] = []
    with open_source(path_of(sample)) as reader:
        (spec,) = reader.describe().items
        assert isinstance(spec, TableSpec)
        written = reader.write_table(spec.name, tmp_path / "out.arrow", seen.append)
    assert spec.rows == expected.num_rows
    assert dict(spec.columns) == {field.name: str(field.type) for field in expected.schema}
    assert spec.attributes["made by"] == "a test"
    assert written == (tmp_path / "out.arrow").stat().st_size == sum(seen)
    assert written <= spec.nbytes
    with pa.memory_map(str(tmp_path / "out.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
        assert table.equals(expected)
        assert pa.total_allocated_bytes() < table.nbytes or table.nbytes < 1 << 20  # mapped, not copied


@every_table_format
def test_columns_can_be_chosen(sample: Sample, path_of: Any, tmp_path: Path) -> None:
    import pyarrow as pa

    assert sample.table is not None
    with open_source(path_of(sample)) as whole:
        everything = whole.describe().nbytes
    with open_source(path_of(sample), keys=["id", "pair"]) as reader:
        description = reader.describe()
        (spec,) = description.items
        assert isinstance(spec, TableSpec)
        assert list(spec.columns) == ["id", "pair"]
        assert reader.write_table(spec.name, tmp_path / "out") <= spec.nbytes < everything / 2
    expected = sample.table(path_of(sample)).select(["id", "pair"])
    assert pa.ipc.open_file((tmp_path / "out").read_bytes()).read_all().equals(expected)


@pytest.mark.skipif(sys.platform != "linux", reason="bytes read are counted by Linux's /proc/self/io")
@every_large_format
def test_describing_reads_no_data(sample: Sample, path_of: Any) -> None:
    def bytes_read() -> int:
        fields = Path("/proc/self/io").read_text().split()
        return int(fields[fields.index("rchar:") + 1])

    path = path_of(sample)
    with open_source(path) as reader:  # imports and caches
        size = reader.describe().nbytes
    assert size > 1 << 18
    before = bytes_read()
    with open_source(path) as reader:
        reader.describe()
    assert bytes_read() - before < size / 4


@every_format
def test_keys_choose_items(sample: Sample, path_of: Any) -> None:
    with open_source(path_of(sample)) as reader:
        names = [item.name for item in reader.describe().items]
    with open_source(path_of(sample), keys=names[-1]) as reader:
        assert [item.name for item in reader.describe().items] == names[-1:]
    if "group/deep/heatmaps" in names:
        below = [name for name in names if name.startswith("group/")]
        for key in ("group", "/group/"):
            with open_source(path_of(sample), keys=[key]) as reader:
                assert [item.name for item in reader.describe().items] == below


@every_format
def test_a_key_that_is_not_there_is_named_with_the_nearest(sample: Sample, path_of: Any) -> None:
    with open_source(path_of(sample)) as reader:
        item = reader.describe().items[0]
    name = next(iter(item.columns)) if isinstance(item, TableSpec) else item.name
    with pytest.raises(MissingKey) as caught, open_source(path_of(sample), keys=[name, name + "_x"]) as reader:
        reader.describe()
    assert repr(name + "_x") in str(caught.value)
    assert any("did you mean" in step and name.partition("/")[0] in step for step in caught.value.fix)


@every_array_format
def test_a_wrong_buffer_is_refused(sample: Sample, path_of: Any) -> None:
    with open_source(path_of(sample)) as reader:
        spec = max(reader.describe().items, key=lambda item: item.nbytes)
        assert isinstance(spec, ArraySpec)
        good = np.zeros(spec.shape, spec.dtype)
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


@every_format
def test_arrays_are_not_tables_nor_tables_arrays(sample: Sample, path_of: Any, tmp_path: Path) -> None:
    with open_source(path_of(sample)) as reader:
        item = reader.describe().items[0]
        with pytest.raises(TypeError, match="use"):
            if isinstance(item, ArraySpec):
                reader.write_table(item.name, tmp_path / "no")
            else:
                reader.read_into(item.name, np.zeros(1))
        with pytest.raises(MissingKey):
            reader.extent("no such thing")


@every_format
def test_closing_twice_is_allowed_and_using_it_afterwards_is_not(sample: Sample, path_of: Any) -> None:
    reader = open_source(path_of(sample))
    name = reader.describe().items[0].name
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="was closed"):
        reader.extent(name)


@every_single_file
def test_a_file_cut_anywhere_is_an_error_or_the_same_data(sample: Sample, path_of: Any, tmp_path: Path) -> None:
    whole = path_of(sample).read_bytes()
    cut = tmp_path / "cut"
    for share in (0.0, 0.001, 0.3, 0.7, 0.999):
        cut.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(LegroomError), open_source(cut) as reader:
            for item in reader.describe().items:
                if isinstance(item, ArraySpec):
                    reader.read_into(item.name, np.empty(item.shape, item.dtype))
                else:
                    reader.write_table(item.name, tmp_path / "out")


@every_format
def test_nothing_is_written_to_the_source(sample: Sample, path_of: Any) -> None:
    path = path_of(sample)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    before = [(file, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    with open_source(path) as reader:
        for item in reader.describe().items:
            if isinstance(item, ArraySpec):
                reader.read_into(item.name, np.empty(item.shape, item.dtype))
    after = sorted(path.rglob("*")) if path.is_dir() else [path]
    assert [(file, file.stat().st_mtime_ns, file.stat().st_size) for file in after] == before
