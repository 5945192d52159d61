"""The state_dict of a stream: its fields, and which states are refused.

A state holds numbers and strings only, never rows, so JSON, pickle and torch.save can store it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from legroom.errors import UsageError
from legroom.loader.stream.shards import Shard
from legroom.loader.stream.shuffle import StreamPosition
from legroom.words import say

_VERSION = 1


def pack(
    settings: Mapping[str, Any], epoch: int, shard: Shard, mark: StreamPosition | None, count: int
) -> dict[str, Any]:
    """The state after ``count`` batches of that epoch; ``mark`` None: it has not begun."""
    return {
        "legroom_stream": _VERSION,
        "settings": dict(settings),
        "epoch": epoch,
        "batches": count,
        "shard": asdict(shard),
        "position": None if mark is None else asdict(mark),
    }


def unpack(
    state: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[int, Shard, StreamPosition | None, int]:
    """(epoch, shard, position, batches) of a state that was saved of this very stream."""
    if not isinstance(state, Mapping) or state.get("legroom_stream") != _VERSION:
        raise UsageError(
            say("this is no state of a stream that can be read here"),
            why=say("it should hold legroom_stream={version}", version=_VERSION),
            fix=(say("give what state_dict() of a stream returned"),),
        )
    saved = state.get("settings", {})
    for name in settings:
        if saved.get(name) != settings[name]:
            raise UsageError(
                say("the state was saved of another stream"),
                why=say(
                    "{name} was {then!r} and is {now!r}",
                    name=say("the data (their files, rows or columns)") if name == "data" else name,
                    then=saved.get(name),
                    now=settings[name],
                ),
                fix=(
                    say("make the stream with the files and settings it had"),
                    say("or begin the epoch anew: leave load_state_dict out"),
                ),
            )
    try:
        position = state["position"]
        mark = None if position is None else StreamPosition(**position)
        return int(state["epoch"]), Shard(**state["shard"]), mark, int(state["batches"])
    except (KeyError, TypeError, ValueError) as problem:
        raise UsageError(
            say("this state of a stream is incomplete"),
            why=repr(problem),
            fix=(say("save it again with state_dict()"),),
        ) from problem


def require_shard(saved: Shard, here: Shard) -> None:
    """Refuse to go on in a shard that another reader left."""
    if saved != here:
        raise UsageError(
            say("the state was saved by another reader of this stream"),
            why=say(
                "it was worker {worker} of {workers} and is worker {now} of {of}",
                worker=saved.worker, workers=saved.workers, now=here.worker, of=here.workers,
            ),
            fix=(say("save and load one state for each worker, with as many workers as before"),),
        )  # fmt: skip
