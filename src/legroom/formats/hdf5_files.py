"""The files behind an HDF5 file: external links, virtual datasets, external storage.

Covers: finding each of them where HDF5 will look for it, and refusing when one is missing (HDF5 itself would
fill the gap with zeros and say nothing). Does not cover: reading them.

The bytes, the digest and the stat of a file that refers to others stay the same while its data change; whoever
identifies data by the file must know the others too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from legroom.errors import UnreadableSource, UnsupportedData
from legroom.formats.hdf5_open import hdf5_trouble, open_hdf5
from legroom.formats.source import damaged, require_regular
from legroom.words import say


def search(name: str, holder: Path, prefixes: Iterable[str]) -> Path | None:
    """Where HDF5 finds a file that ``holder`` names: first as an absolute path, then by its prefixes, beside
    the holder, in the working directory, and beside the file that the holder is a link to."""
    given = Path(name)
    if given.is_absolute():
        if given.is_file():
            return Path(os.path.normpath(given))
        given = Path(given.name)
    places = [Path(prefix.replace("${ORIGIN}", str(holder.parent))) for prefix in prefixes if prefix]
    places += [holder.parent, Path(), holder.resolve().parent]
    for place in places:
        if (place / given).is_file():
            return Path(os.path.abspath(place / given))
    return None


def linked_file(link: Any, name: str, holder: Path) -> Path:
    """The file an external link leads to."""
    prefixes = os.environ.get("HDF5_EXT_PREFIX", "").split(os.pathsep)
    found = search(link.filename, holder, prefixes)
    if found is None:
        raise missing_file(name, holder, link.filename, say("an external link"))
    return found


def files_behind(dataset: Any, name: str, seen: set[tuple[Path, str]]) -> Iterator[Path]:
    """Every file beyond its own whose bytes are the dataset's data, through any number of steps."""
    holder = Path(dataset.file.filename)
    if (holder, dataset.name) in seen:
        return
    seen.add((holder, dataset.name))
    if dataset.external:
        yield from (path for path in external_storage(dataset, name) if path is not None)
    if dataset.is_virtual:
        with hdf5_trouble(holder, say("the sources of {name!r}", name=name)):
            sources = sorted({(source.file_name, source.dset_name) for source in dataset.virtual_sources()})
        for file_name, inner in sources:
            yield from _virtual_source(dataset, name, file_name, inner, seen)


def _virtual_source(
    dataset: Any, name: str, file_name: str, inner: str, seen: set[tuple[Path, str]]
) -> Iterator[Path]:
    holder = Path(dataset.file.filename)
    if file_name == ".":
        yield from _into(dataset.file, inner, name, seen)
        return
    for path in _virtual_files(file_name, inner, name, holder):
        yield path
        with open_hdf5(path) as file:
            yield from _into(file, inner, name, seen)


def _into(file: Any, inner: str, name: str, seen: set[tuple[Path, str]]) -> Iterator[Path]:
    """Go on from a source dataset, which may itself be virtual or reached by an external link."""
    path = Path(file.filename)
    try:
        source = file[inner.replace("%%", "%")]
        reached = Path(os.path.abspath(source.file.filename))
        virtual = source.is_virtual
    except (KeyError, AttributeError, ValueError, RuntimeError, OSError) as problem:
        raise UnreadableSource(
            say("{name!r} takes data from {inner!r} of {path}", name=name, inner=inner, path=path),
            why=say("there is no such dataset in that file"),
            fix=(say("restore it, or leave the dataset out with keys=[…]"),),
        ) from problem
    if reached != Path(os.path.abspath(path)):
        yield reached
    if virtual or source.external:
        yield from files_behind(source, name, seen)


def _virtual_files(file_name: str, inner: str, name: str, holder: Path) -> list[Path]:
    """The files a virtual source names; ``%b`` stands for 0, 1, 2 and so on, as far as there are files."""
    prefixes = [os.environ.get("HDF5_VDS_PREFIX", "")]
    if "%b" in inner.replace("%%", ""):
        raise UnsupportedData(
            say(
                "{name!r} of {holder} takes its data from datasets numbered {inner!r}",
                name=name,
                holder=holder,
                inner=inner,
            ),
            why=say("how many there are is not written down"),
            fix=(say("name its sources one by one, or leave it out with keys=[…]"),),
        )
    if "%b" not in file_name.replace("%%", ""):
        found = search(file_name.replace("%%", "%"), holder, prefixes)
        if found is None:
            raise missing_file(name, holder, file_name, say("a virtual dataset"))
        return [found]
    files: list[Path] = []
    while (found := search(file_name.replace("%b", str(len(files))), holder, prefixes)) is not None:
        files.append(found)
    if not files:
        raise missing_file(name, holder, file_name.replace("%b", "0"), say("a virtual dataset"))
    return files


def external_storage(dataset: Any, name: str) -> list[Path]:
    """The raw files of a dataset with external storage."""
    holder = Path(dataset.file.filename)
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", str(holder.parent))
    found = []
    for file_name, _, _ in dataset.external:
        # HDF5 looks in the working directory alone, unless told otherwise.
        path = Path(file_name) if os.path.isabs(file_name) else Path(prefix) / file_name
        if not path.is_file():
            raise missing_file(
                name, holder, str(path), say("external storage"), beside=holder.parent / file_name
            )
        require_regular(path)
        found.append(Path(os.path.abspath(path)))
    if not found:
        raise damaged(holder, say("{name!r} has external storage without files", name=name))
    return found


def missing_file(
    name: str, holder: Path, target: str, kind: str, beside: Path | None = None
) -> UnreadableSource:
    """The error for a file that another one needs."""
    fix = [say("restore it beside {holder}, or leave {name!r} out with keys=[…]", holder=holder, name=name)]
    if beside is not None and beside.is_file():
        fix.insert(0, say("it lies beside the file: set HDF5_EXTFILE_PREFIX={folder}", folder=beside.parent))
    return UnreadableSource(
        say("{target} is missing", target=target),
        why=say("{name!r} of {holder} is {kind} that needs it", name=name, holder=holder, kind=kind),
        fix=fix,
    )
