"""Errors of a DataLoader's constructor and of the start of its workers, each with a reason and what to do.

Arguments that torch rejects, a dataset or function that cannot be pickled, and a TMPDIR whose path is too long for the
workers' sockets.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

from legroom.errors import BadArgument, LoaderError, Unpicklable
from legroom.formats.base_reader import names_shown
from legroom.loader.dataloader.collate import SlotCollate
from legroom.messages import say
from legroom.probe.process_and_limits import SOCKET_TAIL, longest_socket
from legroom.system.lazy_and_optional_imports import import_lock

_log = logging.getLogger("legroom")
_SOCKET_NAME = len("/listener-12345678")
_SHORT_FOLDERS = ("/tmp", "/var/tmp")
_NAMES_SHOWN = 3
_Explanation = tuple[str, tuple[str, ...]]


def explain_argument(problem: ValueError, given: Mapping[str, Any]) -> BadArgument | None:
    """torch's error as BadArgument, which is a ValueError too; None if there is nothing to add.

    torch's own sentence stays the first, because people search for it.
    """
    text = str(problem)
    for words, explain in _KNOWN.items():
        if words in text:
            why, fix = explain(given)
            return BadArgument(text, why=why, fix=fix)
    return None


def _batch_size(given: Mapping[str, Any]) -> _Explanation:
    return say("batch_size must be an integer ≥ 1 or None (got {size!r})", size=given["batch_size"]), (
        say("pass a batch_size of 1 or more"),
        say("or batch_size=None, to get single samples without batches"),
    )


def _num_workers(given: Mapping[str, Any]) -> _Explanation:
    return say("num_workers must be an integer ≥ 0 (got {count})", count=given["num_workers"]), (
        say("num_workers=0 makes batches in this process"),
    )


def _needs_workers(name: str, given: Mapping[str, Any]) -> _Explanation:
    return say("{name}={value!r} with num_workers=0", name=name, value=given.get(name)), (
        say("pass num_workers of 1 or more"),
        say("or omit {name}", name=name),
    )


def _sampler(given: Mapping[str, Any]) -> _Explanation:
    kind = type(given["sampler"]).__name__
    return say("both determine the order, and the sampler is a {kind}", kind=kind), (
        say("omit shuffle"),
        say("or omit the sampler"),
    )


_KNOWN = {  # words of torch's sentence
    "batch_size should be a positive integer value": _batch_size,
    "num_workers option should be non-negative": _num_workers,
    "prefetch_factor option could only be specified in multiprocessing": lambda given: _needs_workers(
        "prefetch_factor", given
    ),
    "persistent_workers option needs num_workers > 0": lambda given: _needs_workers("persistent_workers", given),
    "sampler option is mutually exclusive with shuffle": _sampler,
}


def refuse_data(dataset: Any) -> None:
    """Raise if the dataset is what legroom.open returns: a mapping of names to arrays, of which torch asks item 0.

    It is not replaced by ``data.dataset()``: which arrays make a sample, and in which order, is the caller's choice.
    """
    if not isinstance(dataset, Mapping):
        return
    with import_lock:
        from legroom.cache.cached_arrays_and_tables import CachedData

    if not isinstance(dataset, CachedData):
        return
    names = [*dataset][:_NAMES_SHOWN]
    raise BadArgument(
        say("legroom.open() returns a mapping of names to arrays, which is not a torch Dataset"),
        why=say("it holds {shown}", shown=names_shown([*dataset])),
        fix=(
            say("make a Dataset of the arrays that you need: {code}",
                code=f"legroom.DataLoader(data.dataset({', '.join(map(repr, names))}), …)"),
            say("or iterate over batches without workers: data.batches(32)"),
        ),
    )  # fmt: skip


def explain_pickling(dataset: Any, collate_fn: Any, worker_init_fn: Any) -> Unpicklable | None:
    """The error for the first of these that cannot be pickled; None if all can."""
    function = collate_fn.fn if isinstance(collate_fn, SlotCollate) else collate_fn
    parts = {"dataset": dataset, "collate_fn": function, "worker_init_fn": worker_init_fn}
    for name, part in parts.items():
        try:
            ForkingPickler.dumps(part)
        except Exception as problem:
            return Unpicklable(
                say("the {name} cannot be sent to worker processes", name=name),
                why=say(
                    "{kind} must be pickled for every worker, which fails: {problem}", kind=type(part), problem=problem
                ),
                fix=(
                    say("define it at the top level of a module: no lambda, no function inside a function"),
                    say("open files and connections in worker_init_fn or at first use, not in __init__"),
                    say("multiprocessing_context='fork' pickles nothing"),
                ),
            )
    return None


def use_short_tmpdir(*, required: bool) -> None:
    """Let multiprocessing put its sockets in /tmp if the path of the temporary directory is too long for them.

    Newer Python versions do so themselves. Workers that are started by forkserver need sockets, and so does torch's
    transport. LoaderError if no directory is short enough and sockets are ``required``.
    """
    given = tempfile.gettempdir()
    if sys.platform == "win32" or _short_enough(given):
        return
    from multiprocessing.util import get_temp_dir

    short = next((path for path in _SHORT_FOLDERS if _short_enough(path) and os.access(path, os.W_OK | os.X_OK)), given)
    before = tempfile.tempdir
    tempfile.tempdir = short
    try:
        # The folder is made once, for the first socket; workers get it from this process with any start method.
        folder = get_temp_dir()
    finally:
        tempfile.tempdir = before
    longest = longest_socket(sys.platform)
    length = len(os.fsencode(folder)) + _SOCKET_NAME
    if length <= longest:
        _log.info(say("{path} is too long for sockets: the workers' sockets are in {short}", path=given, short=short))
    elif required:
        raise LoaderError(
            say("the path of the temporary directory is too long for the workers' sockets"),
            why=say(
                "a socket in {path} has a path of {length} bytes, the limit is {longest}",
                path=folder, length=length, longest=longest,
            ),
            fix=(
                say("set a short writable path before Python starts, for example:\nexport TMPDIR=/tmp"),
            ),
        )  # fmt: skip


def _short_enough(folder: str) -> bool:
    return len(os.fsencode(folder)) + SOCKET_TAIL <= longest_socket(sys.platform)
