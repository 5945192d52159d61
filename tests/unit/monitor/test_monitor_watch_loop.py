"""An event set by a signal handler while the same thread is about to wait for it."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from legroom.monitor.watch_loop import StopEvent


def test_it_is_an_event() -> None:
    stop = StopEvent()
    assert not stop.is_set() and not stop.wait(0) and not stop.wait(-1) and not stop.wait(0.01)
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(stop.wait(60))) for _ in range(3)]
    for thread in threads:
        thread.start()
    stop.set()
    for thread in threads:
        thread.join()
    assert woken == [True] * 3 and stop.is_set() and stop.wait() and isinstance(stop, threading.Event)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers that send signals here")
def test_a_handler_may_set_it_at_any_moment() -> None:
    """With threading.Event this hangs within a few hundred rounds."""
    rng = random.Random(5)
    before = signal.getsignal(signal.SIGALRM)
    try:
        for _ in range(1500):
            stop = StopEvent()
            signal.signal(signal.SIGALRM, lambda *_, one=stop: one.set())
            deadline = time.monotonic() + 60
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 4e-4))
            while not stop.wait(1e-6):
                assert time.monotonic() < deadline
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
