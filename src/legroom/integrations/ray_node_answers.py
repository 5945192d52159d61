"""What a node of a Ray cluster answers: its machine's memory and findings, its cache entries; a load by it alone."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from legroom.cache.cached_arrays_and_tables import CachedData
from legroom.cache.find_or_build_entry import OpenRequest, open_as, source_paths
from legroom.errors import LegroomError
from legroom.messages import say
from legroom.remote.object_url import redacted
from legroom.system.lazy_and_optional_imports import import_lock


def load_here(path: str, keys: tuple[str, ...] | None, backing: str, revalidate: bool) -> dict[str, Any]:
    """Load a source by this node alone: a path, or an object that cannot be read in parts."""
    begun = time.time()
    try:
        request = OpenRequest(source_paths(path), keys, backing, revalidate=revalidate)
        with open_as(CachedData, request) as data:
            entry = data.info
            fresh = entry.created is not None and entry.created >= begun
            return {
                "key": entry.key, "digest": f"{entry.hash} {entry.digest}", "bytes": entry.bytes,
                "read": entry.bytes if fresh else 0, "fresh": fresh,
            }  # fmt: skip
    except Exception as problem:
        return {"error": error_of(problem)}


def answer_here(what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Run one of the commands on this node."""
    try:
        return _ANSWERS[what](**arguments)
    except Exception as problem:
        return {"error": error_of(problem)}


def _doctor() -> dict[str, Any]:
    with import_lock:
        from legroom.advice.findings import findings
        from legroom.advice.safe_settings_for_doctor import safe_settings
        from legroom.probe.host_files_and_syscalls import Host
        from legroom.probe.snapshot import snapshot

    machine = snapshot(Host())
    return {
        "place": dataclasses.asdict(machine.runtime),
        "pools": [dataclasses.asdict(pool) for pool in machine.pools],
        "settings": [row.as_object() for row in safe_settings(machine)],
        "findings": [dataclasses.asdict(finding) for finding in findings(machine)],
    }


def _entries(what: str | Sequence[str] | None = None) -> dict[str, Any]:
    with import_lock:
        from legroom.cache.list_and_verify import listing

    found = listing(what)
    return {
        "entries": [dataclasses.asdict(entry) for entry in found.entries],
        "stores": [dataclasses.asdict(room) for room in found.rooms],
        "findings": [dataclasses.asdict(finding) for finding in found.findings],
    }


def _drop(what: str | Sequence[str] | None = None, force: bool = False) -> dict[str, Any]:
    with import_lock:
        from legroom.cache.drop_and_gc import drop
        from legroom.errors import NotLoaded

    try:
        gone = drop(what, force=force)
    except NotLoaded:
        return {"removed": [], "kept": [], "freed": 0}
    return {
        "removed": [dataclasses.asdict(entry) for entry in gone.entries],
        "kept": [dataclasses.asdict(entry) for entry in gone.kept],
        "freed": gone.freed,
    }


_ANSWERS: Mapping[str, Callable[..., dict[str, Any]]] = {"doctor": _doctor, "entries": _entries, "drop": _drop}


def error_of(problem: BaseException) -> dict[str, Any]:
    """An error as a plain object, without credentials."""
    if isinstance(problem, LegroomError):
        return problem.as_dict()
    if isinstance(problem, ModuleNotFoundError) and "legroom" in str(problem):
        return {
            "code": "missing-package",
            "message": say("Legroom is not installed on this node"),
            "why": redacted(str(problem)),
            "fix": ["pip install legroom"],
        }
    return {"code": "node-failed", "message": redacted(str(problem)) or type(problem).__name__, "why": "", "fix": []}
