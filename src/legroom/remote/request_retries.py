"""Repeat a request that failed: which failures are worth it, how often, and with which pauses.

Failures are counted from zero once new bytes have arrived: a connection that is cut again and again, but brings data
each time, is repeated until all of it is there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from legroom.errors import LegroomError, RemoteError, RemoteTimeout, RemoteUnreachable, ShortRead

ATTEMPTS = 6
_TIMEOUTS = 3  # each takes long by itself
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0


class CallerFailed(Exception):
    """What was received could not be kept: no fault of the server's."""


def retried(
    attempt: Callable[[], Any],
    as_error: Callable[[Exception], LegroomError],
    progress: Callable[[], int],
    interrupted: Callable[[], bool],
    sleep: Callable[[float], None],
) -> Any:
    """Repeat the attempt with growing pauses. Progress in between starts the count again.

    Args:
        attempt: The request.
        as_error: The error, without credentials, for what a library raised.
        progress: How many bytes have arrived.
        interrupted: Whether the caller has given up.
        sleep: Waits that many seconds.
    """
    failed = timeouts = 0
    while True:
        before = progress()
        try:
            return attempt()
        except CallerFailed:
            raise
        except Exception as raised:
            problem = as_error(raised)
        # Raised outside the handler: what the library raised may have credentials in its text.
        if progress() > before:
            failed = timeouts = 0
        failed += 1
        timeouts += isinstance(problem, RemoteTimeout)
        if interrupted() or not is_transient(problem) or failed >= ATTEMPTS or timeouts >= _TIMEOUTS:
            raise problem
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (failed - 1))
        sleep(pause * random.uniform(0.5, 1.0))


def is_transient(problem: LegroomError) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(problem, (RemoteTimeout, RemoteUnreachable, ShortRead)):
        return True
    return type(problem) is RemoteError and (problem.status is None or problem.status >= 500 or problem.status == 429)
