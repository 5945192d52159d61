"""The state of a loop over ``data.batches``: as a dict of plain values, and checked when it is loaded.

A state is refused if its position would mean other rows here: other data, another order, other windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from legroom.errors import UsageError
from legroom.messages import listed, phrase, say
from legroom.system.argument_checks import WORD

VERSION = 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What determines an order: other data or another seed would give other rows at the same positions."""

    rows: int
    shuffle: bool
    seed: int
    digest: str | None  # of the source, where it was hashed
    columns: list[str]  # with types and shapes
    windows: list[Any] | None = None  # of a token file: sequence_length, stride and dtype
    chosen: str | None = None  # which rows of the data, if not all


_OPTIONAL = ("windows", "chosen")  # not in a state where they are None, as in states from before there were any


# Fields that must agree, and what is said where they do not.
_DIFFERENCES = (
    (
        ("windows",),
        phrase("the state was saved with other windows"),
        phrase("sequence_length, stride and dtype: {theirs} in the state, {ours} here"),
        phrase("pass the sequence_length, stride and dtype that it was saved with"),
    ),
    (
        ("chosen",),
        phrase("the state was saved with other rows of the data"),
        phrase("rows: {theirs} in the state, {ours} here"),
        phrase("pass the rows that it was saved with"),
    ),
    (
        ("rows", "digest", "columns"),
        phrase("the state was saved with other data"),
        phrase("{name}: {theirs} in the state, {ours} here"),
        phrase("open the data it was saved with"),
    ),
    (
        ("shuffle", "seed"),
        phrase("the state was saved with another order"),
        phrase("{name}={theirs} in the state, {name}={ours} here"),
        phrase("batches(…, {name}={theirs}) resumes where it stopped"),
    ),
)


class EpochPosition(NamedTuple):
    """An epoch, and how many rows of its order have been given out."""

    epoch: int
    position: int = 0


def as_dict(position: EpochPosition, of: Fingerprint) -> dict[str, Any]:
    """The state, which can be pickled or written as JSON."""
    fields = {name: value for name, value in asdict(of).items() if value is not None or name not in _OPTIONAL}
    return {"version": VERSION, "epoch": position.epoch, "position": position.position, **fields}


def from_dict(state: Mapping[str, Any], here: Fingerprint) -> EpochPosition:
    """The position in a state, if the state belongs to the data and order of ``here``."""
    wanted = {"version", "epoch", "position", *asdict(here)} - set(_OPTIONAL)
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
    for names, what, why, fix in _DIFFERENCES:
        for name in names:
            if not _agree(name, state, here):
                theirs, ours = (
                    say("all") if name == "chosen" and value is None else value
                    for value in (state.get(name), getattr(here, name))
                )
                raise _refused(what, why, fix, name=name, theirs=theirs, ours=ours)
    numbers = state["epoch"], state["position"]
    if any(type(one) is not int for one in numbers) or not 0 <= numbers[0] < WORD or not 0 <= numbers[1] <= here.rows:
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
    return bool(state.get(name) == getattr(here, name))


def _refused(what: str, why: str, fix: str, **values: object) -> UsageError:
    return UsageError(say(what, **values), why=say(why, **values), fix=(say(fix, **values),))
