"""What is brought into a script that cannot be edited: our DataLoader, a limit on the card.

Covers: the environment that makes a Python child act once torch is imported. Does not cover: the acting itself
(inject/sitecustomize.py), and children that are not Python or run with -S, -I or -E.

Opt in, because it changes what the script's own import gives it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

LOADER = "LEGROOM_LOADER"


def with_loader(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which torch's DataLoader is replaced with ours."""
    return {**_injected(environment), LOADER: "legroom"}


def with_gpu_limit(environment: Mapping[str, str], amount: str) -> dict[str, str]:
    """The environment in which a child's card is limited once it starts CUDA; BadLimit for what makes no sense."""
    from legroom.gpu.memory_limit import with_limit  # only those who ask for it pay for the import

    return with_limit(_injected(environment), amount)


def _injected(environment: Mapping[str, str]) -> dict[str, str]:
    """With our sitecustomize in front; a PYTHONPATH that was there stays behind it."""
    ours = str(Path(__file__).with_name("inject"))
    source = str(Path(__file__).parents[2])  # where this very legroom is imported from
    old = environment.get("PYTHONPATH", "").split(os.pathsep)
    between = [entry for entry in old if entry and entry not in (ours, source)]
    return {**environment, "PYTHONPATH": os.pathsep.join([ours, *between, source])}
