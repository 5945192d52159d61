"""Files by what they take, and whether anybody writes to them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_machine import MB, FakeMachine

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.shm import shm
from legroom.probe.shm_segments import MOST_FILES, file_at, files_below, has_writer
from open_descriptors import open_descriptors, opened_since

# Asks for a second, while another process opens and closes.
ASK = """
import sys, time
from pathlib import Path
from legroom.probe.shm_segments import has_writer
from legroom.probe.host_files_and_syscalls import Host
host, until = Host(root=Path(sys.argv[1])), time.monotonic() + 1
while time.monotonic() < until:
    has_writer(host, "/x")
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "d/sub/deeper").mkdir(parents=True)
    (tmp_path / "d/b").write_bytes(b"x" * 5000)
    (tmp_path / "d/sub/a").write_bytes(b"")
    (tmp_path / "d/sub/deeper/c").write_bytes(b"x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"x")
    (tmp_path / "d/link").symlink_to(tmp_path / "outside")
    return Host(root=tmp_path)


def test_every_file_below_and_no_link_followed(host: Host) -> None:
    found = files_below(host, "/d")
    assert [file.path for file in found.files] == ["/d/b", "/d/link", "/d/sub/a", "/d/sub/deeper/c"]
    assert found.cut is False


def test_what_stat_returns(host: Host, tmp_path: Path) -> None:
    file = file_at(host, "/d/b")
    facts = os.stat(tmp_path / "d/b")
    assert file is not None
    assert (file.inode, file.size, file.owner) == (facts.st_ino, facts.st_blocks * 512, facts.st_uid)
    assert file.mtime == facts.st_mtime
    assert file_at(host, "/d/none") is None
    link, target = file_at(host, "/d/link"), file_at(host, "/d/link", follow=True)
    assert link is not None and target is not None
    assert link.inode != target.inode == os.stat(tmp_path / "outside").st_ino


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_listing_is_bounded_and_marked_as_such(host: Host, most: int) -> None:
    found = files_below(host, "/d", most=most)
    assert (len(found.files), found.cut) == (most, True)


def test_a_listing_of_exactly_the_bound_is_whole(host: Host) -> None:
    assert files_below(host, "/d", most=4).cut is False


def test_depth_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "/".join(["d"] * 40)).mkdir(parents=True)
    (tmp_path / "d/file").write_bytes(b"")
    found = files_below(Host(root=tmp_path), "/d")
    assert ([file.path for file in found.files], found.cut) == (["/d/file"], True)


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert files_below(Host(root=tmp_path), "/d").files == ()


def test_too_many_files_make_the_rest_unknown(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, used=MB)
    for inode in range(MOST_FILES + 1):
        machine.file(f"psm_{inode}", inode + 1, 0)
    found = shm(machine.host)
    assert len(found.files) == MOST_FILES
    assert found.hidden is None
    assert str(MOST_FILES) in str(found.reason)


@linux
def test_a_writer_is_known_of_until_its_map_is_gone(tmp_path: Path) -> None:
    host, path = Host(root=tmp_path), tmp_path / "x"
    path.write_bytes(bytes(4096))
    if has_writer(host, "/x") is None:
        pytest.skip("this filesystem has no leases")
    assert has_writer(host, "/x") is False
    with path.open("r+b") as file:
        assert has_writer(host, "/x") is True
        area = mmap.mmap(file.fileno(), 4096)
    assert has_writer(host, "/x") is True
    area.close()
    assert has_writer(host, "/x") is False
    with path.open("rb"):
        assert has_writer(host, "/x") is False


@linux
def test_asking_leaves_no_descriptor_and_no_lease(tmp_path: Path) -> None:
    host, path = Host(root=tmp_path), tmp_path / "x"
    path.write_bytes(b"x")
    before = open_descriptors()
    has_writer(host, "/x")
    has_writer(host, "/none")
    assert not opened_since(before)
    with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "wb"):  # a lease still held would refuse this
        pass


@linux
def test_a_writer_that_comes_in_between_harms_neither(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    asker = subprocess.Popen([sys.executable, "-c", ASK, str(tmp_path)])
    try:
        while asker.poll() is None:
            with (tmp_path / "x").open("r+b") as file:
                file.write(b"y")
    finally:
        asker.kill()
    assert asker.wait() == 0  # the kernel's usual signal about a lease would have ended it


def test_a_recording_cannot_be_asked(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.file("psm_1", 1, 0)
    assert has_writer(machine.host, "/dev/shm/psm_1") is None
