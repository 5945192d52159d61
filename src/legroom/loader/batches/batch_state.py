"""The state_dict of ``data.batches``: its fields, and which states are refused.

A state is a dict of plain values. Its position counts the rows of the epoch's order that all ranks together have
received. So rank 0's state, which never has fewer batches than another rank's, serves every rank, also with another
world size or batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from legroom.errors import UsageError
from legroom.loader.batches.gather import Column
from legroom.model import Entry
from legroom.words import listed, phrase, say

VERSION = 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What an order belongs to: other data or another seed would give other rows at the same places."""

    rows: int
    shuffle: bool
    seed: int
    digest: str | None  # of the source, where it was hashed
    columns: list[str]  # with types and shapes


class EpochPosition(NamedTuple):
    """An epoch, and how much of its order has been given out."""

    epoch: int
    position: int = 0


def fingerprint(entry: Entry, columns: Mapping[str, Column], *, shuffle: bool, seed: int) -> Fingerprint:
    """Of these columns of this data under this order."""
    shown = sorted(
        # Compared with states of other runs, whatever language they spoke.
        f"{name} {getattr(column, 'dtype', 'ragged')}{list(column.shape)}"
        for name, column in columns.items()
    )
    digest = f"{entry.hash}:{entry.digest}" if entry.digest is not None else None
    return Fingerprint(len(next(iter(columns.values()))), shuffle, seed, digest, shown)


def as_dict(place: EpochPosition, of: Fingerprint) -> dict[str, Any]:
    """The state, ready to be pickled or written as JSON."""
    return {"version": VERSION, "epoch": place.epoch, "position": place.position, **asdict(of)}


def from_dict(state: Mapping[str, Any], here: Fingerprint) -> EpochPosition:
    """The place that a state names, if it is one of ``here``."""
    wanted = {"version", "epoch", "position", *asdict(here)}
    if not isinstance(state, Mapping) or not wanted <= state.keys():
        raise _refused(
            phrase("this is no state of batches"),
            phrase("a state_dict() of batches has the fields {fields}"),
            phrase("load what state_dict() gave"),
            fields=listed(sorted(wanted)),
        )
    if state["version"] != VERSION:
        raise _refused(
            phrase("the state has version {version}"),
            phrase("this is Legroom of version {ours} states"),
            phrase("load it with the Legroom that made it"),
            version=state["version"],
            ours=VERSION,
        )
    for name in ("rows", "digest", "columns"):
        if not _agree(name, state, here):
            raise _refused(
                phrase("the state belongs to other data"),
                phrase("its {name}: {theirs}; here: {ours}"),
                phrase("open the data that it was taken from"),
                name=name,
                theirs=state[name],
                ours=getattr(here, name),
            )
    for name in ("shuffle", "seed"):
        if state[name] != getattr(here, name):
            raise _refused(
                phrase("the state belongs to another order"),
                phrase("it has {name}={theirs}, these batches {name}={ours}"),
                phrase("batches(…, {name}={theirs}) goes on where it stopped"),
                name=name,
                theirs=state[name],
                ours=getattr(here, name),
            )
    if state["epoch"] < 0 or not 0 <= state["position"] <= here.rows:
        raise _refused(
            phrase("the state is damaged"),
            phrase("epoch {epoch}, position {position} of {rows} rows"),
            phrase("load what state_dict() gave"),
            epoch=state["epoch"],
            position=state["position"],
            rows=here.rows,
        )
    return EpochPosition(state["epoch"], state["position"])


def _agree(name: str, state: Mapping[str, Any], here: Fingerprint) -> bool:
    """Digests tell data apart; where one side has none (LEGROOM_DISABLE, inplace) or another hash, columns must do."""
    kinds = [str(digest or "").partition(":")[0] for digest in (state["digest"], here.digest)]
    hashed = kinds[0] == kinds[1] != ""
    if (name == "digest" and not hashed) or (name == "columns" and hashed):
        return True
    return bool(state[name] == getattr(here, name))


def _refused(what: str, why: str, fix: str, **values: object) -> UsageError:
    return UsageError(say(what, **values), why=say(why, **values), fix=(say(fix, **values),))
