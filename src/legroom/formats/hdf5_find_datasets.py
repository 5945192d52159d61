"""Find the datasets of an HDF5 file by name, through nested groups and hard, soft and external links.

A dataset with two names is found under both. Groups may contain themselves. Only what is selected is opened, so a
broken link or an unsupported dataset elsewhere in the file does no harm.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legroom.errors import SourceChanged, UnreadableSource, UnsupportedData
from legroom.formats.base_reader import Lookup, Selection
from legroom.formats.file_reads_and_errors import absolute, damaged
from legroom.formats.hdf5_external_files import ExternalFiles, link_of
from legroom.formats.hdf5_open import descriptor, hdf5_errors
from legroom.messages import say

_MOST_LINKS = 1_000_000
_MOST_REPEATED = 10_000  # names below groups reached before: n groups of two links each have 2^n names
_MOST_LEVELS = 200  # nested groups: each takes a frame of Python's stack


@dataclass(frozen=True, slots=True)
class FoundNode:
    """A dataset or group under one of its names; ``through``: the searches for other files that links led into."""

    name: str
    node: Any
    through: tuple[Lookup, ...] = ()


class DatasetSearch:
    """One search through a file."""

    def __init__(self, path: Path, selection: Selection, external: ExternalFiles) -> None:
        self._path = path
        self._selection = selection
        self._external = external
        self._links = self._repeated = 0
        self._reached: set[tuple[int, ...]] = set()

    def __call__(self, file: Any) -> Iterator[FoundNode]:
        """Selected groups, and datasets that may be selected, in file order."""
        yield from self._group(FoundNode("", file), frozenset({self._identity(file)}), repeated=False)

    def _group(self, group: FoundNode, above: frozenset[tuple[int, ...]], *, repeated: bool) -> Iterator[FoundNode]:
        import h5py

        if len(above) > _MOST_LEVELS:
            raise UnsupportedData(
                say("{path} has more than {most} levels of groups", path=self._path, most=_MOST_LEVELS),
                why=say("the deepest group reached is {name!r}", name=group.name),
                fix=(say("load only what you need: keys=[…]"),),
            )

        with hdf5_errors(self._path, say("the group {name!r}", name=group.name or "/")):
            keys = list(group.node)
        for key in keys:
            name = group.name + "/" + readable(key) if group.name else readable(key)
            if not self._selection.enters(name):
                continue
            self._count(repeated)
            found = self._follow(group, key, name)
            if isinstance(found.node, h5py.Dataset):
                yield found
            elif isinstance(found.node, h5py.Group):
                identity = self._identity(found.node)
                if identity not in above:
                    yield found
                    repeated_below = repeated or identity in self._reached
                    self._reached.add(identity)
                    yield from self._group(found, above | {identity}, repeated=repeated_below)

    def _count(self, repeated: bool) -> None:
        """Refuse a file with far too many names, before following them takes minutes."""
        self._links += 1
        self._repeated += repeated
        if self._links > _MOST_LINKS:
            raise damaged(self._path, say("it has more than {most} links", most=_MOST_LINKS))
        if self._repeated > _MOST_REPEATED:
            raise UnsupportedData(
                say("{path} has too many names for the same datasets", path=self._path),
                why=say("groups reached by several links hold more than {most} names", most=_MOST_REPEATED),
                fix=(say("load only what you need: keys=[…]"),),
            )

    def _follow(self, group: FoundNode, key: str | bytes, name: str) -> FoundNode:
        import h5py

        through = group.through
        holder = absolute(group.node.file.filename)
        with hdf5_errors(self._path, say("the link {name!r}", name=name)):
            try:
                link = link_of(group.node, key)
            except TypeError:  # user-defined
                raise _unknown_link(name, self._path) from None
        searches = self._external.behind_link(group.node, link, name, holder)
        through = (*through, *searches)
        try:
            with hdf5_errors(self._path, repr(name)):
                node = group.node[key]
        except Exception:
            if not isinstance(link, h5py.SoftLink | h5py.ExternalLink):
                raise
            raise _dangling(name, link.path, (searches and searches[-1].found) or self._path) from None
        if not isinstance(link, h5py.HardLink) and not _is_in(node, (searches and searches[-1].found) or holder):
            raise SourceChanged(
                say("the link {name!r} of {path} changed while it was followed", name=name, path=self._path),
                why=say("HDF5 opened {file}", file=node.file.filename),
                fix=(say("try again when no process is replacing it"), say("load only what you need: keys=[…]")),
            )
        return FoundNode(name, node, through)

    def _identity(self, group: Any) -> tuple[int, ...]:
        import h5py

        with hdf5_errors(self._path, "a group"):
            info = h5py.h5o.get_info(group.id)
            return (info.fileno, info.addr)


def _is_in(node: Any, path: Path) -> bool:
    """Whether HDF5 read the node from the file at that path."""
    fd = descriptor(node.file)
    try:
        return fd is None or os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


def readable(name: str | bytes) -> str:
    """A name as text; h5py returns bytes if it is not UTF-8."""
    return name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")


def dataset_names(file: Any, most: int = 1000) -> list[str]:
    """Names of datasets for an error message, as many as can be read."""
    import h5py

    names: list[str] = []

    def note(name: str | bytes, node: Any) -> bool | None:
        if isinstance(node, h5py.Dataset):
            names.append(readable(name))
        return True if len(names) >= most else None

    try:
        file.visititems(note)
    except Exception:  # the message reports another problem
        pass
    return names


def _dangling(name: str, target: str, path: Path) -> UnreadableSource:
    return UnreadableSource(
        say("{name!r} is a broken link", name=name),
        why=say("it points to {target!r} of {path}, which does not exist", target=target, path=path),
        fix=(say("restore what it points to"), say("load only what you need: keys=[…]")),
    )


def _unknown_link(name: str, path: Path) -> UnsupportedData:
    return UnsupportedData(
        say("{name!r} of {path} is a user-defined link", name=name, path=path),
        why=say("only the program that wrote it can follow it"),
        fix=(say("load only what you need: keys=[…]"),),
    )
