"""The producer of a group: a process that makes each batch once, with workers, and hands it to all trainers.

The main thread takes batches from an ordinary ``legroom.DataLoader`` over an endless sequence of positions. A batch
stays in the slot that its worker wrote; trainers get the slot's descriptor. A second thread serves the sockets. Both
change the window (``batch_window_and_late_joiners.py``) under one lock, and neither waits for a trainer: messages that
do not fit into a socket's buffer are sent later.

The process ends when the last connection is closed, or when an error ends one of its threads: a trainer must not wait
for a process in which only the other thread runs. Its workers are killed by the kernel with it.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import selectors
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from legroom.cache.store_free_space import memory_bounds, tightest
from legroom.errors import BatchLost, BudgetTooSmall, ProducerFailed, WorkerDied
from legroom.loader.dataloader import receive
from legroom.loader.dataloader.collate import parse_budget
from legroom.loader.dataloader.memory_slots import Slot
from legroom.loader.dataloader.sharing.assign_copies_to_gpu import GpuRings
from legroom.loader.dataloader.sharing.batch_window_and_late_joiners import Answer, MadeBatch, Window
from legroom.loader.dataloader.sharing.group_folder import LOCK, LOG, SOCKET, GroupFiles
from legroom.loader.dataloader.sharing.make_batches_in_trainer import DEATHS, OwnStream, StreamState, stream_state
from legroom.loader.dataloader.sharing.order_and_seed_of_each_batch import Endless, Orders, Position, SeededDataset
from legroom.loader.dataloader.sharing.producer_messages import INLINE, Closed, Connection
from legroom.loader.dataloader.sharing.start_producer_process import Recipe, loader_class
from legroom.loader.dataloader.torch_internals import drop_iterator, workers
from legroom.messages import say
from legroom.system.processes_and_threads import die_with_parent, start_daemon_thread, why_no_thread
from legroom.system.unix_sockets import listen, require_same_user
from legroom.units import exact_size, format_size

_log = logging.getLogger("legroom")
_TICK_S = 0.2  # between two looks at the time that trainers wait
_HEARTBEAT_S = 0.3  # between two messages to a trainer that waits
_LOG_CHECK_S = 5.0
_IDLE_S = 10.0  # without a batch to make, before workers that are not persistent end
_ALONE_S = 10.0  # with one trainer, before that is told
_ENDLESS = 1 << 60
_LEAST_WINDOW, _WINDOW = 2, 8  # batches
_OF_FREE = 4  # the window takes at most this part of the free memory
_DEAD_WORKER = re.compile(r"DataLoader worker \(pid")


class EndWithProducer:
    """A ``worker_init_fn`` around the user's: the kernel kills the worker with the producer."""

    def __init__(self, init_fn: Any, producer: int, forked: bool) -> None:
        self._init_fn, self._producer, self._forked = init_fn, producer, forked

    def __call__(self, worker: int) -> None:
        die_with_parent(signal.SIGKILL)
        if self._forked and os.getppid() != self._producer:
            os._exit(0)
        if self._init_fn is not None:
            self._init_fn(worker)


class Made:
    """A batch, or the error in its place, as it is sent to trainers."""

    def __init__(self, item: Any = None, error: BaseException | None = None, *, end: bool = False) -> None:
        self.item, self.slot, self.fd = item, None, -1  # type: Any, Any, int
        self.body: bytes | None = None
        self.error = None if error is None else portable(error)
        self.end = end  # in the place of a batch: the epoch of an IterableDataset is over
        self.nbytes = 0
        self.state = getattr(item, "state", None)  # of an IterableDataset after this batch
        if error is not None or end:
            return
        parts = item.parts() if isinstance(item, receive.ReceivedBatch) else None
        if parts is None:  # only this process can open it: torch sent it
            batch = item.open() if isinstance(item, receive.ReceivedBatch) else item
            self.item, spans, skeleton = None, list[Any](), pickle.dumps(batch, 5)
        else:
            self.slot, spans, skeleton = parts
        body = pickle.dumps((spans, skeleton, self.state), 5)
        self.nbytes = len(body) + (0 if self.slot is None else self.slot.slot.capacity)
        if len(body) <= INLINE:
            self.body = body
        else:
            self.fd = os.memfd_create("legroom-batch", os.MFD_CLOEXEC)
            with open(os.dup(self.fd), "wb") as file:
                file.write(body)

    def close(self) -> None:
        """Free its memory: the worker may write the slot again."""
        self.item = self.slot = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(eq=False)
class Trainer:
    """A connection."""

    connection: Connection
    pid: int
    member: bool = False  # it has said hello
    slots: dict[int, weakref.ref[Slot]] = field(default_factory=dict)  # that it maps
    told: float = 0.0  # when it was last told to wait
    state: tuple[Position, StreamState] | None = None  # of an IterableDataset, where it asked
    command: str = ""


class Producer:
    """Makes the batches of a group until the last trainer is gone."""

    def __init__(self, recipe: Recipe, files: GroupFiles, start: Position, blob: int) -> None:
        self.recipe, self.files, self.blob = recipe, files, blob
        self.orders = Orders(recipe.sampler, recipe.batched, recipe.seed, recipe.generator)
        self.window = Window(start, self._length, lambda entry: entry.content.close())
        self.stream: OwnStream | None = None
        if recipe.stream:
            given = recipe.batch_size, recipe.drop_last, recipe.num_workers, recipe.seed
            self.stream = OwnStream(recipe.dataset, *given, self._new_loader)
        self._ends: dict[int, int] = {}  # batches of the epochs of an IterableDataset that are over
        self._known = start[1] == 0  # the states of its workers at the window's head
        self.changed = threading.Condition()
        self.trainers: dict[int, Trainer] = {}
        self.rings = GpuRings(files.key, self._send, self._inside)
        self.fatal: bytes | None = None  # the error that ends production
        self.restart: tuple[Position, StreamState | None] | None = None
        self._number = 0
        self._listening = listen(files.folder, files.key + SOCKET)
        self._loader: Any = None
        self._epoch: Any = None
        self._taking = False
        self._torch_sigchld: Any = None
        self._killed_at: Position | None = None  # workers died when this batch was next
        self._deaths = 0  # so often
        self._sized = 0  # bytes of the batch that the window was sized for
        self._workers: list[BaseProcess] = []
        self._alone_since = time.monotonic()
        self._ending = False
        os.register_at_fork(after_in_child=self._listening.close)

    # Making batches, in the main thread

    def run(self) -> None:
        """Until the process ends."""
        if start_daemon_thread(self._serve_sockets, "legroom-share") is None:
            raise ProducerFailed(
                say("the process that makes the batches cannot serve them"),
                why=why_no_thread(),
                fix=(say("raise the limit"), say("its log: {path}", path=self.files.log_path())),
            )
        self._end_process_after(self._make_batches)

    def _make_batches(self) -> None:
        while True:
            self._wait_for_work()
            try:
                if self._epoch is None:
                    self._start_workers()
                began = time.monotonic()
                item = self._take()
                self._made(Made(item), time.monotonic() - began)
            except Exception as problem:
                self._failed(problem)

    def _end_process_after(self, run: Callable[[], None]) -> None:
        """Run what one of the two threads does. The process ends with it."""
        status = 1
        try:
            run()
            status = 0
        except BaseException:
            _log.exception("the producer ends")
        finally:
            if status == 0 and self.fatal is None:
                self.files.remove(LOG)
            self.files.remove(SOCKET, LOCK)  # the lock last: without its file another producer may start
            sys.stderr.flush()
            os._exit(status)  # not sys.exit: the other thread continues, and workers that ignore SIGTERM are joined

    def _wait_for_work(self) -> None:
        idle_since = time.monotonic()
        with self.changed:
            while True:
                if self.restart is not None:
                    (start, state), self.restart = self.restart, None
                    self.window.restart(start)
                    self._epoch = None
                    if self.stream is not None:
                        self.stream.stop()
                        self.stream.progress, self._known = self.stream.new_progress(start, state), True
                    self._answer_all()
                if self.fatal is None and self.window.room() and self._can_continue():
                    return
                idle = time.monotonic() > idle_since + _IDLE_S
                if idle and self._loader is not None and not self.recipe.persistent_workers:
                    self._end_workers()
                self.changed.wait(1.0)

    def _length(self, epoch: int) -> int:
        """Batches of an epoch; with its end, for an IterableDataset, or endless while that is unknown."""
        return self._ends.get(epoch, _ENDLESS) if self.recipe.stream else len(self.orders.of(epoch))

    def _can_continue(self) -> bool:
        return self._known if self.recipe.stream else len(self.orders.of(self.window.head[0])) > 0

    def _new_loader(self, dataset: Any, **given: Any) -> Any:
        """An ordinary loader with the settings of the group."""
        import torch

        recipe = self.recipe
        return loader_class()(
            dataset,
            **{
                "num_workers": recipe.num_workers, "prefetch_factor": recipe.prefetch_factor, "timeout": recipe.timeout,
                "collate_fn": recipe.collate_fn, "multiprocessing_context": recipe.method,
                "worker_init_fn": EndWithProducer(recipe.worker_init_fn, os.getpid(), recipe.method == "fork"),
                "memory_budget": recipe.memory_budget, "generator": torch.Generator().manual_seed(recipe.seed), **given,
            },
        )  # fmt: skip

    def _start_workers(self) -> None:
        recipe, head = self.recipe, self.window.head
        self.window.in_production = recipe.num_workers * (recipe.prefetch_factor or 2)
        if self.stream is not None:
            self.stream.start(head, stream_state(self.stream.progress))
            self._epoch = self.stream.workers
        else:
            if self._loader is None:
                dataset, order = SeededDataset(recipe.dataset, recipe.batched), Endless(self.orders, head)
                self._loader = self._new_loader(dataset, batch_sampler=order, persistent_workers=True)
            else:
                self._loader.batch_sampler._start = head
            self._epoch = iter(self._loader)
        handler = signal.signal(signal.SIGCHLD, self._sigchld)
        self._torch_sigchld = self._torch_sigchld or handler  # torch sets its handler once
        self._workers = workers(self._epoch) or []

    def _sigchld(self, number: int, frame: Any) -> None:
        """torch raises in its handler, wherever the main thread is; here only while it waits for a batch."""
        if self._taking and callable(self._torch_sigchld):
            self._torch_sigchld(number, frame)

    def _take(self) -> Any:
        try:
            self._taking = True
            self._sigchld(signal.SIGCHLD, None)  # a worker may have died since
            return self._epoch.take_unopened()
        finally:
            self._taking = False

    def _made(self, made: Made, seconds: float) -> None:
        with self.changed:
            if self.restart is not None:
                made.close()  # of the sequence that was left
                return
            window = self.window
            window.interval = seconds if window.interval is None else 0.8 * window.interval + 0.2 * seconds
            if self.stream is not None and made.error is None:
                self._follow_stream(made)
            if made.nbytes > self._sized:
                self._size_window(made)
            window.add(made.nbytes, made)
            self._answer_all()

    def _follow_stream(self, made: Made) -> None:
        """Know the states of the workers at the window's next head."""
        assert self.stream is not None
        epoch, number = self.window.head
        if made.end:
            self._ends[epoch] = number + 1
            self.stream.progress = self.stream.new_progress((epoch + 1, 0))
        else:
            self.stream.progress.yielded += 1
            self.stream.progress.add_state(made.state)

    def _size_window(self, made: Made) -> None:
        """How many batches are kept; BudgetTooSmall if that are fewer than two."""
        nbytes, recipe = made.nbytes, self.recipe
        budget, under_way = parse_budget(recipe.memory_budget), self.window.in_production
        self._sized = nbytes
        if budget is not None:
            most = budget // nbytes - recipe.num_workers
            self.window.most_bytes = max(0, budget - recipe.num_workers * nbytes)
            what, need = say("memory_budget={budget}", budget=format_size(budget)), recipe.num_workers + _LEAST_WINDOW
            fix = say("set memory_budget={least!r} or more", least=exact_size(need * nbytes))
        else:
            if not (bounds := memory_bounds()):
                self.window.most = max(_WINDOW, under_way)
                return
            bound = tightest(bounds)
            free = max(0, bound.free) // nbytes  # beside this batch, which is made
            most = max(1 + free // _OF_FREE, min(1 + free, _LEAST_WINDOW))
            what, need, fix = bound.what(), _LEAST_WINDOW, say("raise the memory limit")
        self.window.most = max(_LEAST_WINDOW, min(most, max(_WINDOW, under_way)))
        if most < _LEAST_WINDOW and not (budget is None and self.window.entries):
            raise BudgetTooSmall(
                say("not enough memory for a window of {count} batches", count=_LEAST_WINDOW),
                why=say("{count} × {batch} per batch = {need}. {what}", count=need, batch=format_size(nbytes),
                        need=format_size(need * nbytes), what=what),
                fix=(fix, say("use fewer workers or a smaller batch")),
            )  # fmt: skip

    def _failed(self, problem: Exception) -> None:
        """A batch could not be made: an error of the dataset, a worker that died, not enough memory."""
        head = self.window.head
        if isinstance(problem, StopIteration) and self.stream is not None:
            self._epoch = None
            self.stream.stop()
            self._made(Made(end=True), 0.0)
            return
        dead = isinstance(problem, RuntimeError) and _DEAD_WORKER.match(str(problem)) is not None
        _log.warning("batch %s: %s", head, problem)
        if dead or isinstance(problem, (BatchLost, WorkerDied)):
            self._end_workers()
            # Trainers wait for this batch, and do not make it: it may need more memory than there is.
            with self.changed:
                self._deaths, self._killed_at = (self._deaths + 1 if self._killed_at == head else 1), head
                if self._deaths == DEATHS:
                    self._end_with(problem)
        elif isinstance(problem, BudgetTooSmall) or not self._alive(problem):
            self._end_workers()
            with self.changed:
                self._end_with(problem)
        else:
            self._made(Made(error=problem), self.window.interval or 0.0)

    def _alive(self, problem: Exception) -> bool:
        """Whether the workers continue after this error."""
        return self._epoch is not None and "DataLoader timed out" not in str(problem)

    def _end_with(self, problem: Exception) -> None:
        """Make no further batch: every trainer gets this error."""
        self.fatal = portable(problem)
        self._answer_all()

    def _end_workers(self) -> None:
        """End the workers at once; their slots are never written again."""
        for process in self._workers:
            process.kill()  # not by pid: one that has ended may have been waited for, and its pid be another process's
        self._workers = []
        loader, self._loader, self._epoch = self._loader, None, None
        if self.stream is not None:
            self.stream.stop()
        if loader is not None:
            drop_iterator(loader)
        with self.changed:
            for number, trainer in list(self.trainers.items()):
                self._forget(number, list(trainer.slots))

    # Trainers, in both threads under the lock

    def add_trainer(self, connection: Connection, pid: int) -> None:
        """A process has connected."""
        with self.changed:
            self._number += 1
            self.trainers[self._number] = Trainer(connection, pid)

    def _answer_all(self) -> None:
        """Send every trainer that waits what it can get now."""
        for number, member in list(self.window.members.items()):
            if member.asking:
                self._answer(number)
        self.changed.notify_all()

    def _answer(self, number: int) -> None:
        member, trainer = self.window.members[number], self.trainers[number]
        position = member.cursor
        assert position is not None
        if self.fatal is not None and position >= self.window.head:
            if self._send(number, "error", position, self.fatal, True):
                member.asking = False
            return
        answer = self.window.answer(number)
        if answer is Answer.GRANT:
            entry = self.window.entries[position]
            if self._send_batch(number, entry, (entry.serial, member.granted)):
                self.window.granted(number)
            else:
                member.unread = True
        elif answer is Answer.WAIT:
            now = time.monotonic()
            if now > trainer.told + _HEARTBEAT_S:
                trainer.told = now
                slow = [self.trainers[one].pid for one in self.window.blocking()]
                self._send(number, "wait", position, os.getpid(), self._pids, slow)
        else:
            self._send(number, "miss", position)

    def _send_batch(self, number: int, entry: MadeBatch, lease: tuple[int, int]) -> bool:
        made: Made = entry.content
        if made.error is not None:
            return self._send(number, "error", entry.position, made.error, False, lease)
        if made.end:
            return self._send(number, "end", entry.position, lease)
        trainer, fds = self.trainers[number], []
        slot = None if made.slot is None else made.slot.slot
        new = slot is not None and slot.id not in trainer.slots
        if slot is not None and new:
            fds.append(slot.fd)
            # No batch can lie in them any more. Only this process knows that: a worker may release a slot before the
            # batch in it was sent to every trainer.
            self._forget(number, [one for one, known in trainer.slots.items() if known() is None])
        if made.fd >= 0:
            fds.append(made.fd)
        sent = self._send(
            number, "batch", entry.position, lease, None if slot is None else slot.id, new, made.body, fds=fds
        )
        if sent and slot is not None:
            trainer.slots[slot.id] = weakref.ref(slot)
        return sent

    def _forget(self, number: int, slots: list[int]) -> None:
        """Let a trainer unmap slots. One that is needed again is sent as a new one."""
        if slots and self._send(number, "forget", slots):
            for one in slots:
                del self.trainers[number].slots[one]

    def _send(self, number: int, *message: Any, fds: Any = ()) -> bool:
        try:
            return self.trainers[number].connection.send(*message, fds=fds)
        except (Closed, KeyError):
            return False  # the other thread notices that it is gone

    def _gone(self, number: int) -> None:
        trainer = self.trainers.pop(number)
        trainer.connection.close()
        self.window.leave(number)
        self.rings.leave(number)

    def _inside(self, number: int) -> bool:
        member = self.window.members.get(number)
        return member is not None and member.inside

    # Sockets, in the second thread

    def _serve_sockets(self) -> None:
        self._end_process_after(self._serve)

    def _serve(self) -> None:
        then = time.monotonic()
        selector = selectors.DefaultSelector()
        selector.register(self._listening, selectors.EVENT_READ, 0)
        known: set[int] = set()
        while self.trainers and not self._ending:
            for number in self.trainers.keys() - known:
                known.add(number)
                selector.register(self.trainers[number].connection.fileno(), selectors.EVENT_READ, number)
            events = selector.select(_TICK_S)
            with self.changed:
                for key, _ in events:
                    if key.data == 0:
                        self._accept()
                    elif not self._read(key.data):
                        selector.unregister(key.fd)
                        self._gone(key.data)
                now = time.monotonic()
                self.window.charge(now - then)
                if int(now / _LOG_CHECK_S) != int(then / _LOG_CHECK_S):
                    self.files.shorten_log()
                then = now
                if self.fatal is None:
                    self._choose_start()
                    self._tell_if_alone(now)
                self._answer_all()

    def _choose_start(self) -> None:
        """Move the sequence where the trainers are."""
        start = self.window.better_start()
        if self.stream is not None:
            states = dict(one.state for one in self.trainers.values() if one.state is not None)
            if start is None and not self._known:
                start = next(iter(states), None)
            if start is not None and start[1] and start not in states:
                start = None  # its state was too large for a message: that trainer makes its batches itself
            if start is not None:
                self.restart = start, states.get(start)
        elif start is not None:
            self.restart = start, None

    def _tell_if_alone(self, now: float) -> None:
        """A trainer that has been the only one for a while does not need this process."""
        members = self._members
        if len(members) != 1:
            self._alone_since = now
        elif now > self._alone_since + _ALONE_S:
            self._alone_since = now
            self._send(members[0], "alone")

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError:
            return
        try:
            self.add_trainer(Connection(sock), require_same_user(sock))
        except ValueError:
            sock.close()

    def _read(self, number: int) -> bool:
        """Read all messages of a trainer; False if it is gone."""
        try:
            while (received := self.trainers[number].connection.receive()) is not None:
                message, fds = received
                for fd in fds:
                    os.close(fd)
                self._handle(number, *message)
        except Closed:
            return False
        except Exception:
            _log.exception("message")
            return False
        return True

    def _handle(self, number: int, kind: str, *given: Any) -> None:
        window, trainer = self.window, self.trainers[number]
        if kind == "status":
            self._send(number, "status", json.dumps(self.status()))
        elif kind == "hello":
            patience, continuous, trainer.command, new = given
            trainer.member = True
            window.join(number, patience, continuous, new)
            self._send(number, "welcome", self.recipe.settings, fds=[self.blob] if self.blob >= 0 else [])
        elif kind == "want" and trainer.member:
            member, trainer.told = window.members[number], 0.0
            member.cursor, member.asking, member.unread = tuple(given[0]), True, False  # answered with all others
            if given[1] is not None:
                trainer.state = tuple(given[0]), given[1]
        elif kind in self.rings.MESSAGES and trainer.member:
            self.rings.handle(number, kind, *given)
        elif kind == "at" and trainer.member:
            self.rings.skip(number)
            window.move(number, tuple(given[0]))
        elif kind == "alone" and self._members == [number]:
            self._ending = True  # it continues by itself; what it holds stays mapped there
        elif kind in ("leave", "alone") and trainer.member:
            window.members[number].cursor, window.members[number].inside = None, False
            window.members[number].asking = False
            window.trim()
            self.rings.leave(number)
        elif kind == "release":
            window.release(number, *given[0])
        elif kind == "keep":  # by a forked child of the trainer, for longer than the trainer knows
            for entry in [*window.entries.values(), *window.aside.values()]:
                if entry.serial == given[0][0] and entry.content.slot is not None:
                    entry.content.slot.retire = True

    @property
    def _pids(self) -> list[int | None]:
        return [process.pid for process in self._workers]

    @property
    def _members(self) -> list[int]:
        """The trainers; another connection may ask for the status alone."""
        return [number for number, one in self.trainers.items() if one.member]

    def status(self) -> dict[str, Any]:
        """What `legroom cache list` and `legroom watch` show."""
        window, slow = self.window, self.window.slow()
        return {
            "name": self.recipe.name, "producer": os.getpid(), "workers": self._pids,
            "position": list(window.head), "batches": len(window.entries), "most_batches": window.most,
            "bytes": sum(entry.nbytes for entry in window.entries.values()),
            "gpus": self.rings.status(),
            "error": None if self.fatal is None else str(pickle.loads(self.fatal)).splitlines()[0],
            "trainers": [
                {
                    "pid": self.trainers[number].pid, "command": self.trainers[number].command,
                    "position": None if one.cursor is None else list(one.cursor),
                    "state": ("slow" if number in slow else "waiting" if one.asking else "training"),
                    "shared": one.granted, "made_itself": one.made_itself,
                }
                for number, one in window.members.items()
            ],
        }  # fmt: skip


def portable(problem: BaseException) -> bytes:
    """The exception as a pickle that every trainer can read."""
    bare = problem.with_traceback(None)
    try:
        data = pickle.dumps(bare, 5)
        if type(pickle.loads(data)) is type(problem) and len(data) < INLINE:
            return data
    except Exception:
        pass
    text = f"{type(problem).__name__}: {problem}"
    return pickle.dumps(RuntimeError(text[: INLINE // 4]), 5)
