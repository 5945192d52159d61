"""Remembers between runs the settings that worked, for ``legroom.tune`` and ``legroom run``; by which script and data.

One small JSON file per dataset or command in the user's state directory, replaced as a whole. What cannot be read or
written is not remembered: that must not stop a training run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from legroom.errors import UsageError
from legroom.messages import say
from legroom.records.loader_settings_and_flags import LoaderSettings, read_settings
from legroom.records.machine import Machine
from legroom.records.settings_and_overrides import Settings
from legroom.system.atomic_file import PRIVATE, replace_file
from legroom.system.lazy_and_optional_imports import lazy_import

_SCHEMA = "legroom.settings/1"

UsedBy = Literal["settings", "run"]  # directory: of `legroom.tune`, of `legroom run`


@dataclass(frozen=True, slots=True)
class Remembered:
    """Settings that worked, and the sizes in bytes of the memory pools they worked in, where these were kept."""

    settings: LoaderSettings
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    asked: LoaderSettings = field(default_factory=LoaderSettings)  # what the user had asked for, of `legroom run`


def remember(
    used_by: UsedBy,
    key: str,
    settings: LoaderSettings,
    sizes: Mapping[str, int | None] | None = None,
    environment: Mapping[str, str] = os.environ,
    asked: LoaderSettings | None = None,
) -> bool:
    """Save the settings; False where that fails."""
    body = {"schema": _SCHEMA, "when": time.time(), "settings": settings.given(), "sizes": dict(sizes or {})}
    if asked is not None:
        body["asked"] = asked.given()
    try:
        path = _path(used_by, key, environment)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, json.dumps(body), mode=PRIVATE)
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return False
    return True


def recall(used_by: UsedBy, key: str, environment: Mapping[str, str] = os.environ) -> Remembered | None:
    """The saved settings; None where there are none, or they cannot be read."""
    try:
        body = json.loads(_path(used_by, key, environment).read_text(encoding="utf-8"))
        # Earlier files: ``key`` beside the settings, or ``values`` in place of ``settings`` and no schema.
        if body.get("schema", _SCHEMA) != _SCHEMA or body.get("key", key) != key:
            return None
        kept = read_settings(body["settings"] if "settings" in body else body["values"])
        asked = read_settings(body.get("asked", {}))
        return Remembered(kept, dict(body.get("sizes", {})), asked) if kept.given() else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, UsageError):
        return None


def recall_on(
    machine: Machine, used_by: UsedBy, key: str, environment: Mapping[str, str] = os.environ
) -> Remembered | None:
    """The saved settings; None on a machine with more /dev/shm or RAM: what the user has written may fit there."""
    found = recall(used_by, key, environment)
    if found is None:
        return None
    now, then = pool_sizes(machine), found.sizes
    if any(now[name] is None or then.get(name) is None or now[name] > then[name] for name in now):  # type: ignore[operator]
        return None
    return found


def pool_sizes(machine: Machine) -> dict[str, int | None]:
    """The sizes with which settings are remembered."""
    pools = {name: machine.pool(name) for name in ("shm", "ram")}
    return {name: None if pool is None else pool.size for name, pool in pools.items()}


def forget(used_by: UsedBy, key: str, environment: Mapping[str, str] = os.environ) -> None:
    """Delete the saved settings."""
    with contextlib.suppress(OSError, RuntimeError):
        _path(used_by, key, environment).unlink()


def _path(used_by: UsedBy, key: str, environment: Mapping[str, str]) -> Path:
    home = environment.get("XDG_STATE_HOME") or environment.get("LOCALAPPDATA")
    folder = Path(home) if home else Path.home() / ".local" / "state"
    return folder / "legroom" / used_by / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def named_key(spec: str) -> str:
    """The key under which a named dataset is remembered: the working directory and its name."""
    return key_of(spec, script=os.getcwd())


def last_named(spec: str) -> Settings | None:
    """The last settings that worked for that dataset from this directory."""
    return last_settings(named_key(spec))


def key_of(dataset: Any, script: str | None = None) -> str:
    """What settings are remembered by: the script that runs, and the dataset's class and length or its name."""
    if script is None:
        script = os.path.abspath(getattr(sys.modules.get("__main__"), "__file__", None) or os.getcwd())
    if isinstance(dataset, str):
        return f"{script} {dataset}"
    rows = None
    with contextlib.suppress(Exception):  # the measurement reports the error
        rows = lazy_import("legroom.loader.measure.import_dataset").length(dataset)
    kind = type(dataset)
    return f"{script} {kind.__module__}.{kind.__qualname__} {rows}"


def last_settings(key: str) -> Settings | None:
    """The settings that worked last, each with that reason."""
    found = recall("settings", key)
    if found is None or found.settings.batch_size is None:
        return None
    kept = found.settings.given()
    why = {name: say("{name} {value}: worked last time", name=name, value=value) for name, value in kept.items()}
    return Settings(**kept, why=why)
