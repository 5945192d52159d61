"""Names that are private on this machine: users, hosts, home directories, values of secret variables.

They are read where the machine keeps them; redact.py hides them.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping

from legroom.probe.host_files_and_syscalls import Host
from legroom.report.redact import SECRET_NAME, Identities

_FIRST_PERSON = 1000  # lower user ids belong to services
_MOST_USERS = 5000
_USER_VARIABLES = ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "LNAME", "SLURM_JOB_USER")
_HOST_VARIABLES = (
    "HOSTNAME",
    "COMPUTERNAME",
    "MASTER_ADDR",
    "SLURMD_NODENAME",
    "SLURM_SUBMIT_HOST",
    "HOST",
    "NODE_NAME",
)
_SYSTEM = ("/root", "/nonexistent", "/var/", "/usr/", "/dev/", "/run/", "/bin", "/sbin", "/proc", "/etc/")


def identities(host: Host, files: Iterable[str] = ()) -> Identities:
    """The private names that this machine knows; ``files`` are paths of data files."""
    homes_by_user = dict(_users(host))
    users = {name for name in homes_by_user if name} | {host.env.get(name, "") for name in _USER_VARIABLES}
    homes = {home for name, home in homes_by_user.items() if _is_personal(home, name)}
    return Identities(
        users=frozenset(users - {""}),
        hosts=frozenset(_hosts(host)),
        homes=frozenset(homes),
        files=frozenset(re.split(r"[/\\]", path.rstrip("/\\"))[-1] for path in files) - {""},
        secrets=frozenset(_secrets(host.env)),
    )


def _users(host: Host) -> Iterator[tuple[str, str]]:
    """(name, home directory) of every user who is a person, and of the user who runs this."""
    for line in (host.text("/etc/passwd") or "").splitlines()[:_MOST_USERS]:
        fields = line.split(":")
        if len(fields) >= 6 and fields[2].isdecimal():
            uid = int(fields[2])
            if (uid >= _FIRST_PERSON and fields[0] != "nobody") or uid == host.uid:
                yield fields[0], fields[5]
    home = host.env.get("HOME") or host.env.get("USERPROFILE")
    name = next((host.env[one] for one in _USER_VARIABLES if host.env.get(one)), "")
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


def _is_personal(home: str, name: str) -> bool:
    """Whether the whole path has to be hidden: it is a person's, and does not contain the person's name."""
    deep = len([part for part in re.split(r"[/\\]", home) if part]) >= 2
    return deep and not (home + "/").startswith(_SYSTEM) and name.casefold() not in home.casefold()


def _hosts(host: Host) -> Iterator[str]:
    names = [host.env.get(name, "") for name in _HOST_VARIABLES]
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
        # Paths under such names are settings (SSH_AUTH_SOCK, *_KEY_FILE); names in them are hidden as in any path.
        if SECRET_NAME.fullmatch(name) and len(value) >= 6 and not value.startswith("/"):
            yield value
