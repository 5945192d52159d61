"""Queues that write without a thread: no message is lost or reordered, and no put waits."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from legroom.loader.dataloader.queues import direct_context
from legroom.loader.dataloader.receive import SentBatch

METHODS = multiprocessing.get_all_start_methods()


EARLIER: list[threading.Thread] = []  # threads of other tests' queues


@pytest.fixture
def queue() -> Iterator[Any]:
    EARLIER[:] = threading.enumerate()
    made: Any = direct_context(multiprocessing.get_context("fork")).Queue()
    yield made
    made.cancel_join_thread()
    made.close()


def feeding_threads() -> list[threading.Thread]:
    """multiprocessing's own threads, which write to a queue's pipe; those that were started in this test."""
    return [one for one in threading.enumerate() if one.name == "QueueFeederThread" and one not in EARLIER]


def test_small_messages_need_no_thread(queue: Any) -> None:
    for number in range(50):
        queue.put((number, [number, number + 1]))
    queue.put(None)
    assert not feeding_threads()
    assert [queue.get(timeout=240) for _ in range(51)] == [
        *((number, [number, number + 1]) for number in range(50)),
        None,
    ]


def test_no_process_waits_for_a_full_pipe_and_order_is_kept(queue: Any) -> None:
    count = 20_000  # far more than a pipe holds, and no process reads
    for number in range(count):
        queue.put((number, None))
    assert feeding_threads()
    assert [queue.get(timeout=240)[0] for _ in range(count)] == list(range(count))


def test_large_messages_between_small_ones(queue: Any) -> None:
    messages: list[tuple[int, list[int]]] = [
        (0, [1]),
        (1, list(range(300_000, 310_000))),
        (2, [2]),
        (3, list(range(10_000))),
    ]
    for message in messages:
        queue.put(message)
    assert [queue.get(timeout=240) for _ in messages] == messages


class Counted:
    """Counts how often it was pickled."""

    times = 0

    def __reduce__(self) -> tuple[Any, ...]:
        type(self).times += 1
        return str, ("arrived",)


@pytest.mark.parametrize("make", [lambda one: (0, one), lambda one: one, lambda one: (0, [one])])
def test_a_message_with_side_effects_is_pickled_once(queue: Any, make: Any) -> None:
    Counted.times = 0
    queue.put(make(Counted()))
    assert "arrived" in str(queue.get(timeout=240))
    assert Counted.times == 1


def test_a_batch_in_a_slot_is_written_at_once(queue: Any) -> None:
    queue.put((7, SentBatch(0, -1, 0, [], pickle.dumps({"rows": 3}), False, None, None)))
    assert not feeding_threads()
    assert queue.get(timeout=240) == (7, {"rows": 3})


def test_several_threads(queue: Any) -> None:
    writers = [
        threading.Thread(target=lambda first=first: [queue.put((first, [step])) for step in range(300)])
        for first in range(4)
    ]
    for writer in writers:
        writer.start()
    found = [queue.get(timeout=240) for _ in range(4 * 300)]
    for writer in writers:
        writer.join()
    for first in range(4):
        assert [rows[0] for number, rows in found if number == first] == list(range(300))


def echo(requests: Any, answers: Any) -> None:
    """A worker."""
    while (message := requests.get()) is not None:
        answers.put((message[0], [2 * one for one in message[1]]))
    answers.put(("done", type(requests).__name__, not feeding_threads()))


@pytest.mark.parametrize("method", METHODS)
def test_between_processes(method: str) -> None:
    context: Any = direct_context(multiprocessing.get_context(method))
    assert context.get_start_method() == method
    requests, answers = context.Queue(), context.Queue()
    worker = context.Process(target=echo, args=(requests, answers))
    worker.start()
    for number in range(20):
        requests.put((number, [number]))
    requests.put(None)
    assert [answers.get(timeout=240) for _ in range(20)] == [(number, [2 * number]) for number in range(20)]
    assert answers.get(timeout=240) == ("done", "DirectQueue", True)
    worker.join(60)
    assert worker.exitcode == 0


def test_a_closed_queue_is_an_error(queue: Any) -> None:
    queue.close()
    with pytest.raises(ValueError, match="closed"):
        queue.put(None)


def test_a_closed_reader_is_no_error(queue: Any) -> None:
    queue._reader.close()
    queue.put((0, [1, 2]))
    queue.put(None)


def test_nothing_is_written_to_a_closed_pipe(queue: Any) -> None:
    """Its number may be another file's by the time of the write."""
    kept, queue._writer._handle = queue._writer._handle, os.open(os.devnull, os.O_RDONLY)
    os.close(queue._writer._handle)  # what Connection.__del__ does: the number stays
    assert not queue._put_now(None)
    queue._writer._handle = kept


@pytest.mark.parametrize("indices", [[1, 2], np.arange(2).tolist(), list(np.arange(2)), np.int64(3)])
def test_indices_need_no_thread(queue: Any, indices: Any) -> None:
    queue.put((0, indices))
    assert not feeding_threads()
    assert queue.get(timeout=240) == (0, indices)


def test_the_message_that_an_epoch_begins_needs_no_thread(queue: Any) -> None:
    queue.put(torch.utils.data._utils.worker._ResumeIteration(7))
    assert not feeding_threads()
    assert queue.get(timeout=240).seed == 7


def test_other_contexts_are_unchanged() -> None:
    class Theirs(type(multiprocessing.get_context("fork"))):  # type: ignore[misc]
        """A user's own."""

    theirs: Any = Theirs()
    assert direct_context(theirs) is theirs
    again = direct_context(multiprocessing.get_context("fork"))
    assert direct_context(again) is again


def _take_and_die(lock: Any) -> None:
    lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_lock_of_a_process_that_was_killed_blocks_no_put(queue: Any) -> None:
    killed = multiprocessing.get_context("fork").Process(target=_take_and_die, args=(queue._wlock,))
    killed.start()
    killed.join()
    put = threading.Thread(target=queue.put, args=((0, [1]),), daemon=True)
    put.start()
    put.join(60)
    assert not put.is_alive()


@pytest.mark.parametrize("method", METHODS)
def test_an_event_is_seen_by_other_processes(method: str) -> None:
    context: Any = direct_context(multiprocessing.get_context(method))
    there, back = context.Event(), context.Event()
    other = context.Process(target=_answer, args=(there, back))
    other.start()
    assert not back.is_set() and not back.wait(0.05)
    there.set()
    there.set()
    assert back.wait(60) and back.is_set()
    other.join()
    there.clear()
    assert not there.is_set()


def _answer(there: Any, back: Any) -> None:
    if there.wait(60):
        back.set()


KILLED_IN_IS_SET = """
import os, signal, sys, warnings
import torch, legroom
warnings.filterwarnings("ignore")
wanted, steps = int(sys.argv[1]), 0

def trace(frame, event, _):
    global steps
    caller = frame.f_back
    if frame.f_code.co_name != "is_set" and (caller is None or caller.f_code.co_name != "is_set"):
        return None
    steps += event == "line"
    if steps == wanted:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        sys.settrace(trace)
        return torch.zeros(10)

loader = legroom.DataLoader(Rows(), 1, num_workers=1, multiprocessing_context="fork")
iterator = iter(loader)
try:
    for _ in iterator: pass
except RuntimeError:
    print("killed", flush=True)
del iterator, loader
print("ended", flush=True)
"""


@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_worker_killed_while_it_reads_the_event_blocks_no_loader(line: int) -> None:
    pytest.importorskip("torch")
    program = [sys.executable, "-c", KILLED_IN_IS_SET, str(line)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["killed", "ended"], done.stderr
