"""Remembers the last settings that worked, between runs.

One small JSON file for each pair of script and dataset, in the user's state directory, replaced as a whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legroom.errors import UsageError
from legroom.loader.measure.draw import length
from legroom.records import Settings
from legroom.records.settings import checked
from legroom.system.atomic_file import PRIVATE, replace_file
from legroom.words import say

_SCHEMA = "legroom.settings/1"


def key_of(dataset: Any, script: str | None = None) -> str:
    """The script that runs, and the dataset's class and length or its name."""
    if script is None:
        script = os.path.abspath(getattr(sys.modules.get("__main__"), "__file__", None) or os.getcwd())
    if isinstance(dataset, str):
        return f"{script} {dataset}"
    rows = None
    with contextlib.suppress(Exception):  # the measurement reports the error
        rows = length(dataset)
    kind = type(dataset)
    return f"{script} {kind.__module__}.{kind.__qualname__} {rows}"


def remember(key: str, settings: Settings, environment: Mapping[str, str] = os.environ) -> bool:
    """Save the settings; False where that fails, which must not stop a training run."""
    path = _path(key, environment)
    kept = {name: value for name, value in settings.values().items() if value is not None}
    body = {"schema": _SCHEMA, "key": key, "when": time.time(), "settings": kept}
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, json.dumps(body), mode=PRIVATE)
    except OSError:
        return False
    return True


def recall(key: str, environment: Mapping[str, str] = os.environ) -> Settings | None:
    """The saved settings; None where there are none, or they cannot be read."""
    try:
        body = json.loads(_path(key, environment).read_text(encoding="utf-8"))
        if body["schema"] != _SCHEMA or body["key"] != key:
            return None
        kept = checked(body["settings"])
        why = {
            name: say("{name} {value}: worked last time", name=name, value=value)
            for name, value in kept.items()
        }
        return Settings(**kept, why=why)
    except (OSError, ValueError, KeyError, TypeError, UsageError):
        return None


def _path(key: str, environment: Mapping[str, str]) -> Path:
    home = environment.get("XDG_STATE_HOME") or environment.get("LOCALAPPDATA")
    folder = Path(home) if home else Path.home() / ".local" / "state"
    return folder / "legroom" / "settings" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
