"""The datasets of an HDF5 file by name, and the other files behind it: links, virtual datasets, external storage.

Names are found through nested groups and hard, soft and external links. A dataset with two names is found under both.
Groups may contain themselves. Only what is selected is opened, so a broken link or an unsupported dataset elsewhere in
the file does no harm.

Another file is searched where HDF5 searches it, along every chain of links. A missing one is an error here; HDF5 would
return zeros without a message. A file that refers to others keeps its bytes and its times while its data change. So an
identity of the data needs the other files too, and that each search still ends at the same file. A search depends on
the working directory, on HDF5_EXT_PREFIX, HDF5_VDS_PREFIX and HDF5_EXTFILE_PREFIX, and on the files in the directories
searched first. Each is recorded as a Lookup, which can be repeated without HDF5.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from legroom.errors import SourceChanged, UnreadableSource, UnsupportedData
from legroom.formats.base_reader import Lookup, Selection
from legroom.formats.file_reads_and_errors import absolute, damaged, require_regular
from legroom.formats.hdf5_chunks_and_filters import memory_in_hdf5
from legroom.formats.hdf5_open import descriptor, hdf5_errors, open_hdf5, path_of
from legroom.messages import say

_ORIGIN = "${ORIGIN}"
_NOWHERE = "/legroom-origin"  # a directory that does not exist, to see how HDF5 expands ${ORIGIN}
_MOST_STEPS = 100  # in one chain of links (HDF5 itself gives up after 16) or of virtual datasets
_MOST_OPEN = 32


def look_up(kind: str, name: str, holder: Path) -> Lookup:
    """Search as HDF5 does for a file that ``holder`` refers to."""
    if kind == "storage":
        folder = _expand_origin(_library_prefixes()[1], holder)
        path = absolute(os.path.join(folder, name) if folder else name)
        return Lookup(kind, name, holder, path if path.is_file() else None)
    if os.path.isabs(name):
        if os.path.isfile(name):
            return Lookup(kind, name, holder, absolute(name))
        given = os.path.basename(name)
    else:
        given = name
    for folder in _search_folders(kind, holder):
        candidate = os.path.join(folder, given)
        if os.path.isfile(candidate):
            return Lookup(kind, name, holder, absolute(candidate))
    return Lookup(kind, name, holder, None)


def _search_folders(kind: str, holder: Path) -> Iterator[str]:
    """The directories that HDF5 searches, in its order; "" is the working directory."""
    variable = "HDF5_EXT_PREFIX" if kind == "link" else "HDF5_VDS_PREFIX"
    yield from (prefix for prefix in os.environ.get(variable, "").split(":") if prefix)
    if kind == "virtual" and (prefix := _expand_origin(_library_prefixes()[0], holder)):
        yield prefix  # the variable again: unsplit, and as it was when the library was loaded
    yield os.path.dirname(holder)
    yield ""
    yield os.path.dirname(os.path.realpath(holder))


def _expand_origin(prefix: str, holder: Path) -> str:
    if prefix.startswith(_ORIGIN):
        return os.path.dirname(holder) + "/" + prefix.removeprefix(_ORIGIN)
    return prefix


def _library_prefixes() -> tuple[str, str]:
    """The prefixes of virtual datasets and of external storage that HDF5 uses in this process.

    The library reads both variables once, when it is loaded; before that, their current values count.
    """
    if "h5py" in sys.modules:
        return _loaded_prefixes()
    return os.environ.get("HDF5_VDS_PREFIX", ""), os.environ.get("HDF5_EXTFILE_PREFIX", "")


@cache
def _loaded_prefixes() -> tuple[str, str]:
    import h5py

    with h5py.File(_NOWHERE + "/x", "w", driver="core", backing_store=False) as file:
        access = file.create_dataset("x", (1,), "i1").id.get_access_plist()
        found = access.get_virtual_prefix(), access.get_efile_prefix()
    virtual, storage = (os.fsdecode(prefix) for prefix in found)
    return virtual.replace(_NOWHERE + "/", _ORIGIN, 1), storage.replace(_NOWHERE + "/", _ORIGIN, 1)


def link_of(group: Any, key: str | bytes) -> Any:
    """The link of a name as h5py describes it, also if the name is not UTF-8; TypeError for a user-defined link."""
    import h5py

    name = key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key
    links = group.id.links
    kind = links.get_info(name).type
    if kind == h5py.h5l.TYPE_HARD:
        return h5py.HardLink()
    if kind == h5py.h5l.TYPE_SOFT:
        return h5py.SoftLink(links.get_val(name).decode("utf-8", "surrogateescape"))
    if kind != h5py.h5l.TYPE_EXTERNAL:
        raise TypeError(kind)
    file, path = links.get_val(name)
    return h5py.ExternalLink(os.fsdecode(file), path.decode("utf-8", "surrogateescape"))


_DatasetKey = tuple[Path, str]  # file and name of a dataset


@dataclass(frozen=True, slots=True)
class _Virtual:
    """A virtual dataset, queried before the files of its sources are opened."""

    key: _DatasetKey
    dataset: Any
    cache: int  # bytes of chunks that HDF5 keeps of each source


@dataclass(frozen=True, slots=True)
class _SourceMemory:
    """Memory that a source of a virtual dataset takes: to decode a chunk, and as long as it is open."""

    decoding: int
    cached: int


def _source_memory(source: Any, cache: int) -> _SourceMemory:
    width = int(source.id.get_type().get_size())
    chunk = prod(source.chunks) * width if source.chunks is not None else 0
    kept = 0
    if 0 < chunk <= cache:  # a larger one is decoded each time it is read
        kept = min(cache, -(-(source.size or 0) * width // chunk) * chunk)
    return _SourceMemory(memory_in_hdf5(source), kept)


class ExternalFiles:
    """Follows links and virtual datasets through other files and records each search; a context manager."""

    def __init__(self, opened: Path) -> None:
        self._opened = opened  # the file that the links and datasets are in
        self._open: dict[Path, Any] = {}
        # For each virtual dataset, its source datasets and the memory that reading each takes.
        self._sources: dict[_DatasetKey, dict[_DatasetKey, _SourceMemory]] = {}
        self._followed: list[tuple[int, int, int]] = []  # the virtual datasets whose sources are being followed

    def __enter__(self) -> ExternalFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def behind_link(self, node: Any, link: Any, name: str, holder: Path) -> list[Lookup]:
        """Every search made to follow a soft or external link in the group ``node``."""
        import h5py

        if isinstance(link, h5py.SoftLink):
            return list(self._along(node, link.path, name, holder))
        if isinstance(link, h5py.ExternalLink):
            return list(self._into_link(link, name, holder, 0))
        return []

    def behind_dataset(self, dataset: Any, name: str) -> Iterator[Lookup]:
        """Every search for other files that hold the dataset's data, through any number of steps."""
        key = holder, _ = self._key(dataset)
        if key in self._sources:
            return
        self._sources[key] = {}
        if dataset.external:
            yield from external_storage(dataset, name, holder)
        if dataset.is_virtual:
            with hdf5_errors(holder, f"the sources of {name!r}"):
                sources = sorted({(source.file_name, source.dset_name) for source in dataset.virtual_sources()})
                cache = int(dataset.id.get_access_plist().get_chunk_cache()[1])
            self._followed.append(self._stored_at(dataset))
            try:
                for file_name, inner in sources:
                    yield from self._virtual_source(_Virtual(key, dataset, cache), name, file_name, inner)
            finally:
                self._followed.pop()

    def memory_behind(self, dataset: Any) -> int:
        """Bytes of memory that HDF5 takes to read the sources of a virtual dataset whose ``behind_dataset`` is known.

        It keeps every source open, each with a cache of chunks, and decodes one chunk at a time.
        """
        found = self._sources.get(self._key(dataset), {}).values()
        return max((one.decoding for one in found), default=0) + sum(one.cached for one in found)

    def path_of(self, node: Any) -> Path:
        """The file that a group or dataset is in."""
        return path_of(node.file, self._opened)

    def _key(self, dataset: Any) -> _DatasetKey:
        return self.path_of(dataset), dataset.name

    def _stored_at(self, dataset: Any) -> tuple[int, int, int]:
        """Where a dataset is stored, whatever the names of the dataset and of its file."""
        import h5py

        file = os.stat(self.path_of(dataset))
        return file.st_dev, file.st_ino, int(h5py.h5o.get_info(dataset.id).addr)

    def _along(self, node: Any, path: str, name: str, holder: Path, steps: int = 0) -> Iterator[Lookup]:
        """The searches made to follow ``path`` from the group ``node`` (from the root if it starts with /)."""
        import h5py

        waiting = [part for part in path.split("/") if part not in ("", ".")][::-1]
        if path.startswith("/"):
            node = node.file["/"]
        while waiting and isinstance(node, h5py.Group):
            part = waiting.pop()
            try:
                link = link_of(node, part)
                if isinstance(link, h5py.SoftLink):
                    waiting += [step for step in link.path.split("/") if step not in ("", ".")][::-1]
                    node = node.file["/"] if link.path.startswith("/") else node
                elif not isinstance(link, h5py.ExternalLink):
                    node = node[part.encode("utf-8", "surrogateescape")] if waiting else None
            except Exception:
                return  # a broken link: reading its data raises the error
            steps += 1
            if steps > _MOST_STEPS:
                return
            if isinstance(link, h5py.ExternalLink):
                rest = "/".join([link.path, *waiting[::-1]])
                yield from self._into_link(link, name, holder, steps, rest)
                return

    def _into_link(self, link: Any, name: str, holder: Path, steps: int, path: str | None = None) -> Iterator[Lookup]:
        lookup = look_up("link", link.filename, holder)
        if lookup.found is None:
            raise missing_file(name, holder, link.filename, say("external link"))
        yield lookup
        file = self._file(lookup.found)
        yield from self._along(file["/"], link.path if path is None else path, name, lookup.found, steps)

    def _virtual_source(self, virtual: _Virtual, name: str, file_name: str, inner: str) -> Iterator[Lookup]:
        holder = virtual.key[0]
        if file_name == ".":
            yield from self._into(virtual, virtual.dataset.file, inner, name, holder)
            return
        for lookup in _virtual_files(file_name, inner, name, holder):
            yield lookup
            if lookup.found is not None:
                yield from self._into(virtual, self._file(lookup.found), inner, name, lookup.found)

    def _into(self, virtual: _Virtual, file: Any, inner: str, name: str, holder: Path) -> Iterator[Lookup]:
        """Continue with a source dataset, which may itself be virtual or behind links."""
        path = inner.replace("%%", "%")
        yield from self._along(file["/"], path, name, holder)
        try:
            source = file[path]
            more = source.is_virtual or source.external
            key, takes, place = self._key(source), _source_memory(source, virtual.cache), self._stored_at(source)
        except (KeyError, AttributeError, ValueError, RuntimeError, OSError) as problem:
            raise UnreadableSource(
                say("{name!r} needs the dataset {inner!r} of {path}", name=name, inner=inner, path=holder),
                why=say("that file has no such dataset"),
                fix=(say("restore it"), say("load only what you need: keys=[…]")),
            ) from problem
        if place in self._followed or len(self._followed) > _MOST_STEPS:
            raise self._endless(virtual, name, loop=place in self._followed)
        if more:
            yield from self.behind_dataset(source, name)
        self._sources[virtual.key] |= {key: takes, **self._sources.get(key, {})}

    def _endless(self, virtual: _Virtual, name: str, *, loop: bool) -> UnsupportedData:
        """The error for virtual datasets that HDF5 would follow until its stack overflows."""
        path, inner = virtual.key
        return UnsupportedData(
            say("the sources of {name!r} cannot be followed", name=name),
            why=say("the virtual dataset {inner!r} of {path} leads back to itself", inner=inner, path=path)
            if loop
            else say("more than {most} virtual datasets refer to each other in a chain", most=_MOST_STEPS),
            fix=(say("copy the data into one dataset"), say("load only what you need: keys=[…]")),
        )

    def _file(self, path: Path) -> Any:
        """The file, opened with all checks: HDF5 would open one that is being written."""
        if path not in self._open:
            while len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[path] = open_hdf5(path)
        return self._open[path]


def _virtual_files(file_name: str, inner: str, name: str, holder: Path) -> Iterator[Lookup]:
    """The files of a virtual source; ``%b`` stands for 0, 1, 2 and so on, as far as files exist.

    The first missing file is part of the answer: if it appears, there are more data.
    """
    if "%b" in inner.replace("%%", ""):
        raise UnsupportedData(
            say(
                "{name!r} of {holder} has sources with numbered names ({inner!r})",
                name=name,
                holder=holder,
                inner=inner,
            ),
            why=say("the file does not store how many there are"),
            fix=(say("rewrite it with every source named"), say("load only what you need: keys=[…]")),
        )
    numbered = "%b" in file_name.replace("%%", "")
    count = 0
    while True:
        given = file_name.replace("%b", str(count)) if numbered else file_name.replace("%%", "%")
        lookup = look_up("virtual", given, holder)
        if lookup.found is None and count == 0:
            raise missing_file(name, holder, given, say("virtual dataset"))
        yield lookup
        count += 1
        if lookup.found is None or not numbered:
            return


def external_storage(dataset: Any, name: str, holder: Path) -> list[Lookup]:
    """The searches for the raw files of a dataset with external storage."""
    lookups = [look_up("storage", file_name, holder) for file_name, _, _ in dataset.external]
    for lookup in lookups:
        if lookup.found is None:
            # By default HDF5 searches the working directory only.
            beside = holder.parent / lookup.name
            raise missing_file(name, holder, lookup.name, say("external storage"), beside=beside)
        require_regular(lookup.found)
    if not lookups:
        raise damaged(holder, f"{name!r} has external storage but lists no files")
    return lookups


def missing_file(name: str, holder: Path, target: str, kind: str, beside: Path | None = None) -> UnreadableSource:
    """The error for a missing file that another one needs."""
    fix = [say("restore it next to {holder}", holder=holder), say("load only what you need: keys=[…]")]
    if beside is not None and beside.is_file():
        fix.insert(
            0,
            say(
                "it is next to the HDF5 file: set HDF5_EXTFILE_PREFIX={folder} before the program starts",
                folder=beside.parent,
            ),
        )
    return UnreadableSource(
        say("{target} is missing", target=target),
        why=say("{name!r} of {holder} needs it ({kind})", name=name, holder=holder, kind=kind),
        fix=fix,
    )


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

        with hdf5_errors(self._path, f"the group {group.name or '/'!r}"):
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
            raise damaged(self._path, f"it has more than {_MOST_LINKS} links")
        if self._repeated > _MOST_REPEATED:
            raise UnsupportedData(
                say("{path} has too many names for the same datasets", path=self._path),
                why=say("groups reached by several links hold more than {most} names", most=_MOST_REPEATED),
                fix=(say("load only what you need: keys=[…]"),),
            )

    def _follow(self, group: FoundNode, key: str | bytes, name: str) -> FoundNode:
        import h5py

        through = group.through
        holder = self._external.path_of(group.node)
        with hdf5_errors(self._path, f"the link {name!r}"):
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
