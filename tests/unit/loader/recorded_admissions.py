"""Every admission of a DataLoader's workers, as it was asked for and as it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from legroom.advice.memory_need import Each
from legroom.loader.dataloader import dataloader
from legroom.loader.dataloader.admit_workers_by_memory import Admission


@dataclass(frozen=True)
class Asked:
    """One epoch's start."""

    known: Each | None  # a worker's memory, as measured in an earlier epoch
    admission: Admission | None


def record_admissions(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """A list to which each start of an epoch is added from now on."""
    asked: list[Asked] = []
    admission_for: Any = dataloader.admission_for

    def recorded(workers: int, method: str, init_fn: Any, known: Each | None, *more: Any, **named: Any) -> Any:
        asked.append(Asked(known, admission_for(workers, method, init_fn, known, *more, **named)))
        return asked[-1].admission

    monkeypatch.setattr(dataloader, "admission_for", recorded)
    return asked
