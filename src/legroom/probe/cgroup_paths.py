"""Find the cgroups of a process: its own directory and those above it, as far as they are visible.

Handles v1, v2 and both side by side, mounts that show only a part of the hierarchy, and cgroup namespaces.

The mounts are the reader's own, not those of ``pid``. The files are opened from here, and the kernel writes both the
paths in /proc/<pid>/cgroup and the roots in mountinfo relative to the reader's namespace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from legroom.messages import say
from legroom.probe.filesystem import Mount, mounted_at, mounts
from legroom.probe.host import Host

Version = Literal["v1", "v2"]
UNIFIED = ""  # selects the v2 hierarchy whatever its controllers: PSI is there even if memory is v1

# Files that every cgroup except the machine's root has.
_NOT_IN_ROOT = ("cgroup.type", "cgroup.events", "memory.max")


@dataclass(frozen=True, slots=True)
class Group:
    """The cgroup of one process in one hierarchy."""

    version: Version | None  # None: there is no such cgroup, or it cannot be found
    chain: tuple[str, ...]  # directories: its own first, then its visible parents
    above_hidden: bool | None  # the last of the chain is not the machine's root
    reason: str | None = None  # why it is unknown, or why a parent was read instead

    @property
    def is_root(self) -> bool:
        """Whether the process is in the machine's root cgroup."""
        return len(self.chain) == 1 and not self.above_hidden


def cgroup(host: Host, controller: str, pid: str = "self") -> Group:
    """The cgroup of ``pid`` for ``controller`` (memory, cpu)."""
    file = f"/proc/{pid}/cgroup"
    membership = _membership(host.text(file) or "", controller)
    if membership is None:
        return Group(None, (), None, host.why(file))
    version, path = membership
    seen = _hierarchy_mounts(host, version, controller)
    if not seen:
        name = "cgroup v2" if version == "v2" else f"cgroup v1 {controller}"
        return Group(None, (), None, say("{name} is not mounted here", name=name))
    found = [_locate(host, version, mount, path) for mount in seen]
    # Of several mounts the best shows the process's own cgroup, then most of its parents.
    return max(found, key=lambda group: (bool(group.chain), group.reason is None, len(group.chain)))


def _membership(text: str, controller: str) -> tuple[Version, str] | None:
    """Which hierarchy the controller is in and the process's path there: lines are ``id:controllers:path``."""
    unified: str | None = None
    for line in text.split("\n"):
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or not number.isdecimal() or not path.startswith("/"):
            continue
        if controller and controller in controllers.split(","):
            return "v1", path
        if number == "0" and not controllers:
            unified = path
    return ("v2", unified) if unified is not None else None


def _hierarchy_mounts(host: Host, version: Version, controller: str) -> list[Mount]:
    # With another root than "/", this process's mounts are not those of that machine; use init's.
    first = ("self",) if host.recording is not None or str(host.root) == "/" else ("1", "self")
    found = next((listing for pid in first if (listing := mounts(host, pid))), [])
    seen = [mount for mount in found if mounted_at(found, mount.point) is mount]
    if version == "v2":
        return [mount for mount in seen if mount.kind == "cgroup2"]
    return [mount for mount in seen if mount.kind == "cgroup" and controller in mount.super_options]


def _locate(host: Host, version: Version, mount: Mount, path: str) -> Group:
    root = _parts(mount.root)
    inside, reason = _inside(root, _parts(path)), None
    if inside is None:
        reason = say("{path} is outside the mount at {point}", path=path, point=mount.point)
        return Group(None, (), None, reason)
    if _unnamed(root, _parts(path)):
        reason = say("the cgroup namespace hides the path of this cgroup below {point}", point=mount.point)
    names = list(inside)
    top = mount.point.rstrip("/")
    while names and not host.exists("/".join((top, *names))):
        # A removed cgroup reads "/gone (deleted)". Its parents still exist and still limit.
        gone = "/".join((top, *names))
        reason = reason or say("{path} does not exist; its parent cgroup was read instead", path=gone)
        names.pop()
    chain = tuple("/".join((top, *names[:depth])) for depth in range(len(names), -1, -1))
    hidden = any(part != ".." for part in root) or _not_the_root(host, version, chain[-1])
    return Group(version, chain, hidden, reason)


def _inside(root: list[str], path: list[str]) -> list[str] | None:
    """The path below the mount's root; None where it is not below it."""
    if _unnamed(root, path):
        return []
    rest = path[len(root) :]
    return rest if path[: len(root)] == root and ".." not in rest else None


def _unnamed(root: list[str], path: list[str]) -> bool:
    """Whether the mount starts above the namespace's root, so that the path from there is unknown."""
    return bool(root) and all(part == ".." for part in root) and path[: len(root)] != root


def _not_the_root(host: Host, version: Version, top: str) -> bool:
    if version == "v1":
        return not host.exists(f"{top}/release_agent")
    return any(host.exists(f"{top}/{name}") for name in _NOT_IN_ROOT)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]
