"""Disks: which mount holds a path, whether it is local, where a store would be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import rigs
from hypothesis import given
from hypothesis import strategies as st

from legroom.probe.filesystems_and_cgroups import disk_pool, disks, filesystem_of, is_network, store_candidates, why_not
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.machine import Disk

TREES = Path(__file__).parents[2] / "trees"
SOURCE = Path(__file__).parents[3] / "src"


class Paper(Host):
    """A machine of one file, its mountinfo, in ``env`` so that the record stays frozen."""

    def text(self, path: str) -> str | None:
        return self.env.get("mountinfo") if path == "/proc/self/mountinfo" else None


def paper(*mounts: tuple[str, str], options: str = "rw", **recording: Any) -> Paper:
    lines = [f"{20 + n} 1 0:{n} / {point} {options} - {kind} none rw\n" for n, (point, kind) in enumerate(mounts)]
    env: Mapping[str, str] = {"mountinfo": "".join(lines)} | recording.pop("env", {})
    return Paper(root=Path("/nonexistent"), env=env, platform="linux", recording={"uid": 1000} | recording)


@pytest.mark.parametrize(
    "kind",
    ["nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse.juicefs", "9p", "virtiofs",
     "fuse", "wekafs", "vboxsf", "autofs", "ocfs2"],
)  # fmt: skip
def test_shared_filesystems(kind: str) -> None:
    assert is_network(kind)


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fuse.fuse-overlayfs", "apfs", None]
)
def test_local_filesystems(kind: str | None) -> None:
    assert not is_network(kind)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home", "nfs4"),
        ("/home/ana/x", "nfs4"),
        ("/homework", "ext4"),
        ("/home/scratch", "xfs"),
        ("/home/scratch/a/b", "xfs"),
        ("/home/scratchy", "nfs4"),
        ("/twice/x", "lustre"),
    ],
)
def test_the_longest_mount_point_holds_a_path_and_the_last_one_there(path: str, kind: str) -> None:
    host = paper(("/home/scratch", "xfs"), ("/home", "nfs4"), ("/", "ext4"), ("/twice", "tmpfs"), ("/twice", "lustre"))
    found = filesystem_of(host, path)
    assert found is not None and found.kind == kind


def test_no_mountinfo_is_unknown() -> None:
    assert filesystem_of(paper(), "/var/tmp") is None


@given(st.text(), st.text(min_size=1))
def test_any_text_may_be_a_mountinfo(text: str, path: str) -> None:
    host = Paper(env={"mountinfo": text}, recording={})
    found = filesystem_of(host, "/" + path)
    assert found is None or ("/" + path).startswith(found.point.rstrip("/"))


SEGMENTS = st.lists(st.sampled_from(["a", "b", "ab", "a b"]), max_size=4)


@given(st.lists(SEGMENTS, min_size=1, max_size=8), SEGMENTS)
def test_no_mount_point_of_a_path_is_longer_than_the_one_found(points: list[list[str]], path: list[str]) -> None:
    named = [("/" + "/".join(parts).replace(" ", "\\040"), str(number)) for number, parts in enumerate(points)]
    found = filesystem_of(paper(*named), "/" + "/".join(path))
    holding = [n for n, parts in enumerate(points) if path[: len(parts)] == parts]
    if not holding:
        assert found is None
    else:
        longest = max(len(points[n]) for n in holding)
        assert found is not None
        assert found.kind == str(max(n for n in holding if len(points[n]) == longest))


@pytest.mark.parametrize(
    ("tree", "store", "work", "kinds"),
    [
        ("bare-v2", "/var/tmp", "/home/ana/train", ("ext4", "ext4")),
        ("docker-v2", "/var/tmp", "/workspace", ("overlay", "overlay")),
        ("slurm", "/local/481516", "/home/ana/t5", ("xfs", "nfs4")),
    ],
)
def test_recorded_machines(tree: str, store: str, work: str, kinds: tuple[str, str]) -> None:
    host = Host.at(TREES / tree)
    found = disks(host)
    assert [(disk.role, disk.path) for disk in found] == [("store", store), ("work", work)]
    assert tuple(disk.filesystem for disk in found) == kinds
    assert host.recording is not None
    for disk in found:
        assert [disk.size, disk.free] == host.recording["statvfs"][disk.path]


def test_a_machine_without_any_answer() -> None:
    store, work = disks(Host.at(TREES / "masked-proc"))
    assert store.size is store.free is store.filesystem is None and store.path == ""
    assert "/var/tmp: does not exist" in (store.reason or "") and "/nowhere/.cache" in (store.reason or "")
    assert work.size is None and work.reason
    pool = disk_pool((store, work))
    assert pool.size is pool.used is pool.free is None and pool.reason == store.reason


ROOM = {"/var/tmp": [100, 40], "/n": [1000, 900], "/slurm": [50, 50], "/home/u": [7, 7], "/cache": [9, 9]}
MODE = {"/var/tmp": [0o1777, 0], "/n": [0o777, 0], "/slurm": [0o700, 1000], "/home/u": [0o700, 1000]}
MOUNTS = (("/", "ext4"), ("/n", "nfs4"))


@pytest.mark.parametrize(
    ("env", "path"),
    [
        ({"LEGROOM_DIR": "/n", "SLURM_TMPDIR": "/slurm"}, "/n"),  # named: the network is meant
        ({"SLURM_TMPDIR": "/slurm"}, "/slurm"),
        ({"SLURM_TMPDIR": "/n"}, "/var/tmp"),
        ({"SLURM_TMPDIR": "/gone"}, "/var/tmp"),
        ({}, "/var/tmp"),
    ],
)
def test_the_store_takes_the_first_usable_directory(env: dict[str, str], path: str) -> None:
    store = disks(paper(*MOUNTS, env=env, statvfs=ROOM, stat=MODE))[0]
    assert store.path == path
    assert (store.size, store.free) == tuple(ROOM[path])
    assert (store.reason is not None) == (path == "/n")


def test_caches_are_the_last_resort_and_are_asked_above_when_not_yet_made() -> None:
    closed = {"/var/tmp": [0o755, 0]}
    home = paper(*MOUNTS, env={"HOME": "/home/u"}, statvfs=ROOM, stat=closed)
    assert [candidate.path for candidate in store_candidates(home)] == ["/var/tmp", "/home/u/.cache"]
    assert why_not(home, store_candidates(home)[0]) == "not writable"
    xdg = paper(*MOUNTS, env={"HOME": "/home/u", "XDG_CACHE_HOME": "/cache"}, statvfs=ROOM, stat=closed)
    assert disks(xdg)[0].path == "/cache"


def test_a_read_only_mount_holds_no_store() -> None:
    host = paper(("/", "ext4"), options="ro,relatime", statvfs=ROOM, stat=MODE)
    assert why_not(host, store_candidates(host)[0]) == "mounted read-only"


def test_room_is_not_taken_from_the_other_side_of_a_mount() -> None:
    host = paper(("/", "ext4"), ("/n", "nfs4"), statvfs={"/": [5, 5], "/n": [8, 8]}, cwd="/n/a/b")
    assert disks(host)[1].size == 8
    host = paper(("/", "ext4"), ("/n", "nfs4"), statvfs={"/": [5, 5]}, cwd="/n/a/b")
    assert disks(host)[1].size is None and "cannot read the free space" in (disks(host)[1].reason or "")


@pytest.mark.parametrize("nonsense", [{"/var/tmp": "x"}, {"/var/tmp": [1]}, {"/var/tmp": ["a", "b"]}, {"/var/tmp": 3}])
def test_nonsense_in_a_recording_raises_nothing(nonsense: dict[str, Any]) -> None:
    for given_ in ({"statvfs": nonsense}, {"stat": nonsense}, {"cwd": 7}, {"statvfs": nonsense, "cwd": "relative"}):
        assert len(disks(paper(("/", "ext4"), **given_))) == 2


def test_a_live_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEGROOM_DIR", str(tmp_path / "not" / "yet"))
    store, work = disks(Host())
    assert (store.path, work.path) == (str(tmp_path / "not" / "yet"), str(tmp_path))
    stats = os.statvfs(tmp_path)
    for disk in (store, work):
        assert disk.size == stats.f_blocks * stats.f_frsize and disk.free is not None and disk.free <= disk.size
        assert disk.filesystem
    assert not (tmp_path / "not").exists()  # looked at, not made
    pool = disk_pool((store, work))
    assert (pool.name, pool.size, pool.free) == ("disk", store.size, store.free)
    # What the filesystem keeps for root is neither used nor free to us.
    assert pool.used is not None and 0 <= pool.used <= (pool.size or 0) - (pool.free or 0)


def test_a_relative_legroom_dir_is_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEGROOM_DIR", "here")
    assert store_candidates(Host())[0].path == str(tmp_path / "here")


def test_what_is_in_the_way_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for name, words in (("file", "not a directory"), ("file/below", "not a directory"), ("a\0b", "not an absolute")):
        host = Host(env={"LEGROOM_DIR": str(tmp_path / name)})
        assert words in (why_not(host, store_candidates(host)[0]) or "")
    host = Host(env={"SLURM_TMPDIR": str(tmp_path / "gone")})
    assert why_not(host, store_candidates(host)[0]) == "does not exist"
    host = Host(env={"SLURM_TMPDIR": "relative"})
    assert why_not(host, store_candidates(host)[0]) == "not an absolute path"


def test_a_link_is_followed_to_its_filesystem(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc")
    found = filesystem_of(Host(), str(tmp_path / "link" / "sys"))
    assert found is not None and found.kind in ("proc", "sysfs")


def test_a_removed_working_directory_is_unknown(tmp_path: Path) -> None:
    code = (
        "import os, sys, legroom.probe.filesystems_and_cgroups as d; from legroom.probe.host_files_and_syscalls import Host\n"
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); print(d.disks(Host())[1])"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "unknown or was removed" in ran.stdout


def test_no_store_was_asked_for() -> None:
    pool = disk_pool((Disk("work", "/", 5, 4, "ext4"),))
    assert pool.size is None and pool.reason


LOOK = """
import sys
from legroom.probe.filesystems_and_cgroups import disks, filesystem_of
from legroom.probe.host_files_and_syscalls import Host
print(filesystem_of(Host(), sys.argv[1]).kind, *[disk.path or "-" for disk in disks(Host())[:1]])
"""


@pytest.mark.real("mount")
def test_a_real_mount_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEGROOM_DIR")
    script = f'mount -t tmpfs -o size=1m tmpfs "{tmp_path}" && exec "$@"'
    command = [sys.executable, "-c", LOOK, f"{tmp_path}/below"]
    env = {**os.environ, "SLURM_TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *command],
        capture_output=True, text=True, check=True, env=env,
    )  # fmt: skip
    assert ran.stdout.split() == ["tmpfs", str(tmp_path)]


@pytest.mark.real("user")
def test_another_users_directory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEGROOM_DIR")
    command = [sys.executable, "-c", LOOK, "/"]
    env = {**os.environ, "SLURM_TMPDIR": "/usr", "HOME": "/usr"}  # there, readable, and not ours
    ran = subprocess.run(rigs.as_user(65534, command), capture_output=True, text=True, check=True, env=env)
    assert ran.stdout.split()[1] == "/var/tmp"
