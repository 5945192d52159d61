"""A trainer's connection to its group: finds the producer or starts one, and asks it for batches.

A trainer that has taken a batch asks for the next at once, so the answer is there when it is needed. It waits only
while the producer says, several times a second, that the batch is coming. If the producer is gone or silent, or the
batch is not in its window, the trainer makes the batch itself.

A trainer that finds no producer and no other trainer is alone: it needs no producer, and makes its batches as without
``share``. Several times a second it looks for a producer, which the next trainer starts. A producer whose only trainer
has been alone for a while says so, and ends when that trainer continues by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from legroom.cache.locks import Lock
from legroom.errors import ShareMismatch, Unpicklable
from legroom.loader.dataloader.collate import arena_unavailable
from legroom.loader.dataloader.sharing.assign_copies_to_gpu import Claim, RingMemory
from legroom.loader.dataloader.sharing.batch_window_and_late_joiners import JOIN_S
from legroom.loader.dataloader.sharing.copy_batches_to_gpu import ClaimAnswer, GpuBatches
from legroom.loader.dataloader.sharing.group_folder import GroupFiles, group_folder
from legroom.loader.dataloader.sharing.group_settings import check_same, group_key
from legroom.loader.dataloader.sharing.map_slots_in_trainer import PrivateSlots
from legroom.loader.dataloader.sharing.order_and_seed_of_each_batch import Position
from legroom.loader.dataloader.sharing.producer_messages import INLINE, Closed, Connection
from legroom.loader.dataloader.sharing.start_producer_process import (
    Recipe,
    copy_of_dataset,
    fork,
    pickled,
    start,
    why_no_fork,
)
from legroom.messages import say
from legroom.system.lazy_and_optional_imports import lazy_import

_log = logging.getLogger("legroom")
_SILENCE_S = 0.8  # of a producer for which a trainer waits, before it makes the batch itself
_RETRY_S, _LONGEST_RETRY_S = 0.25, 10.0  # between two attempts to find or start a producer
_CLAIM_S = 0.25  # for a batch to be in the memory of the GPU, before a trainer copies it for itself
_START_S = 60.0  # for a producer to say welcome: it imports torch and the dataset's modules
_LONG_WAIT_S, _LONGER = 60.0, 10  # a wait is reported from here on, and if it is so many times the longest before
_DYING_S = 0.5  # for a killed producer to be gone, before its files are left to the next that comes
_WELCOME_S, _START_POLL_S = 0.3, 0.01  # to wait for it, of a producer that runs, and of one that is starting


class LongWaits:
    """Reports a batch that takes much longer than all before it: a worker may hang, and no error ever comes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._longest = 0.0  # seconds until a batch came
        self._reported = 0.0

    def over(self, seconds: float) -> None:
        """A batch has come after so many seconds."""
        self._longest, self._reported = max(self._longest, seconds), 0.0

    def report(self, seconds: float, position: Position, producer: int, workers: list[int], slow: list[int]) -> None:
        """A batch has not come for so many seconds; written once, and again when it has taken twice as long."""
        if seconds < max(_LONG_WAIT_S, _LONGER * self._longest, 2 * self._reported):
            return
        self._reported = seconds
        epoch, number = position
        known = {"name": self._name, "number": number, "epoch": epoch, "seconds": round(seconds),
                 "longest": f"{self._longest:.1f}"}  # fmt: skip
        if slow:
            _log.warning(say(
                "share={name!r}: batch {number} of epoch {epoch} has not arrived after {seconds} s. Batches before it "
                "took at most {longest} s. The group waits for a trainer that is slow or stopped: process {slow}",
                slow=", ".join(map(str, slow)), **known,
            ))  # fmt: skip
        else:
            _log.warning(say(
                "share={name!r}: batch {number} of epoch {epoch} has not arrived after {seconds} s. Batches before it "
                "took at most {longest} s. Processes that make the batches: {processes}. "
                "See what one does: py-spy dump --pid {process}",
                processes=", ".join(map(str, [producer, *workers])), process=[*workers, producer][0], **known,
            ))  # fmt: skip


class Group:
    """The connection to the producer of a group; finds one, or starts one."""

    _closable = False  # __init__ came far enough

    def __init__(
        self, recipe: Recipe, settings: Callable[[Any], dict[str, str]], *, patience: float, continuous: bool,
        gpu: GpuBatches | None = None,
    ) -> None:  # fmt: skip
        self.pid = os.getpid()
        self.name = recipe.name
        self._hello = patience, continuous, _command()
        self._silence = max(_SILENCE_S, patience) if continuous else _SILENCE_S
        self._recipe = recipe
        self.gpu = gpu  # where this trainer wants its batches
        self._waits = LongWaits(recipe.name)
        self._early: list[tuple[Any, ...]] = []  # messages that came while another was awaited
        self.unavailable = arena_unavailable()  # why this trainer makes all its batches itself
        self.connection: Connection | None = None
        self.slots: PrivateSlots | None = None
        self.blob = -1
        self.welcome = False  # the producer has answered
        self.alone_since = self._began = time.monotonic()
        self.missed = False  # the last batch was not in the producer's window
        self._alone: Callable[[], Any] | None = None  # ends it; while it is set, no other trainer is there
        self._told_alone = False  # by the producer
        self._inside = False  # the producer's last answer was a batch: it knows the state of a stream here
        self.coming = False  # another trainer starts a producer
        self._asked: Position | None = None
        self._tried = self._greeted = 0.0
        self._was_member = self._started_it = False
        self._new = True  # no producer has answered yet
        self._silent = False  # the producer did not answer for the last batch: do not wait for it again
        self._failed_starts = 0  # producers that ended before they said welcome
        # A message was read and is not done with: a batch that came is not returned yet, or never is.
        self.unsettled = False
        if self.unavailable is not None:
            self._closable = True
            return
        self.files = GroupFiles(group_folder(), group_key(recipe.name, recipe.sampler, stream=recipe.stream))
        self._closable = True
        lock = None if self._find() else self.files.stand_alone()
        try:
            if (lock is None and self.connection is None) or recipe.method != "fork":
                try:
                    self._pickle()  # before a sample is loaded: a dataset may open its files then
                except OSError as problem:  # no memory for it
                    self._make_own(problem)
                    if lock is not None:
                        self.files.release_alone(lock)
                    return
            recipe.settings = settings(None if recipe.method == "fork" else self.fresh_dataset())
            if lock is not None:
                self._stand_alone(lock)
            elif self.connection is None and (other := self.files.alone()) is not None:
                check_same(self.name, other["settings"], recipe.settings)
        except BaseException:
            if lock is not None and self._alone is None:
                self.files.release_alone(lock)
            raise

    def fresh_dataset(self) -> Any:
        """A copy of the dataset as it was when it was pickled; None if it was not."""
        return None if self.blob < 0 else copy_of_dataset(self.blob)

    # Alone

    @property
    def alone(self) -> bool:
        """Whether no other trainer is there, or can be reached."""
        return self.unavailable is not None or (self._alone is not None and not self.coming)

    def _stand_alone(self, lock: Lock) -> None:
        self._alone = weakref.finalize(self, self.files.release_alone, lock)  # also at exit
        self._was_member = True  # one that has begun is not stopped by those that come later
        about = {"name": self.name, "pid": os.getpid(), "command": _command(), "settings": self._recipe.settings}
        with contextlib.suppress(OSError):  # without space, those that come later compare nothing with it
            self.files.describe_alone(lock, about)

    def _end_alone(self) -> None:
        if self._alone is not None:
            self._alone()
            self._alone, self.coming = None, False

    def _go_alone(self) -> None:
        """The producer has had no other trainer for a while: continue without it, and it ends."""
        if self.connection is None:
            self._told_alone = False
            return
        if self._alone is None:  # else an interruption came between here and the message
            lock = self.files.stand_alone()
            if lock is None:
                self._told_alone = False
                return
            self._stand_alone(lock)
        with contextlib.suppress(Closed):
            self.connection.send("alone")
        self._told_alone = False
        self._lost()
        self._tried = time.monotonic()

    # Finding and starting a producer

    def _find(self) -> bool:
        connection = self.files.connect()
        return connection is not None and self._greet(connection)

    def _greet(self, connection: Connection, *, started: bool = False) -> bool:
        self.connection, self.slots = connection, PrivateSlots(connection)
        self.welcome, self._asked, self._started_it, self._inside = False, None, started, False
        self._greeted = time.monotonic()
        try:
            connection.send("hello", *self._hello, self._new)
        except Closed:
            if not started:  # one that was started here may have said why it ended: _await_welcome reads it
                self._lost()
                return False
        return True

    def _pickle(self) -> None:
        try:
            self.blob = pickled(self._recipe)
        except Unpicklable:
            if why_no_fork() is not None:
                raise

    def _ensure(self, position: Position) -> bool:
        """Whether a producer is connected; looks for one, or starts one, now and then."""
        if self.connection is not None:
            return True
        now = time.monotonic()
        if self.unavailable is not None or now < self._tried + min(_RETRY_S * 2**self._failed_starts, _LONGEST_RETRY_S):
            return False
        self._tried = now
        if self._find():
            return True
        if self._alone is not None:
            # Those who start together shall stay together: do not run ahead of a trainer that has just come.
            self.coming = (self.coming or now < self._began + JOIN_S) and self.files.producer_starts()
            return False
        lock = self.files.lock()
        return lock is not None and self._start(position, lock)

    def _start(self, position: Position, lock: Lock) -> bool:
        """Start a producer, which gets the lock."""
        try:
            with lock:
                if self.blob < 0:
                    self._pickle()
                if self.blob >= 0:
                    connection = start(self.files, self.blob, self._recipe.settings, position, lock.fd)
                else:
                    producer = lazy_import("legroom.loader.dataloader.sharing.producer_main")
                    connection = fork(self.files, self._recipe, position, lock.fd, producer.serve_forked)
        except (Unpicklable, OSError) as problem:
            if not self._was_member and isinstance(problem, Unpicklable):
                raise
            self._make_own(problem)
            return False
        return self._greet(connection, started=True)

    def _make_own(self, problem: Exception) -> None:
        """Make all further batches in this trainer."""
        self.unavailable = str(problem)
        _log.warning(say("share={name!r}: this trainer makes its batches itself: {why}", name=self.name, why=problem))
        self._lost()

    def _lost(self) -> None:
        """The producer is gone, or left. The connection is closed when no batch of it is held any more."""
        if self.gpu is not None:
            self.gpu.close()  # its ring is that of the producer
        self.connection = self.slots = None
        self._early, self.unsettled = [], False
        if self._started_it and not self.welcome:
            self._failed_starts += 1
        self.welcome, self._asked, self.missed, self._started_it = False, None, False, False
        self.alone_since = time.monotonic()

    def _leave(self) -> None:
        if self.connection is not None:
            with contextlib.suppress(Closed):
                self.connection.send("leave")
        self._lost()

    def close(self) -> None:
        """Leave the group."""
        self._end_alone()
        self._leave()
        if self.blob >= 0:
            os.close(self.blob)
            self.blob = -1
        if self.unavailable is None:
            self.files.remove_leftovers(_DYING_S)

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit() and self._closable and self.pid == os.getpid():
            self.close()

    @property
    def expected(self) -> bool:
        """Whether a producer is likely to have the next batches: then workers of this trainer's own do not pay."""
        if self.unavailable is not None or self.missed:
            return False
        return self.coming or time.monotonic() < self.alone_since + _START_S

    # Batches

    def ask(self, position: Position, state: Any = None) -> None:
        """Ask for a batch that is needed soon; ``state``: that of an IterableDataset there."""
        if self.connection is None or not self.welcome or self._asked == position:
            return
        try:
            self.slots.flush()  # type: ignore[union-attr]
            if self.connection.send("want", position, state if not self._inside and _small(state) else None):
                self._asked = position
        except Closed:
            self._lost()

    def rest(self, position: Position) -> None:
        """An epoch is left: this is where the next one begins."""
        if self.connection is None or not self.welcome:
            return
        try:
            self.connection.send("at", position)
            self._asked = None
        except Closed:
            self._lost()

    def take(self, position: Position, state: Any = None) -> tuple[Any, ...] | None:
        """The producer's answer for a position: a batch or an error; None if this trainer must make it itself.

        ``unsettled`` is set with an answer, until the caller is done with it.
        """
        if self.unsettled:  # interrupted: what was read is lost. The producer forgets what this trainer had of it
            self._leave()
        if self._told_alone:
            self._go_alone()
        if not self._ensure(position):
            return None
        try:
            if not self.welcome and not self._await_welcome():
                return None
            self.slots.reclaim()  # type: ignore[union-attr]
            self.ask(position, state)
            return self._await(position)
        except Closed:
            self._lost()
            return None

    def _await_welcome(self) -> bool:
        if self.connection is None:
            raise Closed
        left = self._greeted + _WELCOME_S - time.monotonic()
        received = self._receive(_START_POLL_S if self._started_it else max(0.0, left))
        if received is None:
            if time.monotonic() > self._greeted + _START_S and not self._started_it:
                self._lost()  # it is stopped, or not one of ours
            return False
        message, fds = received
        if message[0] == "error":
            self._lost()
            if self._was_member:
                return False
            raise pickle.loads(message[2])
        if message[0] == "welcome" and fds and self.blob < 0:
            self.blob = fds.pop()
        for fd in fds:
            os.close(fd)
        if message[0] != "welcome":
            raise Closed
        self._check_group(message[1])
        self.welcome = self._was_member = True
        self._new = False
        self._failed_starts, self._silent = 0, False
        self._end_alone()
        if self.gpu is not None and self.gpu.why_own is None:
            self.connection.send("gpu", self.gpu.uuid)
        self.unsettled = False
        return True

    def _receive(self, timeout: float) -> tuple[tuple[Any, ...], list[int]] | None:
        """The next message, which is ``unsettled`` then."""
        if self.connection is None:
            raise Closed  # the producer has ended since the last epoch
        if timeout and not self.connection.wait(timeout):
            return None
        self.unsettled = True
        received = self.connection.receive()
        self.unsettled = received is not None
        return received

    def _check_group(self, settings: Mapping[str, str]) -> None:
        try:
            check_same(self.name, settings, self._recipe.settings)
        except ShareMismatch as problem:
            self._lost()
            if not self._was_member:
                raise
            # Others took the name while this group had no producer: a trainer that has come so far continues.
            self.unavailable = str(problem)
            _log.warning(str(problem))
            raise Closed from problem

    def _await(self, position: Position) -> tuple[Any, ...] | None:
        heard = began = time.monotonic()
        patience = 0.0 if self._silent else self._silence
        while True:
            left = max(0.0, heard + patience - time.monotonic())
            self.unsettled = bool(self._early)
            answer = self._early.pop(0) if self._early else self._read(left)
            if answer is None:
                if time.monotonic() >= heard + patience:
                    self.missed, self._silent, self._inside = True, True, False
                    return None  # it is stopped: its answer may come later
                continue
            self._silent, patience = False, self._silence
            if answer[1] != position:
                self._refuse(answer)
            elif answer[0] == "wait":
                heard = time.monotonic()
                self._waits.report(heard - began, *answer[1:])
            else:
                self._waits.over(time.monotonic() - began)
                self._asked, self.missed = None, answer[0] == "miss"
                self._inside = not self.missed
                if not self.missed:
                    return answer
                self.unsettled = False
                return None
            self.unsettled = False

    def _read(self, timeout: float) -> tuple[Any, ...] | None:
        """The next message about a position."""
        if self.slots is None:
            raise Closed
        received = self._receive(timeout)
        if received is None:
            return None
        message, fds = received
        if message[0] in ("forget", "alone"):
            if message[0] == "forget":
                self.slots.forget(message[1])
            else:
                self._told_alone = True
            self.unsettled = False
            return None
        if message[0] != "batch":
            return message
        _, position, lease, slot_id, new, body = message
        try:
            if new:
                self.slots.add(slot_id, fds.pop(0))
            if body is None:
                with open(fds.pop(0), "rb") as file:
                    body = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
        except BaseException as problem:
            for fd in fds:
                os.close(fd)
            if not isinstance(problem, OSError):
                raise
            self._make_own(problem)  # no memory, or too many mappings
            raise Closed from problem
        return "batch", position, lease, None if slot_id is None else self.slots.find(slot_id), body

    def claim(self, serial: int, nbytes: int) -> ClaimAnswer | None:
        """How a batch that was taken comes to the GPU; None: this trainer copies it from the host for itself."""
        if self.connection is None or self.slots is None:
            return None
        try:
            self.unsettled = True  # until the batch is on the GPU
            if not self.connection.send("claim", serial, nbytes):
                return None
            until = time.monotonic() + _CLAIM_S
            while (left := until - time.monotonic()) > 0:
                answer = self._read(left)
                if answer is None:
                    continue
                if answer[0] != "gpu":
                    self._early.append(answer)
                elif answer[1] != serial:
                    self._refuse(answer)
                elif Claim(answer[2]) is Claim.OWN:
                    return None
                elif Claim(answer[2]) is not Claim.BUSY:
                    return ClaimAnswer(Claim(answer[2]), answer[3], RingMemory(*answer[4]), answer[5], self.slots.tell)
            self.slots.tell("read", serial)  # one that copies it is stopped: do without
        except Closed:
            self._lost()
        return None

    def _refuse(self, answer: tuple[Any, ...]) -> None:
        """An answer that came too late."""
        if self.slots is None:
            return
        if answer[0] == "gpu":
            late = {Claim.COPY: "no-copy", Claim.READY: "read"}.get(Claim(answer[2]))
            if late is not None:
                self.slots.tell(late, answer[1])
        elif answer[0] == "batch":
            self.slots.give_back(answer[2])
        elif answer[0] == "error" and len(answer) > 4:
            self.slots.give_back(answer[4])


def _small(state: Any) -> bool:
    """Whether a state can be sent in a message; where it cannot, the producer does not continue at this position."""
    return state is not None and sum(len(one) for one, _ in state[1].values()) < INLINE


def _command() -> str:
    return " ".join(os.path.basename(one) if number == 0 else one for number, one in enumerate(sys.argv))[:120]
