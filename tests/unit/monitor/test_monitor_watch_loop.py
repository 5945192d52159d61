"""An event set by a signal handler while the same thread is about to wait for it, and an output that is not read."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from legroom.monitor import watch_loop
from legroom.monitor.watch_loop import BackgroundOutput, StopEvent
from legroom.records.watch_sample import Moment
from watch_runs import moments


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


class Unread:
    """An output that is not read until ``read`` is set."""

    def __init__(self) -> None:
        self.begun, self.read, self.shown, self.closed = threading.Event(), threading.Event(), [0.0], False

    def show(self, moment: Moment) -> None:
        self.begun.set()
        assert self.read.wait(60)
        self.shown.append(moment.sample.clock)

    def close(self) -> None:
        self.closed = True


def test_an_output_that_is_not_read_loses_samples_and_delays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_loop, "_MOST_WAITING", 3)
    said: list[str] = []
    unread, (first, *others) = Unread(), list(moments(12))[1:]
    output = BackgroundOutput(unread, StopEvent(), said.append)

    def feed() -> None:
        for moment in others:
            output.show(moment)

    output.show(first)
    assert unread.begun.wait(60)  # the first is being written, so three of the others can wait
    feeding = threading.Thread(target=feed, daemon=True)
    feeding.start()
    feeding.join(20)
    try:
        assert not feeding.is_alive(), "it waits for the reader"
        assert unread.shown == [0.0] and said == []
    finally:
        unread.read.set()
    deadline = time.monotonic() + 60
    while len(unread.shown) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    output.show(others[-1])
    output.close()
    assert unread.shown == [0.0, 1.0, 2.0, 3.0, 4.0, 11.0] and unread.closed
    assert said == ["7 readings dropped: the output is not read fast enough"]


def test_dropped_readings_are_reported_at_the_end_where_the_reader_stays_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_loop, "_MOST_WAITING", 3)
    monkeypatch.setattr(watch_loop, "_LAST_WAIT", 0.1)
    stuck, said, stop = Unread(), list[str](), StopEvent()
    output = BackgroundOutput(stuck, stop, said.append)
    for moment in moments(9):
        output.show(moment)
        assert stuck.begun.wait(60)  # the first is being written, three wait
    stop.set()
    output.close()
    stuck.read.set()
    assert said == ["5 readings dropped: the output is not read fast enough"]


def test_a_stopped_watch_does_not_wait_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_loop, "_LAST_WAIT", 0.1)
    unread, stop = Unread(), StopEvent()
    output = BackgroundOutput(unread, stop, print)
    output.show(next(moments(1)))
    assert unread.begun.wait(60)
    stop.set()
    closing = threading.Thread(target=output.close, daemon=True)
    closing.start()
    closing.join(20)
    try:
        assert not closing.is_alive() and not unread.closed
    finally:
        unread.read.set()
