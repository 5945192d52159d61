"""Whether logging out empties /dev/shm."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import TREES
from fake_machine import FakeMachine
from hypothesis import given
from hypothesis import strategies as st

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.shm import parse_remove_ipc, removed_at_logout, shm

YES, NO = "[Login]\nRemoveIPC=yes\n", "[Login]\nRemoveIPC=no\n"
SHIPPED = "# Entries in this file show the compile time defaults. Local configuration\n[Login]\n#RemoveIPC={}\n"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    staged = FakeMachine(tmp_path)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    staged.text("/etc/passwd", "root:x:0:0::/root:/bin/sh\nana:x:1000:1000::/home/ana:/bin/sh\n")
    return staged


def test_the_default_is_yes(machine: FakeMachine) -> None:
    assert removed_at_logout(machine.host) == (
        True,
        "RemoveIPC=yes (systemd's default), and lingering is off for uid 1000",
    )


@pytest.mark.parametrize(
    ("files", "removed", "where"),
    [
        ({"/etc/systemd/logind.conf": NO}, False, "/etc/systemd/logind.conf"),
        ({"/usr/lib/systemd/logind.conf": NO}, False, "/usr/lib/systemd/logind.conf"),
        # Of the main files only the first counts.
        ({"/etc/systemd/logind.conf": "[Login]\n", "/usr/lib/systemd/logind.conf": NO}, True, "default"),
        # Drop-ins come after, by name whatever their directory.
        ({"/etc/systemd/logind.conf": YES, "/usr/lib/systemd/logind.conf.d/10-a.conf": NO}, False, "10-a.conf"),
        (
            {"/etc/systemd/logind.conf.d/10-a.conf": NO, "/usr/lib/systemd/logind.conf.d/20-b.conf": YES},
            True,
            "/usr/lib/systemd/logind.conf.d/20-b.conf",
        ),
        # The same name in /etc hides the others, even if it says nothing.
        ({"/etc/systemd/logind.conf.d/10-a.conf": "", "/run/systemd/logind.conf.d/10-a.conf": NO}, True, "default"),
        (
            {"/run/systemd/logind.conf.d/a.conf": NO, "/usr/lib/systemd/logind.conf.d/a.conf": YES},
            False,
            "/run/systemd/logind.conf.d/a.conf",
        ),
        ({"/etc/systemd/logind.conf.d/a.conf.bak": NO}, True, "default"),
        # Some systems are built with "no", and their shipped file shows it.
        ({"/etc/systemd/logind.conf": SHIPPED.format("no")}, False, "the default shown in /etc/systemd/logind.conf"),
        ({"/etc/systemd/logind.conf": SHIPPED.format("yes")}, True, "the default shown in /etc/systemd/logind.conf"),
        ({"/etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, True, "systemd's default"),
    ],
)
def test_systemds_order(machine: FakeMachine, files: dict[str, str], removed: bool, where: str) -> None:
    for path, text in files.items():
        machine.text(path, text)
    found, how = removed_at_logout(machine.host)
    assert found is removed
    assert where in how


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[Login]\nRemoveIPC=no", False),
        ("[Login]\nRemoveIPC = Off \n", False),
        ("[Login]\nRemoveIPC=1\n", True),
        ("RemoveIPC=no", None),
        ("[Sleep]\nRemoveIPC=no", None),
        ("[Login]\n;RemoveIPC=no\n#RemoveIPC=no", None),
        ("[Login]\nRemoveIPC=perhaps", None),
        ("[Login]\nRemoveIPC=no\n[Other]\nx=1\n[Login]\nRemoveIPC=yes", True),
    ],
)
def test_parse(text: str, value: bool | None) -> None:
    assert parse_remove_ipc(text) is value


@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    assert parse_remove_ipc(text) in (True, False, None)


def test_a_lingering_user_keeps_them(machine: FakeMachine) -> None:
    machine.text("/var/lib/systemd/linger/ana", "")
    removed, how = removed_at_logout(machine.host)
    assert removed is False
    assert "lingering is on for ana" in how


def test_another_users_lingering_does_not_help(machine: FakeMachine) -> None:
    machine.text("/var/lib/systemd/linger/bob", "")
    assert removed_at_logout(machine.host)[0] is True


def test_a_user_without_a_name_where_another_lingers_is_unknown(machine: FakeMachine) -> None:
    machine.text("/var/lib/systemd/linger/bob", "")
    machine.uid = 4242
    removed, how = removed_at_logout(machine.host)
    assert removed is None
    assert "4242 has no user name" in how


@pytest.mark.parametrize("uid", [0, 33, 999])
def test_system_users_are_spared(machine: FakeMachine, uid: int) -> None:
    machine.uid = uid
    assert removed_at_logout(machine.host)[0] is False


def test_without_systemd_nothing_is_removed(tmp_path: Path) -> None:
    removed, how = removed_at_logout(FakeMachine(tmp_path).host)
    assert removed is False
    assert "systemd is not running" in how


def test_recorded_machines() -> None:
    found = shm(Host.at(TREES / "bare-v2"))
    assert (found.removed_at_logout, found.removed_how != "") == (True, True)
    assert shm(Host.at(TREES / "docker-v2")).removed_at_logout is False
