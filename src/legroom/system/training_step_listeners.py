"""Steps of a training loop, reported to every listener: `legroom.leak` follows memory from step to step.

``legroom.step()`` is for scripts whose steps cannot be seen from outside. Without a listener a call costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from legroom.system.lazy_and_optional_imports import import_lock

Listener = Callable[[str, int], None]  # source of the step, how many
listeners: list[Listener] = []


def step(count: int = 1) -> None:
    """Count a training step, or several: for `legroom leak`, where it cannot see your steps by itself.

    Steps are seen by themselves where the script calls ``optimizer.step()`` or takes batches from a DataLoader.

    Args:
        count: How many steps were made since the last call.
    """
    if listeners:
        if type(count) is not int:
            count = _checked(count)
        for listener in listeners:
            listener("script", count)


def _checked(count: object) -> int:
    with import_lock:
        from legroom.system.argument_checks import check_integer  # rare: a script may only count its steps

    return check_integer("count", count, 0)


def batch_taken() -> None:
    """A loader of Legroom has handed out a batch."""
    for listener in listeners:
        listener("loader", 1)


def listen(listener: Listener) -> None:
    """Call it at each step from now on."""
    listeners.append(listener)


def stop_listening(listener: Listener) -> None:
    """Do not call it any more."""
    if listener in listeners:
        listeners.remove(listener)
