"""The process of a producer: a fresh interpreter, or a forked child, that serves until the last trainer is gone."""

from __future__ import annotations

import os
import select
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

from legroom.advice.memory_need import SPARE
from legroom.errors import BudgetTooSmall, LegroomError, ProducerFailed
from legroom.loader.dataloader import receive
from legroom.loader.dataloader.sharing.group_folder import LOCK, LOG, SOCKET, GroupFiles
from legroom.loader.dataloader.sharing.order_and_seed_of_each_batch import Position
from legroom.loader.dataloader.sharing.produce_and_serve_batches import Producer, portable
from legroom.loader.dataloader.sharing.producer_messages import Closed, Connection
from legroom.loader.dataloader.sharing.start_producer_process import Recipe, unpickled
from legroom.loader.measure_process_memory import FreeMemory, free_memory_now, private_bytes
from legroom.messages import say
from legroom.system.processes_and_threads import start_daemon_thread
from legroom.system.unix_sockets import require_same_user
from legroom.units import format_size

_SPARE = 2 * SPARE  # bytes of free memory, below which the process does not continue to start


def main(given: dict[str, Any]) -> None:
    """The fresh interpreter."""
    files, connection = GroupFiles(Path(given["folder"]), given["key"]), Connection(_inherited(given["socket"]))
    blob = os.dup(0)
    serving = threading.Event()
    watching = start_daemon_thread(partial(_end_if_abandoned, connection, files, serving), "legroom-abandoned")
    try:
        recipe = unpickled(blob)
        recipe.settings = given["settings"]
    except BaseException as problem:
        error = ProducerFailed(
            say("the process that makes the batches cannot load the dataset"),
            why=f"{type(problem).__name__}: {problem}",
            fix=(
                say("put the program's start below: if __name__ == '__main__':"),
                say("define the dataset in a module that can be imported"),
                say("its log: {path}", path=files.log_path()),
            ),
        )
        _give_up(error, connection, files)
        raise
    import torch  # noqa: F401  takes seconds

    serving.set()
    if watching is not None:
        watching.join()  # before workers are forked
    serve(recipe, files, given["start"], connection, blob, given["lock"])


def _end_if_abandoned(connection: Connection, files: GroupFiles, serving: threading.Event) -> None:
    """End the process if the only trainer that knows it is gone before it serves others, or if memory runs out."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # only for its end
    while not serving.wait(0.01):
        if poll.poll(10):
            files.remove(SOCKET, LOG, LOCK)  # the socket is of a producer that was killed
            os._exit(0)
        memory = free_memory_now()
        if memory is not None and memory.free < _SPARE:  # a cgroup kills without an error
            _give_up(_no_memory(memory), connection, files)
            os._exit(1)


def _no_memory(memory: FreeMemory) -> BudgetTooSmall:
    return BudgetTooSmall(
        say("not enough free memory for the process that makes the batches"),
        why=say(
            "it had allocated {own} while it imported torch and the dataset's modules. {spare} must stay free for "
            "workers; {free} are free ({source})",
            own=format_size(private_bytes() or 0), spare=format_size(_SPARE), free=format_size(memory.free),
            source=memory.source,
        ),
        fix=(say("raise the memory limit"), say("use fewer trainers or a smaller batch")),
    )  # fmt: skip


def serve_forked(recipe: Recipe, folder: str, key: str, start: Position, fd: int, lock: int) -> None:
    """The child of a trainer that handed the recipe over by fork."""
    serve(recipe, GroupFiles(Path(folder), key), start, Connection(_inherited(fd)), -1, lock)


def serve(recipe: Recipe, files: GroupFiles, start: Any, connection: Connection, blob: int, lock: int) -> None:
    """Make batches until the last trainer is gone; ``lock`` is held until then."""
    import torch

    os.set_inheritable(lock, False)
    torch.set_default_dtype(getattr(torch, recipe.dtype.removeprefix("torch.")))
    torch.set_num_threads(1)
    receive.hand_on = True
    producer = Producer(recipe, files, tuple(start), blob)
    os.register_at_fork(after_in_child=lambda: os.close(lock))  # a worker must not hold it after the producer
    producer.add_trainer(connection, require_same_user(connection.socket))
    try:
        producer.run()
    except ProducerFailed as error:
        _give_up(error, connection, files)
        raise


def _give_up(error: LegroomError, connection: Connection, files: GroupFiles) -> None:
    """Send the error to the trainer that started this process, and leave no file of the group but its log."""
    try:
        connection.send("error", None, portable(error), True)
    except Closed:  # it did not wait
        pass
    files.remove(SOCKET, LOCK)


def _inherited(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
