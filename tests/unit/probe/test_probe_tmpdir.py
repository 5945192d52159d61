"""The folder for temporary files, and the longest path of a socket below it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from legroom.probe import process_and_limits as probe
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import SOCKET_TAIL, longest_socket, temporary


def _folder(length: int) -> str:
    return "/" + "x" * (length - 1)


def _host(tmp_path: Path, env: dict[str, str], **more: object) -> Host:
    for path in env.values():
        (tmp_path / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    return Host(root=tmp_path, env=env, **{"recording": {}, "platform": "linux", **more})


@pytest.mark.parametrize(("length", "fits"), [(4, True), (75, True), (76, False), (200, False)])
def test_a_socket_fits_up_to_75_bytes(tmp_path: Path, length: int, fits: bool) -> None:
    found = temporary(_host(tmp_path, {"TMPDIR": _folder(length)}))
    assert found is not None and (found.socket, found.longest) == (length + SOCKET_TAIL, 107)
    assert (found.socket <= found.longest) is fits


def test_bytes_count_and_not_characters(tmp_path: Path) -> None:
    found = temporary(_host(tmp_path, {"TMPDIR": "/" + "文" * 25}))
    assert found is not None and found.socket == 76 + SOCKET_TAIL


def test_names_in_pythons_order_and_only_what_is_there(tmp_path: Path) -> None:
    host = _host(tmp_path, {"TMP": "/b", "TEMP": "/a"})
    found = temporary(host)
    assert found is not None and (found.path, found.source) == ("/a", "TEMP")
    assert temporary(Host(root=tmp_path, env={"TMPDIR": "/nowhere"}, recording={})) is None
    assert temporary(Host(root=tmp_path, env={}, recording={})) is None
    assert temporary(_host(tmp_path, {"TMPDIR": _folder(90)}, platform="win32")) is None


def test_another_process_has_its_own(tmp_path: Path) -> None:
    host = _host(tmp_path, {"TMPDIR": "/mine"})
    (tmp_path / "its").mkdir()
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "environ").write_bytes(b"A=1\0TMPDIR=/its\0")
    found, mine = temporary(host, "7"), temporary(host, "8")
    assert found is not None and found.path == "/its" and mine is not None and mine.path == "/mine"


@pytest.mark.parametrize(("length", "long"), [(75, False), (79, True), (80, False)])
def test_a_python_that_leaves_a_long_folder_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, long: bool
) -> None:
    monkeypatch.setattr(probe, "_moves_away", lambda: True)
    found = temporary(_host(tmp_path, {"TMPDIR": _folder(length)}, recording=None))
    assert found is not None and (found.socket > found.longest) is long


@pytest.mark.skipif(sys.platform != "linux", reason="the bound of Linux")
def test_the_bound_is_the_systems(tmp_path: Path) -> None:
    longest = longest_socket("linux")
    for length in (longest, longest + 1):
        folder = os.fspath(tmp_path)
        path = folder + "/" + "s" * (length - len(folder) - 1)
        with socket.socket(socket.AF_UNIX) as one:
            if length <= longest:
                one.bind(path)
            else:
                with pytest.raises(OSError, match="too long"):
                    one.bind(path)
