"""The machine below a root: files as they are, and a None for everything that is missing."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest
from fake_host import NAMES, TREES, FakeHost, tree
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import NoSuchRoot
from legroom.probe.host_files_and_syscalls import UNLIMITED, Host


def test_every_tree_is_whole_and_documented() -> None:
    said = (TREES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", said, re.M)) == set(NAMES)
    for name in NAMES:
        assert tree(name).platform == "linux"
        assert tree(name).text("/proc/meminfo")


def test_no_tree_holds_links_or_large_files() -> None:
    for path in TREES.rglob("*"):
        assert not path.is_symlink(), path
        assert not path.is_file() or path.stat().st_size < 16384, path


def test_a_recording_answers_the_system_calls() -> None:
    host = tree("slurm")
    assert host.uid == 20431
    assert host.groups == {"users", "vision"}
    assert host.affinity == 8
    assert host.rlimit("memlock") == (UNLIMITED, UNLIMITED)
    assert host.rlimit("nofile") == (131072, 131072)
    assert host.owner_mode("/dev/shm") == (0, 0o1777)
    assert host.disk_space("/dev/shm") is not None
    assert host.disk_space("/somewhere/else") is None
    assert host.env["SLURM_JOB_ID"] == "481516"
    assert host.kernel is not None and host.kernel.startswith("5.14")
    assert host.now == 1760000000.0
    assert not host.live


def test_what_a_recording_lacks_is_unknown() -> None:
    host = FakeHost()
    assert host.uid is None and host.affinity is None and host.kernel is None
    assert host.rlimit("nofile") is None and host.owner_mode("/") is None and host.disk_space("/") is None
    assert host.groups == frozenset()


def test_files_are_read_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/count").write_text(" 42\n")
    (tmp_path / "proc/max").write_text("max\n")
    (tmp_path / "proc/rows").write_text("MemTotal:  16 kB\nplain 7\nshort\nword word\n")
    (tmp_path / "proc/link").symlink_to("target")
    host = Host.at(tmp_path)
    assert host.live
    assert host.number("/proc/count") == 42
    assert host.number("/proc/max") is None
    assert host.number("/proc/absent") is None
    assert host.table("/proc/rows") == {"MemTotal": 16384, "plain": 7}
    assert host.table("/proc/absent") == {}
    assert host.names("/proc") == ["count", "link", "max", "rows"]
    assert host.names("/absent") == []
    assert host.link("/proc/link") == "target"
    assert host.link("/proc/count") is None
    assert host.exists("/proc/count") and not host.exists("/proc/absent")
    assert host.disk_space("/proc") is not None


def test_the_reason_names_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    host = Host.at(tmp_path)
    assert host.why("/absent") == "/absent does not exist"
    assert "has unexpected content" in host.why("/empty")
    assert "irectory" in host.why("/")


def test_a_root_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRoot, match="does not exist"):
        Host.at(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(NoSuchRoot, match="not a directory"):
        Host.at(tmp_path / "file")


@pytest.mark.parametrize("content", ["", "[]", "{", '"text"', "\x00"])
def test_a_broken_recording_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "recording.json").write_text(content)
    with pytest.raises(NoSuchRoot, match=r"recording\.json"):
        Host.at(tmp_path)


def test_a_recording_overrides_the_environment(tmp_path: Path) -> None:
    (tmp_path / "recording.json").write_text(json.dumps({"platform": "darwin"}))
    host = Host.at(tmp_path)
    assert host.platform == "darwin"
    assert host.env == {}


def test_live_answers_are_this_process_s() -> None:
    host = Host()
    assert host.live
    assert host.uid == (os.geteuid() if hasattr(os, "geteuid") else None)
    assert host.affinity is not None and 1 <= host.affinity <= (os.cpu_count() or 1)
    assert host.disk_space(tempfile.gettempdir()) is not None
    assert host.disk_space("/no/such/place") is None
    assert abs(host.now - time.time()) < 60


@pytest.mark.skipif(sys.platform == "win32", reason="asks for what Windows does not have")
def test_live_answers_of_posix(tmp_path: Path) -> None:
    import resource

    host = Host()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    assert host.rlimit("nofile") == tuple(UNLIMITED if bound == infinite else bound for bound in (soft, hard))
    assert host.kernel == os.uname().release
    assert all(isinstance(name, str) for name in host.groups)
    tmp_path.chmod(0o750)
    assert host.owner_mode(str(tmp_path)) == (os.geteuid(), 0o750)
    assert host.owner_mode("/no/such/place") is None
    assert not host.exists("/" + "x" * 5000)  # longer than any path may be


@given(st.binary(max_size=300))
def test_no_content_raises(content: bytes) -> None:
    host = FakeHost(files={"/f": content})
    host.number("/f")
    assert all(isinstance(value, int) for value in host.table("/f").values())
