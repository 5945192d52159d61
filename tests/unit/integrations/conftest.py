"""A fake watch, whose alarms the test sets, for guards."""

from __future__ import annotations

from typing import Any

import pytest
from integrations.fake_watch import FakeWatch

from legroom.integrations import guard as training_run_hooks


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> list[FakeWatch]:
    """The watches that guards have made."""
    made: list[FakeWatch] = []

    def watch(log: Any = None, *, interval: Any, on_alarm: Any) -> FakeWatch:
        made.append(FakeWatch(log, on_alarm))
        return made[-1]

    monkeypatch.setattr(training_run_hooks, "watch", watch)
    return made
