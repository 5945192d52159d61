"""Settings that worked are remembered between runs: one file format for tune and run, and the files from before it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from machines import GB, healthy, with_pool

from legroom.loader.tune.remembered_settings import UsedBy, forget, pool_sizes, recall, recall_on, remember
from legroom.records.loader_settings_and_flags import LoaderSettings
from legroom.rescue.supervisor import command_key


def _file(folder: Path, used_by: str, key: str) -> Path:
    path = folder / "legroom" / used_by / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.parametrize("used_by", ["settings", "run"])
def test_what_was_remembered_is_recalled_until_it_is_forgotten(tmp_path: Path, used_by: UsedBy) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    kept = LoaderSettings(num_workers=1, prefetch_factor=1, low_memory=True, loader_kind="legroom")
    assert recall(used_by, "train.py", environment) is None
    assert remember(used_by, "train.py", kept, {"shm": 64}, environment)
    found = recall(used_by, "train.py", environment)
    assert found is not None and (found.settings, found.sizes) == (kept, {"shm": 64})
    file = _file(tmp_path, used_by, "train.py")
    assert file.stat().st_mode & 0o077 == 0 and "train.py" not in file.read_text()
    assert recall(used_by, "other.py", environment) is None
    forget(used_by, "train.py", environment)
    forget(used_by, "train.py", environment)
    assert recall(used_by, "train.py", environment) is None


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    body = {"schema": "legroom.settings/1", "key": "k", "when": 1.0, "settings": {"batch_size": 8, "num_workers": 2}}
    _file(tmp_path, "settings", "k").write_text(json.dumps(body))
    found = recall("settings", "k", environment)
    assert found is not None and found.settings == LoaderSettings(batch_size=8, num_workers=2)
    old = {"values": {"num_workers": 1, "loader": "legroom"}, "sizes": {"shm": 64, "ram": None}}
    _file(tmp_path, "run", "k").write_text(json.dumps(old))
    found = recall("run", "k", environment)
    assert found is not None and found.settings == LoaderSettings(num_workers=1, loader_kind="legroom")
    assert found.sizes == {"shm": 64, "ram": None}


@pytest.mark.parametrize(
    "text",
    ["", "7", "[]", "{}", "null", '{"settings": 3}', '{"settings": {"num_workers": -1}}', '{"settings": {"x": 1}}',
     '{"settings": {"num_workers": 1}, "sizes": 5}', '{"schema": "legroom.settings/2", "settings": {"num_workers": 1}}',
     '{"key": "other", "settings": {"num_workers": 1}}'],
)  # fmt: skip
def test_a_damaged_file_counts_as_none(tmp_path: Path, text: str) -> None:
    _file(tmp_path, "run", "k").write_text(text)
    assert recall("run", "k", {"XDG_STATE_HOME": str(tmp_path)}) is None


def test_run_starts_as_given_where_shm_or_ram_has_grown(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    machine = healthy()
    kept, asked = LoaderSettings(num_workers=1, loader_kind="legroom"), LoaderSettings(batch_size=8, num_workers=4)
    remember("run", "k", kept, pool_sizes(machine), environment, asked=asked)
    found = recall_on(machine, "run", "k", environment)
    assert found is not None and (found.settings, found.asked) == (kept, asked)
    for pool in ("shm", "ram"):
        larger = with_pool(machine, pool, 1000 * GB, 0, 1000 * GB)
        assert recall_on(larger, "run", "k", environment) is None
        unknown = with_pool(machine, pool, None, None, None, reason="unreadable")
        assert recall_on(unknown, "run", "k", environment) is None


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("python t.py --batch_size 4 --workers 1 --lr 1", True),
        ("python t.py --batch_size=32 --workers=2 --lr 1", True),
        ("python t.py --batch_size 8 --workers 4 --lr 2", False),  # another option
        ("python t.py --batch_size 8 --lr 1", False),  # no flag for workers: the script's default counts
        ("python t.py --global_batch_size 8 --workers 4 --lr 1", False),  # the batch of all ranks
        ("python u.py --batch_size 8 --workers 4 --lr 1", False),
        ("torchrun --nproc_per_node 2 t.py --batch_size 8 --workers 4 --lr 1", False),
    ],
)
def test_a_command_with_other_values_of_its_settings_is_the_same(other: str, same: bool) -> None:
    key = command_key(("python", "t.py", "--batch_size", "8", "--workers", "4", "--lr", "1"), (), "/home/you")
    assert (command_key(tuple(other.split()), (), "/home/you") == key) is same
    assert command_key(tuple(other.split()), (), "/home/other") != key


def test_a_value_in_the_flag_s_own_word_is_not_sought_in_the_next() -> None:
    assert command_key(["t.py", "-b4", "4"], (), "/") != command_key(["t.py", "-b4", "5"], (), "/")
