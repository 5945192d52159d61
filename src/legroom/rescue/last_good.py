"""The settings with which a command last finished.

Covers: keeping them per command and working directory, and giving them back where the box is no larger than it was.
Does not cover: settings that tune chose (those are kept with the measurements they rest on).

Kept in $XDG_STATE_HOME/legroom/run (~/.local/state by default), one small file a command. A box that has more /dev/shm
or RAM now than then gets the command as it was written: what did not fit may fit now.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from legroom.model import Box
from legroom.rescue.flags import LEVERS, Named, find
from legroom.system.atomic_file import PRIVATE, replace_file


def state_folder(environment: Mapping[str, str]) -> Path:
    """Where such files are kept."""
    base = environment.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "legroom" / "run"


def key_of(command: Sequence[str], named: Sequence[Named], folder: str) -> str:
    """The same for one command whatever the values of its levers."""
    words: list[str | None] = list(command)
    for name, flag in find(command, named).items():
        if name in LEVERS and flag.at >= 0:
            joined = "=" in command[flag.at]
            words[flag.at] = f"<{name}>"
            if not joined and flag.at + 1 < len(words) and words[flag.at + 1] == flag.value:
                words[flag.at + 1] = None
    text = json.dumps([folder, *words])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def keep(folder: Path, key: str, values: Mapping[str, int | bool], box: Box) -> None:
    """Remember that these worked here. A state directory that cannot be written is no reason to fail."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = json.dumps({"values": dict(values), "sizes": _sizes(box)})
        replace_file(folder / f"{key}.json", text, mode=PRIVATE)


def forget(folder: Path, key: str) -> None:
    """The command works as it is written."""
    with contextlib.suppress(OSError):
        (folder / f"{key}.json").unlink()


def recall(folder: Path, key: str, box: Box) -> dict[str, int | bool]:
    """What worked last, where the box has not grown since; empty where nothing is known."""
    try:
        record = json.loads((folder / f"{key}.json").read_text())
        values, sizes = dict(record["values"]), dict(record["sizes"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    now = _sizes(box)
    if any(now[name] is None or sizes.get(name) is None or now[name] > sizes[name] for name in now):
        return {}
    return {name: value for name, value in values.items() if name in LEVERS and isinstance(value, int)}


def _sizes(box: Box) -> dict[str, int | None]:
    pools = {name: box.pool(name) for name in ("shm", "ram")}
    return {name: None if pool is None else pool.size for name, pool in pools.items()}
