"""Whether logging out empties /dev/shm.

Covers: logind's RemoveIPC, which deletes a user's files in /dev/shm when the last session of theirs ends,
running trainings or not. Does not cover: anything else of systemd.

systemd's order: the first of the main files counts, then the drop-ins of all directories sorted by their
name, where a name in /etc hides the same name in /run and /usr. Later settings win.
"""

from __future__ import annotations

from legroom.probe.host import Host
from legroom.words import say

_HOMES = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd", "/lib/systemd")
_LINGER = "/var/lib/systemd/linger"
_FIRST_PERSON = 1000  # below are system users, whom logind spares
_YES = frozenset({"1", "yes", "y", "true", "t", "on"})
_NO = frozenset({"0", "no", "n", "false", "f", "off"})


def removed_at_logout(host: Host) -> tuple[bool | None, str]:
    """Whether this user's files in /dev/shm go at their last logout, and how that is known."""
    uid = host.uid
    if uid is None:
        return None, say("this user has no numeric id")
    if not host.exists("/run/systemd/system"):
        return False, say("systemd does not run here (/run/systemd/system does not exist)")
    if uid < _FIRST_PERSON:
        return False, say("logind spares system users, and uid {uid} is one", uid=uid)
    removes, where = _setting(host)
    if not removes:
        return False, say("RemoveIPC=no ({where})", where=where)
    lingering = host.names(_LINGER)
    if lingering:
        name = _user_name(host, uid)
        if name is None:
            why = say("RemoveIPC=yes ({where}); uid {uid} has no name to look up", where=where, uid=uid)
            return None, say("{why} in {linger}", why=why, linger=_LINGER)
        if name in lingering:
            return False, say("{name} lingers ({linger}/{name} exists)", name=name, linger=_LINGER)
    return True, say("RemoveIPC=yes ({where}), and uid {uid} does not linger", where=where, uid=uid)


def _setting(host: Host) -> tuple[bool, str]:
    value, where = True, say("systemd's default")
    for home in _HOMES:
        path = f"{home}/logind.conf"
        text = host.text(path)
        if text is None:
            continue
        value, where = _default(text, path) or (value, where)
        if (set_here := parse(text)) is not None:
            value, where = set_here, path
        break
    drop_ins: dict[str, str] = {}
    for home in _HOMES:
        for name in host.names(f"{home}/logind.conf.d"):
            if name.endswith(".conf"):
                drop_ins.setdefault(name, f"{home}/logind.conf.d/{name}")
    for _, path in sorted(drop_ins.items()):
        if (set_here := parse(host.text(path) or "")) is not None:
            value, where = set_here, path
    return value, where


def parse(text: str) -> bool | None:
    """What a logind configuration sets RemoveIPC to; None where it does not."""
    found, section = None, ""
    for line in text.split("\n"):
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif section == "Login" and line[:1] not in ("#", ";"):
            key, equals, value = line.partition("=")
            if equals and key.rstrip() == "RemoveIPC":
                word = value.strip().lower()
                found = True if word in _YES else False if word in _NO else found
    return found


def _default(text: str, path: str) -> tuple[bool, str] | None:
    """The default this systemd was built with: the shipped file shows it as a comment, and some ship ``no``."""
    lines = text.split("\n")
    if not any("compile time defaults" in line or "compile-time defaults" in line for line in lines):
        return None
    shown = parse("\n".join(line.removeprefix("#") for line in lines if line[:2] in ("[L", "#R")))
    return None if shown is None else (shown, say("the default {path} shows", path=path))


def _user_name(host: Host, uid: int) -> str | None:
    for line in (host.text("/etc/passwd") or "").split("\n"):
        fields = line.split(":")
        if len(fields) > 2 and fields[2] == str(uid):
            return fields[0]
    if not host.live:
        return None
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name  # a user of a directory service is in no file
    except (ImportError, KeyError):
        return None
