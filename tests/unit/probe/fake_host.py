"""A machine made of a few texts, for tests that need a layout no recorded tree has, or none at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legroom.probe.host_files_and_syscalls import Host

TREES = Path(__file__).parents[2] / "trees"
NAMES = sorted(path.parent.name for path in TREES.glob("*/recording.json"))


@dataclass(frozen=True)
class FakeHost(Host):
    """Files from a mapping of path to content; a path exists if it is one of them or above one."""

    root: Path = Path("/nonexistent")
    recording: Mapping[str, Any] | None = field(default_factory=dict)
    platform: str = "linux"
    files: Mapping[str, str | bytes] = field(default_factory=dict)

    def text(self, path: str) -> str | None:
        content = self.files.get(path)
        return content.decode("utf-8", "replace") if isinstance(content, bytes) else content

    def exists(self, path: str) -> bool:
        return any(name == path or name.startswith(path.rstrip("/") + "/") for name in self.files)


def tree(name: str) -> Host:
    """A recorded machine."""
    return Host.at(TREES / name)


def mount(point: str, root: str = "/", kind: str = "cgroup2", options: str = "rw") -> str:
    """One line of mountinfo."""
    return f"30 25 0:27 {root} {point} rw,relatime shared:9 - {kind} {kind} {options}\n"
