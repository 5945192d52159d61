"""Which directories may be stores, and why others are passed over."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import legroom
from legroom.cache import store_directories as store_module
from legroom.cache.store_directories import StoreCandidate, open_stores
from legroom.errors import NoStore


def test_a_store_is_made_for_its_owner_alone(shm: Path, disk: Path) -> None:
    with open_stores(make=True) as places:
        assert [store.root for store in places.found] == [shm, disk]
        assert places.findings == ()
        assert places.election_store.root == shm
    for root in (shm, disk):
        for folder in (root, root / "locks", root / "sources"):
            assert folder.stat().st_mode & 0o7777 == 0o700


def test_nothing_is_made_by_looking(shm: Path, disk: Path) -> None:
    with open_stores() as places:
        assert places.found == ()
    assert not list(store_module.existing_stores())
    assert not shm.exists() and not disk.exists()


def test_a_named_directory_is_used_alone_before_its_first_load_as_after_it(
    shm: Path, disk: Path, npy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of this user's in another place is not listed, attached or cleaned up."""
    legroom.open(npy(), backing="disk")
    usual = StoreCandidate(disk.parent, "disk", named=False)
    (tmp_path / "file").touch()
    for name, others in (("new", []), ("new/deeper", []), ("file/not", [usual.root])):
        named = StoreCandidate(tmp_path / name, "disk", named=True, may_create=True)
        monkeypatch.setattr(store_module, "candidates", lambda _env, named=named: iter((named, usual)))
        with open_stores() as places:
            assert [store.root for store in places.found] == others
        assert [store.root for store in store_module.existing_stores()] == others


def _symlink(root: Path) -> None:
    target = root.parent / "elsewhere"
    target.mkdir(mode=0o700)
    root.symlink_to(target)


def _file(root: Path) -> None:
    root.touch()


def _writable(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)


def _group_writable(root: Path) -> None:
    root.mkdir()
    root.chmod(0o770)


def _open_parent(root: Path) -> None:
    root.parent.chmod(0o777)


def _group_writable_parent(root: Path) -> None:
    root.parent.chmod(0o770)


def _linked_locks(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root.parent / "elsewhere").mkdir()
    (root / "locks").symlink_to(root.parent / "elsewhere")


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (_symlink, "store-symlink"),
        (_file, "store-symlink"),
        (_writable, "store-writable-by-others"),
        (_group_writable, "store-writable-by-others"),
        (_open_parent, "store-writable-by-others"),
        (_group_writable_parent, "store-writable-by-others"),
        (_linked_locks, "store-symlink"),
    ],
)
def test_a_store_that_cannot_be_trusted_is_passed_over(shm: Path, tmp_path: Path, spoil, code: str, npy) -> None:
    spoil(shm)
    with open_stores(make=True) as places:
        assert [store.backing for store in places.found] == ["disk"]
        (finding,) = places.findings
        assert finding.code == code
        assert finding.severity == "warning"
        assert finding.why and finding.fix
    data = legroom.open(npy())
    assert data.info.backing == "disk"
    assert data["array"][3, 4] == 34


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_store_whose_parent_was_opened_to_others_later_is_passed_over(shm: Path, npy, mode: int) -> None:
    legroom.open(npy()).close()
    shm.parent.chmod(mode)
    with open_stores() as places:
        assert [store.backing for store in places.found] == ["disk"] * (len(places.found))
        assert "store-writable-by-others" in {finding.code for finding in places.findings}
    assert shm not in [store.root for store in store_module.existing_stores()]
    shm.parent.chmod(mode | 0o1000)
    with open_stores() as places:
        assert shm in [store.root for store in places.found]


def test_directories_that_are_made_are_for_their_owner_alone(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_DIR", str(tmp_path / "a" / "b" / "c"))
    before = os.umask(0)
    try:
        with open_stores(make=True) as places:
            assert str(places.found[1].root).startswith(str(tmp_path / "a" / "b" / "c"))
    finally:
        os.umask(before)
    for folder in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.real("user")
def test_a_store_squatted_by_another_user_is_passed_over(shm: Path, npy) -> None:
    shm.mkdir(mode=0o700)
    os.chown(shm, 12345, 12345)
    with open_stores(make=True) as places:
        assert [store.backing for store in places.found] == ["disk"]
        assert places.findings[0].code == "store-squatted"
        assert "12345" in places.findings[0].why
    assert legroom.open(npy()).info.backing == "disk"


@pytest.mark.real("user")
@pytest.mark.parametrize("what", ["entry", "manifest", "array"])
def test_an_entry_planted_by_another_user_is_not_trusted(shm: Path, npy, old_files: None, what: str) -> None:
    path = npy()
    key = legroom.open(path).info.key
    assert key is not None
    planted = {"entry": shm / key, "manifest": shm / key / "manifest.json", "array": shm / key / "array.npy"}[what]
    os.chown(planted, 12345, 12345)
    assert (legroom.open(path)["array"] == np.load(path)).all()
    owners = {file.stat().st_uid for file in (shm / key, *(shm / key).iterdir())}
    assert owners == {os.geteuid()}  # built anew


def test_without_a_usable_store_every_candidate_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, npy) -> None:
    monkeypatch.setenv("LEGROOM_SHM", str(tmp_path / "nowhere"))
    monkeypatch.setattr(
        store_module,
        "candidates",
        lambda env: [
            StoreCandidate(tmp_path / "nowhere", "shm", True),
            StoreCandidate(tmp_path / "none", "disk", False),
        ],
    )
    with pytest.raises(NoStore) as caught:
        legroom.open(npy())
    assert "nowhere" in caught.value.why and "none" in caught.value.why
    assert any("LEGROOM_DISABLE" in line for line in caught.value.fix)


def test_a_network_filesystem_is_used_only_when_named(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "filesystem_at", lambda parent, device: "nfs4")
    with pytest.raises(store_module.UnusableStore, match="nfs4"):
        store_module.open_store(StoreCandidate(tmp_path / "disk", "disk", named=False), make=True)
    with store_module.open_store(StoreCandidate(tmp_path / "disk", "disk", named=True), make=True) as store:
        assert store.backing == "disk"


def test_a_store_that_vanished_is_made_anew(shm: Path, npy) -> None:
    import shutil

    path = npy()
    first = legroom.open(path)
    shutil.rmtree(shm)
    again = legroom.open(path)
    assert again.info.backing == "shm"
    assert (again["array"] == first["array"]).all()


def test_a_store_that_vanishes_during_the_build_is_made_anew(shm: Path, npy, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from legroom.cache import store_directories as store_module

    seen: list[str] = []

    def trace(name: str) -> None:
        seen.append(name)
        if name == "publish" and seen.count("publish") == 1:
            shutil.rmtree(shm)

    monkeypatch.setattr(store_module, "step_hook", trace)
    data = legroom.open(npy())
    assert seen.count("publish") == 2
    assert data["array"][1, 1] == 11


def test_a_directory_that_takes_no_directories_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setenv("LEGROOM_SHM", "/proc")
    monkeypatch.setenv("LEGROOM_DIR", "/proc/x")
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "gone"))
    with open_stores(make=True) as places:
        refused = "no directory can be created in /proc"
        assert [finding.why for finding in places.findings][:3] == [refused, refused, f"{tmp_path}/gone does not exist"]


def test_a_tilde_that_no_shell_has_replaced_is_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LEGROOM_SHM", "~/memory")
    monkeypatch.setenv("LEGROOM_DIR", "~/store")
    found = list(store_module.candidates(os.environ))[:2]
    assert [candidate.parent for candidate in found] == [tmp_path / "memory", tmp_path / "store"]
