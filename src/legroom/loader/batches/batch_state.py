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
from legroom.records import Entry
from legroom.words import listed, phrase, say

VERSION = 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What determines an order: other data or another seed would give other rows at the same positions."""

    rows: int
    shuffle: bool
    seed: int
    digest: str | None  # of the source, where it was hashed
    columns: list[str]  # with types and shapes


class EpochPosition(NamedTuple):
    """An epoch, and how many rows of its order have been given out."""

    epoch: int
    position: int = 0


def fingerprint(entry: Entry, columns: Mapping[str, Column], *, shuffle: bool, seed: int) -> Fingerprint:
    """The fingerprint of these columns in this order."""
    shown = sorted(
        # Not translated: it is compared with states of other runs.
        f"{name} {getattr(column, 'dtype', 'ragged')}{list(column.shape)}"
        for name, column in columns.items()
    )
    digest = f"{entry.hash}:{entry.digest}" if entry.digest is not None else None
    return Fingerprint(len(next(iter(columns.values()))), shuffle, seed, digest, shown)


def as_dict(position: EpochPosition, of: Fingerprint) -> dict[str, Any]:
    """The state, which can be pickled or written as JSON."""
    return {"version": VERSION, "epoch": position.epoch, "position": position.position, **asdict(of)}


def from_dict(state: Mapping[str, Any], here: Fingerprint) -> EpochPosition:
    """The position in a state, if the state belongs to the data and order of ``here``."""
    wanted = {"version", "epoch", "position", *asdict(here)}
    if not isinstance(state, Mapping) or not wanted <= state.keys():
        raise _refused(
            phrase("this is not a state_dict of data.batches"),
            phrase("it must have the fields {fields}"),
            phrase("load the result of batches.state_dict()"),
            fields=listed(sorted(wanted)),
        )
    if state["version"] != VERSION:
        raise _refused(
            phrase("the state has format version {version}"),
            phrase("this version of Legroom reads format version {ours}"),
            phrase("load it with the version of Legroom that saved it"),
            version=state["version"],
            ours=VERSION,
        )
    for name in ("rows", "digest", "columns"):
        if not _agree(name, state, here):
            raise _refused(
                phrase("the state was saved with other data"),
                phrase("{name}: {theirs} in the state, {ours} here"),
                phrase("open the data it was saved with"),
                name=name,
                theirs=state[name],
                ours=getattr(here, name),
            )
    for name in ("shuffle", "seed"):
        if state[name] != getattr(here, name):
            raise _refused(
                phrase("the state was saved with another order"),
                phrase("{name}={theirs} in the state, {name}={ours} here"),
                phrase("batches(…, {name}={theirs}) resumes where it stopped"),
                name=name,
                theirs=state[name],
                ours=getattr(here, name),
            )
    if state["epoch"] < 0 or not 0 <= state["position"] <= here.rows:
        raise _refused(
            phrase("the state is damaged"),
            phrase("epoch {epoch}, position {position} of {rows} rows"),
            phrase("load the result of batches.state_dict()"),
            epoch=state["epoch"],
            position=state["position"],
            rows=here.rows,
        )
    return EpochPosition(state["epoch"], state["position"])


def _agree(name: str, state: Mapping[str, Any], here: Fingerprint) -> bool:
    """Digests identify data; columns are compared where a side has none (LEGROOM_DISABLE, inplace) or another hash."""
    kinds = [str(digest or "").partition(":")[0] for digest in (state["digest"], here.digest)]
    hashed = kinds[0] == kinds[1] != ""
    if (name == "digest" and not hashed) or (name == "columns" and hashed):
        return True
    return bool(state[name] == getattr(here, name))


def _refused(what: str, why: str, fix: str, **values: object) -> UsageError:
    return UsageError(say(what, **values), why=say(why, **values), fix=(say(fix, **values),))
