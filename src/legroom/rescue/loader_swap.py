"""Our DataLoader under a script that cannot be edited: `legroom run --loader legroom`.

Covers: the environment that makes a Python child replace torch's DataLoader once torch is imported. Does not cover: the
replacing itself (inject/sitecustomize.py), and children that are not Python or run with -S, -I or -E.

Opt in, because it changes what the script's own import gives it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SWITCH = "LEGROOM_LOADER"


def with_loader(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the replacement switched on; a PYTHONPATH that was there stays behind ours."""
    ours = str(Path(__file__).with_name("inject"))
    source = str(Path(__file__).parents[2])  # where this very legroom is imported from
    old = environment.get("PYTHONPATH")
    parts = [ours, *([old] if old else []), source]
    return {**environment, "PYTHONPATH": os.pathsep.join(parts), SWITCH: "legroom"}
