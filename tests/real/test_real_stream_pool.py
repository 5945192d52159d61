"""What a stream takes of Arrow's pool with the settings it comes with, measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
np = pytest.importorskip("numpy")
import pyarrow.parquet as pq  # noqa: E402

CHILD = Path(__file__).with_name("stream_child.py")
MB = 1 << 20
ROWS = 13_000

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(ROWS * 96, np.float32)), 96)
    table = pa.table({"id": np.arange(ROWS), "label": rng.integers(0, 10, ROWS), "x": vectors})
    where = tmp_path_factory.mktemp("pool") / "groups"
    pq.write_table(pa.concat_tables([table] * 20), where, row_group_size=ROWS)
    return where


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 64}, {"batch_size": 2048}, {"format": "numpy"}],
    ids=["defaults", "64", "2048", "numpy"],
)
def test_twenty_row_groups_of_5_mb_take_12_mb_with_defaults(path: Path, options: dict[str, Any]) -> None:
    assert 4.5 * MB < pq.read_metadata(path).row_group(0).total_byte_size < 6 * MB
    done = subprocess.run(
        [sys.executable, str(CHILD), str(path), json.dumps(options)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rows"] == 20 * ROWS
    assert found["pool"] <= 12 * MB, found
