"""Three ranks on one Parquet file: one copy between them, and a small machine with swap that ours does not touch.

The ranks are those of bench/parquet_ranks.py, on a smaller file. Speed is the benchmark's business.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import rigs

from torch_memory import beside_torch

pytest.importorskip("pyarrow")
pytest.importorskip("torch")
BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import parquet_rank  # noqa: E402
import parquet_ranks  # noqa: E402

MB = 1 << 20
SIZE = 300 * MB


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.parquet"
    parquet_rank.write_chats(path, SIZE)
    return path


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A store in real shared memory, of the test's own."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("needs /dev/shm")
    folder = tempfile.mkdtemp(prefix="legroom-test-", dir="/dev/shm")
    monkeypatch.setenv("LEGROOM_SHM", folder)
    monkeypatch.setenv("LEGROOM_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    shutil.rmtree(folder)


@pytest.mark.load_sensitive(reason="the PSS of libraries rises when other processes that map them end")
@pytest.mark.real()
def test_three_ranks_hold_one_copy_where_read_table_holds_three(chats: Path, store: None) -> None:
    naive, one_copy = parquet_ranks.held("read_table", chats)
    ours, same = parquet_ranks.held("legroom", chats)
    assert one_copy == same and one_copy > 0.9 * SIZE
    assert naive >= 3
    assert ours <= 1.1


@pytest.mark.soak
@pytest.mark.real("cgroup", "swap")
def test_a_small_machine_neither_swaps_nor_is_killed(chats: Path, store: None) -> None:
    # Beside torch itself, three ranks with a stream of 64 MB in each take about 500 MB together.
    limit, swap = beside_torch(850, interpreters=3), 128 * MB
    with rigs.swap_file(swap), rigs.memory_cgroup(limit, swap=swap) as group:
        parquet_ranks.forget(chats)
        ours = parquet_ranks.trained("legroom", chats, 4, group)
        assert ours["ended"] == [0, 0, 0]
        assert (ours["oom_kills"], ours["swap"]) == (0, 0), ours
        assert ours["why"].startswith("low_memory on")  # by what the cgroup leaves: the machine has plenty
        naive = parquet_ranks.trained("read_table", chats, 4, group, patience=120, enough_swap=10 * MB)
        assert naive["oom_kills"] or naive["swap"] > 10 * MB, "it fits too: this shows nothing"


@pytest.mark.real("cgroup")
def test_a_checkpoint_is_asked_for_before_the_kill(tmp_path: Path) -> None:
    """A real leak, a real watch, a real OOM kill: the last checkpoint is of the end of the run."""
    script = tmp_path / "leak.py"
    script.write_text(
        "import json, pathlib, sys, time\n"
        "from legroom.integrations.guard import Guard\n"
        "kept, folder = [], pathlib.Path(sys.argv[1])\n"
        "with Guard(interval=0.1, tune='off', horizon=5) as guard:\n"
        "    for step in range(100_000):\n"
        "        kept.append(b'x' * (1 << 20))\n"
        "        time.sleep(0.03)\n"
        "        (folder / 'step').write_text(str(step))\n"
        "        if guard.step():\n"
        "            (folder / 'saved').write_text(str(step))\n"
    )
    with rigs.memory_cgroup(256 * MB) as group:
        done = subprocess.run(
            group.command([sys.executable, str(script), str(tmp_path)]), capture_output=True, text=True, timeout=200
        )
        assert done.returncode == -9 and group.oom_kills() == 1, done.stderr
    saved, last = (json.loads((tmp_path / name).read_text()) for name in ("saved", "step"))
    assert last / 2 < saved <= last  # the kill may come before the next step
    assert "checkpoint requested: ram" in done.stderr
