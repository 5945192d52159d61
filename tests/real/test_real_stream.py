"""A stream's bound is kept, measured in processes of their own.

Covers: Arrow's pool and the growth of the whole process, for row groups small and huge, strings, shuffling, every
format, mapped and compressed Arrow files; and a memory cgroup that kills who takes more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rigs

pa = pytest.importorskip("pyarrow")
np = pytest.importorskip("numpy")
import pyarrow.feather as feather  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

CHILD = Path(__file__).with_name("stream_child.py")
MB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


def _command(path: Path, options: dict[str, Any] | None) -> list[str]:
    return [sys.executable, str(CHILD), str(path), "plain" if options is None else json.dumps(options)]


def _run(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streams")


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, Path]:
    """Each about 100 MB in memory, but for the one huge row group."""
    rng = np.random.default_rng(0)
    rows = 26_000
    small = pa.table(
        {
            "id": np.arange(rows),
            "x": pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(rows * 48, np.float32)), 48),
        }
    )
    groups = pa.concat_tables([small] * 20)
    words = [f"{number} " * 20 for number in rng.integers(0, 1 << 30, 50_000)]
    text = pa.concat_tables([pa.table({"id": np.arange(50_000), "text": words})] * 8)
    coarse = pa.table({f"c{index}": rng.integers(0, 1 << 10, 1 << 20) for index in range(8)})
    huge = pa.concat_tables([coarse] * 16)
    paths = {name: folder / name for name in ("groups", "text", "huge", "mapped", "compressed")}
    pq.write_table(groups, paths["groups"], row_group_size=rows)
    pq.write_table(text, paths["text"], row_group_size=len(text))
    pq.write_table(huge, paths["huge"], row_group_size=len(huge), use_dictionary=False)
    feather.write_feather(groups, paths["mapped"], compression="uncompressed", chunksize=len(groups))
    feather.write_feather(text, paths["compressed"])
    return paths


def test_twenty_row_groups_of_5_mb_take_12_mb_of_the_pool(files: dict[str, Path]) -> None:
    group = pq.read_metadata(files["groups"]).row_group(0)
    assert 4.5 * MB < group.total_byte_size < 6 * MB
    found = _run(_command(files["groups"], {"memory": "40MB", "batch_size": 256}))
    assert found["rows"] == 20 * 26_000
    assert found["pool"] <= 12 * MB
    assert found["growth"] <= 40 * MB
    assert found["left"] < MB


def test_a_row_group_of_1_gb_within_256_mb(files: dict[str, Path]) -> None:
    metadata = pq.read_metadata(files["huge"])
    assert metadata.num_row_groups == 1
    assert metadata.row_group(0).num_rows * 64 == 1 << 30
    found = _run(_command(files["huge"], {"memory": "256MB"}))
    assert found["rows"] == 16 << 20
    assert found["growth"] <= 256 * MB
    assert found["pool"] <= found["allowed"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("groups", {"memory": "64MB", "shuffle_buffer": 10**9}),
        ("groups", {"memory": "256MB", "shuffle_buffer": 10**9, "batch_size": 8192}),
        ("groups", {"memory": "128MB", "format": "numpy", "batch_size": 40_000}),
        ("text", {"memory": "48MB"}),
        ("text", {"memory": "128MB", "shuffle_buffer": 10**9}),
        ("text", {"memory": "160MB", "batch_size": 60_000}),
        ("text", {"memory": "96MB", "format": "python"}),
        ("text", {"memory": "64MB", "filters": [["id", "<", 30_000]], "columns": ["text"]}),
        ("mapped", {"memory": "48MB"}),
        ("mapped", {"memory": "128MB", "shuffle_buffer": 10**9, "format": "numpy"}),
        ("compressed", {"memory": "96MB"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_the_bound_is_kept(files: dict[str, Path], name: str, options: dict[str, Any]) -> None:
    found = _run(_command(files[name], options))
    bound = int(options["memory"].removesuffix("MB")) * MB
    assert found["rows"] > 0
    assert found["growth"] <= bound, found
    assert found["pool"] <= found["allowed"], found
    assert found["left"] < MB


@pytest.mark.real("cgroup")
def test_in_a_cgroup_that_kills_who_takes_more(files: dict[str, Path]) -> None:
    limit = 384 * MB  # an interpreter with Arrow, about 100 MB, and the bound
    with rigs.memory_cgroup(limit) as group:
        found = _run(group.command(_command(files["huge"], {"memory": "256MB", "shuffle_buffer": 100_000})))
        assert found["rows"] == 16 << 20
        assert group.oom_kills() == 0
        done = subprocess.run(group.command(_command(files["huge"], None)), capture_output=True, text=True, timeout=200)
        assert done.returncode == -9, "pyarrow's own defaults fit too: this shows nothing"
        assert group.oom_kills() == 1
