"""The state_dict of a stream: its fields, and which states are refused.

A state holds numbers and strings only, never rows, so JSON, pickle and torch.save can store it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from legroom.errors import UsageError
from legroom.loader.stream.rank_and_worker_shards import Shard
from legroom.loader.stream.shuffle import StreamPosition
from legroom.messages import say

_VERSION = 1


def pack(
    settings: Mapping[str, Any], epoch: int, shard: Shard, position: StreamPosition | None, count: int
) -> dict[str, Any]:
    """The state after ``count`` batches of that epoch; ``position`` None: it has not begun."""
    return {
        "legroom_stream": _VERSION,
        "settings": dict(settings),
        "epoch": epoch,
        "batches": count,
        "shard": asdict(shard),
        "position": None if position is None else asdict(position),
    }


def unpack(state: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[int, Shard, StreamPosition | None, int]:
    """(epoch, shard, position, batches) of a state that was saved with this stream."""
    if not isinstance(state, Mapping) or state.get("legroom_stream") != _VERSION:
        raise UsageError(
            say("this is not a state_dict of a stream, or of another format version"),
            why=say("it must contain legroom_stream={version}", version=_VERSION),
            fix=(say("load the result of stream.state_dict()"),),
        )
    saved = state.get("settings", {})
    for name in settings:
        if saved.get(name) != settings[name]:
            raise UsageError(
                say("the state was saved with another stream"),
                why=say(
                    "{name} was {then!r} and is {now!r}",
                    name=say("the data (their files, rows or columns)") if name == "data" else name,
                    then=saved.get(name),
                    now=settings[name],
                ),
                fix=(
                    say("create the stream with the same files and settings"),
                    say("or restart the epoch: do not call load_state_dict"),
                ),
            )
    try:
        saved_position = state["position"]
        position = None if saved_position is None else StreamPosition(**saved_position)
        return int(state["epoch"]), Shard(**state["shard"]), position, int(state["batches"])
    except (KeyError, TypeError, ValueError) as problem:
        raise UsageError(
            say("this state of a stream is incomplete"),
            why=repr(problem),
            fix=(say("save it again with state_dict()"),),
        ) from problem


def require_shard(saved: Shard, here: Shard) -> None:
    """Refuse to resume a shard that another worker was reading."""
    if saved != here:
        raise UsageError(
            say("the state was saved by another DataLoader worker"),
            why=say(
                "saved by worker {worker} of {workers}, loaded by worker {now} of {of}",
                worker=saved.worker, workers=saved.workers, now=here.worker, of=here.workers,
            ),
            fix=(say("save and load one state per worker, with the same number of workers"),),
        )  # fmt: skip
