"""Fixes: /dev/shm is only ever set to more than it has."""

from __future__ import annotations

import pytest

from legroom.records.failure import Level
from legroom.records.machine import RuntimeEnvironment
from legroom.rescue.verdict import fixes

GB = 1 << 30
ROOT = RuntimeEnvironment("bare", "", "linux", root=True, may_mount=True, sudo=False, rights_how="")


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


def test_after_an_oom_kill_no_limit_is_raised_beyond_the_machine_and_the_dead_are_not_listed() -> None:
    docker = RuntimeEnvironment("docker", "", "linux", root=True, may_mount=False, sudo=False, rights_how="")

    def told(runtime: RuntimeEnvironment, ram: int, total_ram: int) -> str:
        return "\n".join(fixes("ram-oom-kill", runtime, ram=ram, shm=None, nofile=None, total_ram=total_ram))

    assert "--memory=8G" in told(docker, 4 * GB, 64 * GB)
    assert "--memory" not in told(docker, 64 * GB, 64 * GB)  # there is no limit to raise
    for text in (told(docker, 64 * GB, 64 * GB), told(ROOT, 4 * GB, 64 * GB)):
        assert "ps -e" not in text and "use fewer workers" in text


def test_a_full_disk_is_named_in_its_fixes() -> None:
    told = "\n".join(fixes("disk-full", ROOT, ram=None, shm=None, nofile=None, disks=("/mnt/my data",)))
    assert "du -xh --max-depth=1 '/mnt/my data' |" in told and "df -h '/mnt/my data'" in told
    unknown = "\n".join(fixes("disk-full", ROOT, ram=None, shm=None, nofile=None)).splitlines()
    assert not any(line.endswith(" .") or " . " in line for line in unknown), "the current directory may be elsewhere"
    assert "df -h" in unknown and "df -i" in unknown
