"""Which arrays, groups and columns of a file are read: the ``keys`` argument.

Each format walks its file in its own way and asks a Selection what to enter and what to read.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from legroom.errors import MissingKey, UsageError
from legroom.words import listed, say, shown

_SHOWN = 20


class Selection:
    """The selected keys; None selects everything."""

    def __init__(self, keys: str | Iterable[str] | None = None) -> None:
        if keys is None:
            self.keys: tuple[str, ...] | None = None
            return
        given = (keys,) if isinstance(keys, str) else tuple(keys) if isinstance(keys, Iterable) else ()
        if not given or not all(isinstance(key, str) for key in given):
            raise UsageError(
                say("keys={keys!r} selects nothing", keys=keys),
                why=say("keys lists items of the file; None means all of them"),
                fix=(say("omit keys to load everything"),),
            )
        self.keys = given

    def takes(self, name: str) -> bool:
        """Whether that item is selected, by its own name or by a group above it."""
        return self.keys is None or any(_covers(key, name) for key in self.keys)

    def enters(self, group: str) -> bool:
        """Whether an item below that group may be selected."""
        if self.keys is None or self.takes(group):
            return True
        return any(key.strip("/").startswith(group + "/") for key in self.keys)

    def columns(self, table: str, names: Iterable[str]) -> list[str]:
        """The selected columns of a table: ``column``, ``table/column``, or all by the table's name."""
        every = list(names)
        if self.keys is None:
            return every
        # A column with the table's name takes precedence over the table.
        if table not in every and self.takes(table):
            return every
        below = [key for key in self.keys if not _covers(key, table)]
        return [
            name
            for name in every
            if self.takes(name) or any(_covers(key, f"{table}/{name}") for key in below)
        ]

    def check(self, taken: Collection[str], every: Iterable[str], where: object) -> None:
        """Refuse a key that matches no selected item; ``every`` is listed in the error."""
        for key in self.keys or ():
            if not any(_covers(key, name) for name in taken):
                raise missing_key(key, every, where)


def _covers(key: str, name: str) -> bool:
    bare = key.strip("/")
    return name in (key, bare) or not bare or name.startswith((bare + "/", key + "/"))


def column_names(table: str, columns: Iterable[str]) -> list[str]:
    """All names that select a table or these columns of it."""
    named = list(columns)
    return [table, *named, *(f"{table}/{name}" for name in named)]


def missing_key(key: str, every: Iterable[str], where: object) -> MissingKey:
    """The error for an unknown name, with the names that exist and the nearest one."""
    names = list(dict.fromkeys(every))
    groups = {name.rpartition("/")[0] for name in names} - {""}
    bare, among = key.strip("/"), [*names, *sorted(groups)]
    # The part before the last slash may be the table, which the column names do not repeat.
    near = _nearest(bare, among) or _nearest(bare.rpartition("/")[2], among)
    held = listed(map(shown, names[:_SHOWN])) or say("nothing")
    if len(names) > _SHOWN:
        held = say("{shown} and {more} more", shown=held, more=len(names) - _SHOWN)
    fix = [say("did you mean {near!r}?", near=near[0])] if near else []
    return MissingKey(
        say("{where} has no {key!r}", where=where, key=key),
        why=say("it holds {shown}", shown=held),
        fix=(*fix, say("omit keys to load everything")),
    )


def _nearest(name: str, among: list[str]) -> list[str]:
    return difflib.get_close_matches(name, among, n=1, cutoff=0.5)
