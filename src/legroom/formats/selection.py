"""Which items of a file are asked for.

Covers: choosing by name or by group, columns of tables too, and the error for a name that is not there. Does not
cover: walking a file, which each format does its own way, asking a Selection what to enter and what to take.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from legroom.errors import MissingKey, UsageError
from legroom.words import listed, say, shown

_SHOWN = 20


class Selection:
    """The keys asked for; none given means everything."""

    def __init__(self, keys: str | Iterable[str] | None = None) -> None:
        if keys is None:
            self.keys: tuple[str, ...] | None = None
            return
        given = (keys,) if isinstance(keys, str) else tuple(keys) if isinstance(keys, Iterable) else ()
        if not given or not all(isinstance(key, str) for key in given):
            raise UsageError(
                say("keys={keys!r} selects nothing", keys=keys),
                why=say("keys names items of the file; None means all of them"),
                fix=(say("leave keys out to take everything"),),
            )
        self.keys = given

    def takes(self, name: str) -> bool:
        """Whether that item is asked for, by its own name or that of a group above it."""
        return self.keys is None or any(_covers(key, name) for key in self.keys)

    def enters(self, group: str) -> bool:
        """Whether something below that group may be asked for."""
        if self.keys is None or self.takes(group):
            return True
        return any(key.strip("/").startswith(group + "/") for key in self.keys)

    def columns(self, table: str, names: Iterable[str]) -> list[str]:
        """The columns of a table that are asked for: as ``column``, as ``table/column``, or all by the table's name."""
        every = list(names)
        if self.keys is None:
            return every
        # A column that has the table's name is meant before the table.
        if table not in every and self.takes(table):
            return every
        below = [key for key in self.keys if not _covers(key, table)]
        return [
            name
            for name in every
            if self.takes(name) or any(_covers(key, f"{table}/{name}") for key in below)
        ]

    def check(self, taken: Collection[str], every: Iterable[str], where: object) -> None:
        """Refuse a key that no item taken answers to; ``every`` is what there is to choose from."""
        for key in self.keys or ():
            if not any(_covers(key, name) for name in taken):
                raise missing_key(key, every, where)


def _covers(key: str, name: str) -> bool:
    bare = key.strip("/")
    return name in (key, bare) or not bare or name.startswith((bare + "/", key + "/"))


def column_names(table: str, columns: Iterable[str]) -> list[str]:
    """Every name that a table and these columns of it answer to."""
    named = list(columns)
    return [table, *named, *(f"{table}/{name}" for name in named)]


def missing_key(key: str, every: Iterable[str], where: object) -> MissingKey:
    """The error for a name that is not there: what there is, and the nearest."""
    names = list(dict.fromkeys(every))
    groups = {name.rpartition("/")[0] for name in names} - {""}
    bare, among = key.strip("/"), [*names, *sorted(groups)]
    # What is above it may be the table, which the names do not repeat.
    near = _nearest(bare, among) or _nearest(bare.rpartition("/")[2], among)
    held = listed(map(shown, names[:_SHOWN])) or say("nothing")
    if len(names) > _SHOWN:
        held = say("{shown} and {more} more", shown=held, more=len(names) - _SHOWN)
    fix = [say("did you mean {near!r}?", near=near[0])] if near else []
    return MissingKey(
        say("{where} has no {key!r}", where=where, key=key),
        why=say("it holds {shown}", shown=held),
        fix=(*fix, say("leave keys out to take everything")),
    )


def _nearest(name: str, among: list[str]) -> list[str]:
    return difflib.get_close_matches(name, among, n=1, cutoff=0.5)
