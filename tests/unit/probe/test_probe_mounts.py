"""What is mounted where."""

from __future__ import annotations

import pytest
from fake_host import TREES
from hypothesis import given
from hypothesis import strategies as st

from legroom.probe.filesystems_and_cgroups import mounted_at, mounts, parse_mountinfo
from legroom.probe.host_files_and_syscalls import Host


def test_fields() -> None:
    (mount,) = parse_mountinfo("36 35 98:0 /a /b rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue\n")
    assert (mount.point, mount.root, mount.kind, mount.source) == ("/b", "/a", "ext3", "/dev/root")
    assert mount.options == ("rw", "noatime")
    assert mount.super_options == ("rw", "errors=continue")
    assert mount.device == "98:0"


def test_an_empty_source_does_not_shift_the_fields() -> None:
    (mount,) = parse_mountinfo("36 35 0:9 / /b rw - tmpfs  rw,size=64k\n")
    assert (mount.kind, mount.source, mount.super_options) == ("tmpfs", "", ("rw", "size=64k"))


def test_only_newlines_end_a_line() -> None:
    (mount,) = parse_mountinfo("36 35 0:9 / /odd\x0bname\u2028here rw - tmpfs x rw\n")
    assert mount.point == "/odd\x0bname\u2028here"


@pytest.mark.parametrize(
    "line", ["", "x", "36 35 - tmpfs x rw", "36 35 0:9 / /b rw tmpfs x rw", "1 2 3 4 b rw - a b c"]
)
def test_what_is_no_mount_is_skipped(line: str) -> None:
    good = "36 35 0:9 / /b rw - tmpfs x rw"
    assert [mount.point for mount in parse_mountinfo(f"{line}\n{good}\n{line}")] == ["/b"]


def test_the_last_mount_at_a_point_is_the_one_seen() -> None:
    found = mounts(Host.at(TREES / "hybrid"))
    at = mounted_at(found, "/dev/shm")
    assert at is not None
    assert at.super_options == ("rw", "size=24684100k")
    assert mounted_at(found, "/dev/shm/deeper") is None


def escaped(text: str) -> str:
    return "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in text)


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@given(st.lists(st.tuples(names, names, names)))
def test_any_path_comes_back_and_order_is_kept(rows: list[tuple[str, str, str]]) -> None:
    text = "".join(
        f"1 2 0:9 /{escaped(root)} /{escaped(point)} rw,a=b shared:1 - tmpfs {escaped(source)} rw\n"
        for root, point, source in rows
    )
    assert [(m.root, m.point, m.source) for m in parse_mountinfo(text)] == [(f"/{r}", f"/{p}", s) for r, p, s in rows]


@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    assert all(mount.point.startswith("/") for mount in parse_mountinfo(text))
