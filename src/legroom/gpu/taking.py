"""A model, a sample and an optimizer that do not make a step: said as such.

Covers: what can be seen before the step, and what the model itself says in it. Does not cover: steps whose shapes
depend on their data (tracing.Unknowable), memory that runs out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from legroom.errors import LegroomError, UsageError
from legroom.words import say

_FAKE = "torch._subclasses.fake_tensor"  # writes a page about every operation that refuses its arguments


def check_step(model: Any, optimizer: Any) -> None:
    """UsageError for what cannot be a model or an optimizer."""
    if not callable(getattr(model, "named_parameters", None)) or isinstance(model, type):
        raise UsageError(
            say("{given!r} is no model", given=model),
            why=say("a torch.nn.Module is needed, not {kind}", kind=_kind(model)),
            fix=(say("give the model itself, as it is trained"),),
        )
    if optimizer is not None and not isinstance(getattr(optimizer, "param_groups", None), list):
        raise UsageError(
            say("{given!r} is no optimizer", given=optimizer),
            why=say("a torch.optim.Optimizer on the model's parameters is needed, not {kind}",
                    kind=_kind(optimizer)),
            fix=(say("optimizer=torch.optim.AdamW(model.parameters()); None where there is no state"),),
        )  # fmt: skip


@contextmanager
def step_taken(*passed_on: type[BaseException]) -> Iterator[None]:
    """UsageError with the cause where model, loss or optimizer refuse what they are given."""
    import torch

    others: tuple[type[BaseException], ...] = (LegroomError, torch.OutOfMemoryError, *passed_on)
    try:
        yield
    except others:
        raise
    except Exception as problem:
        words = str(problem).strip().partition("\n")[0]
        raise UsageError(
            say("the model cannot take a step on this sample"),
            why=say("{kind}: {problem}", kind=type(problem).__name__, problem=words),
            fix=(say("give a batch that model(sample) takes, and loss= where its output is no loss"),),
        ) from problem


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """No log of operations that refuse fake tensors: the exception says it."""
    log, silent = logging.getLogger(_FAKE), _Silent()
    log.addFilter(silent)
    try:
        yield
    finally:
        log.removeFilter(silent)


class _Silent(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return False


def _kind(value: Any) -> str:
    return say("class") if isinstance(value, type) else type(value).__name__
