"""The names that are private on this machine.

Covers: users, hosts, homes, the values of variables that hold secrets; read where the machine keeps them.
Does not cover: hiding them (redact.py).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping

from legroom.probe.host import Host
from legroom.report.patterns import SECRET_NAME
from legroom.report.redact import Known

_FIRST_PERSON = 1000  # lower user ids are services'
_MOST_PEOPLE = 5000
_WHO = ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "LNAME", "SLURM_JOB_USER")
_WHERE = (
    "HOSTNAME",
    "COMPUTERNAME",
    "MASTER_ADDR",
    "SLURMD_NODENAME",
    "SLURM_SUBMIT_HOST",
    "HOST",
    "NODE_NAME",
)
_SYSTEM = ("/root", "/nonexistent", "/var/", "/usr/", "/dev/", "/run/", "/bin", "/sbin", "/proc", "/etc/")


def known(host: Host, files: Iterable[str] = ()) -> Known:
    """What must not be told, as far as this machine says who and what is on it."""
    people = dict(_people(host))
    users = {name for name in people if name} | {host.env.get(name, "") for name in _WHO}
    homes = {home for name, home in people.items() if _tells(home, name)}
    return Known(
        users=frozenset(users - {""}),
        hosts=frozenset(_hosts(host)),
        homes=frozenset(homes),
        files=frozenset(re.split(r"[/\\]", path.rstrip("/\\"))[-1] for path in files) - {""},
        secrets=frozenset(_secrets(host.env)),
    )


def _people(host: Host) -> Iterator[tuple[str, str]]:
    """(name, home) of everybody who is a person, and of whoever runs this."""
    for line in (host.text("/etc/passwd") or "").splitlines()[:_MOST_PEOPLE]:
        fields = line.split(":")
        if len(fields) >= 6 and fields[2].isdecimal():
            uid = int(fields[2])
            if (uid >= _FIRST_PERSON and fields[0] != "nobody") or uid == host.uid:
                yield fields[0], fields[5]
    home = host.env.get("HOME") or host.env.get("USERPROFILE")
    name = next((host.env[one] for one in _WHO if host.env.get(one)), "")
    if home:
        yield name or re.split(r"[/\\]", home.rstrip("/\\"))[-1], home
    if host.live and name == "":
        # A directory service may know what /etc/passwd does not.
        try:
            import pwd

            entry = pwd.getpwuid(os.geteuid())
        except (ImportError, KeyError):
            return
        yield entry.pw_name, entry.pw_dir


def _tells(home: str, name: str) -> bool:
    """Whether the home has to be hidden as a whole: it is a person's, and the person's name is not in it."""
    deep = len([part for part in re.split(r"[/\\]", home) if part]) >= 2
    return deep and not (home + "/").startswith(_SYSTEM) and name.casefold() not in home.casefold()


def _hosts(host: Host) -> Iterator[str]:
    names = [host.env.get(name, "") for name in _WHERE]
    names += [host.text("/etc/hostname") or "", host.text("/proc/sys/kernel/hostname") or ""]
    if host.live:
        names.append(socket.gethostname())
    for name in names:
        whole = name.strip()
        if whole and not whole.replace(".", "").isdigit():
            yield whole
            yield whole.partition(".")[0]


def _secrets(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        # Numbers and paths under such names are settings (SSH_AUTH_SOCK, *_KEY_FILE): the path's names go otherwise.
        if SECRET_NAME.fullmatch(name) and len(value) >= 6 and not value.startswith("/"):
            yield value
