"""Fixes: /dev/shm is only ever set to more than it has."""

from __future__ import annotations

import pytest

from legroom.model import Place
from legroom.model.death import Level
from legroom.rescue.fixes import fixes

GB = 1 << 30
ROOT = Place("bare", "", "linux", root=True, may_mount=True, sudo=False, rights_how="")


def _told(shm: Level | None, here: int | None) -> str:
    return "\n".join(fixes("shm-full", ROOT, ram=24 * GB, shm=shm, nofile=None, here=here))


@pytest.mark.parametrize("here", [None, 64 << 20, GB])
def test_a_small_one_is_enlarged(here: int | None) -> None:
    assert "remount,size=4G" in _told(None, here)


@pytest.mark.parametrize("peak", [None, Level(23 * GB, 24 * GB)])
def test_a_large_one_is_never_made_smaller(peak: Level | None) -> None:
    told = _told(peak, 24 * GB)
    assert "remount" not in told and "24 GB" in told and "legroom doctor" in told


def test_a_path_with_no_room_for_a_socket_is_to_be_shorter() -> None:
    told = "\n".join(fixes("tmpdir-too-long", ROOT, ram=None, shm=None, nofile=None))
    assert "export TMPDIR=/tmp" in told and "75 or less" in told
