"""A watch that a test plays, for guards."""

from __future__ import annotations

from typing import Any

import pytest
from integrations.guard_stage import StagedWatch

from legroom.integrations import guard


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> list[StagedWatch]:
    """The watches that guards have made."""
    made: list[StagedWatch] = []

    def watch(log: Any = None, *, interval: Any, on_alarm: Any) -> StagedWatch:
        made.append(StagedWatch(log, on_alarm))
        return made[-1]

    monkeypatch.setattr(guard, "watch", watch)
    return made
