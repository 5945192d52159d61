"""The effects of building and reaping, named as they happen.

Covers: telling a listener which step comes next. Does not cover: what a step does.

Every effect that other processes can see is preceded by ``step(name)``. It goes to the debug log of
``legroom.cache`` and to ``trace`` where somebody has set it: what the file system holds is legal at every one
of these points, and the tests prove it by ending the process there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("legroom.cache")

trace: Callable[[str], None] | None = None

# In the order of a cold start.
BUILD_STEPS = (
    "elected", "work", "reserve", "read", "allocate", "write", "written", "seal", "lease", "manifest",
    "publish", "record", "recorded", "done",
)  # fmt: skip
REAP_STEPS = ("hold", "trash", "delete", "unlock", "removed")


def step(name: str) -> None:
    """Say that ``name`` is about to happen."""
    if trace is not None:
        trace(name)
    log.debug("%s", name)
