"""Formats that other packages add, each by an entry point of the group ``legroom.formats`` that leads to a Format.

They are looked up only for a file that none of our own formats recognizes, and for one that is flat tokens only because
the caller gave their type. A reader of another package is checked and
its errors are translated by PluginReader, so that the rest of Legroom need not know whose reader it has.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from legroom.errors import FormatPluginFailed, LegroomError
from legroom.formats.base_reader import (
    ArraySpec,
    BaseReader,
    Candidate,
    Description,
    Extent,
    Format,
    Selection,
    Slab,
    TableSpec,
)
from legroom.formats.decoding_memory_budget import DecodingMemory
from legroom.formats.file_reads_and_errors import unreadable
from legroom.formats.fill_output_arrays import Progress
from legroom.messages import say
from legroom.system.lazy_and_optional_imports import import_lock, package_version
from legroom.version import VERSION

GROUP = "legroom.formats"  # of entry points
E = TypeVar("E", bound=LegroomError)


@dataclass(frozen=True, slots=True)
class PluginFormat:
    """A format that another package has registered."""

    format: Format
    package: str  # the distribution, as pip names it
    identity: str  # what decides how the bytes are read: the package, its version and Legroom's

    def recognizes(self, candidate: Candidate) -> bool:
        with plugin_errors(self.package, candidate.path):
            return self.format.recognizes is not None and bool(self.format.recognizes(candidate))

    def recognizes_directory(self, path: Path) -> bool:
        with plugin_errors(self.package, path):
            return self.format.recognizes_directory is not None and bool(self.format.recognizes_directory(path))

    def directory_files(self, path: Path) -> Sequence[Path] | None:
        if self.format.directory_files is None:
            return None
        with plugin_errors(self.package, path):
            found = [path / one for one in self.format.directory_files(path)]
            _require(bool(found) and all(path in one.parents for one in found), "directory_files: none below the path")
            return found

    def open(self, path: Path, selection: Selection, memory: DecodingMemory, dtype: str | None = None) -> BaseReader:
        with plugin_errors(self.package, path):
            reader = self.format.open(path, selection, memory, dtype)
            if not isinstance(reader, BaseReader):
                raise TypeError(f"{type(reader).__name__} is not a subclass of BaseReader")
        return PluginReader(reader, self)


@dataclass(frozen=True, slots=True)
class BrokenPackage:
    """A package that could not be asked whether it reads a file."""

    package: str
    problem: FormatPluginFailed


def find_plugin(
    asks: Callable[[PluginFormat], bool], path: Path
) -> tuple[PluginFormat | None, tuple[BrokenPackage, ...]]:
    """The one registered format that recognizes ``path``, and the packages that failed when they were asked.

    The file may be one of theirs; it need not be, and then its own advice matters more than they do.
    """
    found: list[PluginFormat] = []
    broken: dict[str, BrokenPackage] = {}  # by package, the first failure
    for package, load in _entry_points(path):
        try:
            plugin = load()
            if asks(plugin):
                found.append(plugin)
        except FormatPluginFailed as problem:
            broken.setdefault(package, BrokenPackage(package, problem))
    if len(found) > 1:
        packages = " and ".join(sorted({f"{one.package} ({one.format.name})" for one in found}))
        raise FormatPluginFailed(
            say("several packages recognize {path}", path=path),
            why=say("which of them is right is not known: {packages}", packages=packages),
            fix=(say("uninstall all but one of them"),),
        )
    return found[0] if found else None, tuple(broken.values())


def name_broken(problem: E, broken: Sequence[BrokenPackage]) -> E:
    """The error for a file that nothing reads, with the packages that might read it if they were whole."""
    problem.fix = (*problem.fix, *map(_update, broken))
    return problem


def _update(broken: BrokenPackage) -> str:
    why = next(iter(broken.problem.why.splitlines()), "")
    return say(
        "if the package {package} should read it, update that package, which failed ({why}):\n"
        "pip install --upgrade {package}",
        package=broken.package,
        why=why,
    )


def _entry_points(path: Path) -> Iterator[tuple[str, Callable[[], PluginFormat]]]:
    for point in _registered(tuple((folder, _changed_at(folder)) for folder in sys.path)):
        package = point.dist.name if point.dist is not None else str(point.value)
        yield package, partial(_load, point, package, path)


@lru_cache(maxsize=1)
def _registered(_: tuple[tuple[str, int], ...]) -> tuple[Any, ...]:
    """The entry points of the folders of sys.path as they are now: looking them up takes milliseconds for each file."""
    with import_lock:
        from importlib import metadata

    return tuple(sorted(metadata.entry_points(group=GROUP), key=lambda one: (one.name, one.value)))


def _changed_at(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def _load(point: Any, package: str, path: Path) -> PluginFormat:
    with plugin_errors(package, path):
        if point.dist is None or not point.dist.version:
            raise ValueError("its package has no version, which identifies what it reads")
        format = point.load()
        if not isinstance(format, Format):
            raise TypeError(f"the entry point {point.name} = {point.value} is not a legroom.formats.Format")
        if not isinstance(format.name, str) or not format.name:
            raise ValueError(f"the format of the entry point {point.name} has no name")
    return PluginFormat(format, package, _identity(package, point.dist.version, format.name))


def _identity(package: str, version: str, name: str) -> str:
    # With Legroom's version: a newer one may recognize the file itself, and plugins use its base classes.
    return f"{package}=={version} {name} legroom=={VERSION}"


def installed_readers(readers: Sequence[str]) -> tuple[str, ...] | None:
    """The identities of the same readers in the versions that are installed now. None if one is not installed."""
    found = []
    for reader in readers:
        package, _, rest = reader.partition("==")
        version = package_version(package)
        words = rest.split(" ")
        if version is None or len(words) < 3:
            return None
        found.append(_identity(package, version, " ".join(words[1:-1])))
    return tuple(sorted(found))


@contextmanager
def plugin_errors(package: str, path: Path) -> Iterator[None]:
    """Translate what the code of another package raises into an error that names the package."""
    try:
        yield
    except (LegroomError, MemoryError):
        raise
    except OSError as problem:
        if problem.errno:  # from the operating system
            raise unreadable(path, problem) from problem
        raise _failed(package, path, problem) from problem
    except Exception as problem:
        raise _failed(package, path, problem) from problem


def _failed(package: str, path: Path, problem: Exception) -> FormatPluginFailed:
    return FormatPluginFailed(
        say("the package {package} failed on {path}", package=package, path=path),
        why=f"{type(problem).__name__}: {problem}",
        fix=(
            say("update the package, or report this to its authors:\npip install --upgrade {package}", package=package),
            say("if it does not read this format, uninstall it:\npip uninstall {package}", package=package),
        ),
    )


class PluginReader(BaseReader):
    """A reader of another package, with its errors translated and its answers checked."""

    _accounts_memory = True  # by the reader itself

    def __init__(self, reader: BaseReader, plugin: PluginFormat) -> None:
        super().__init__(reader.path, reader.selection)
        self._reader, self._plugin = reader, plugin
        self._callers: Exception | None = None  # raised by a callback, not by the package

    @property
    def own(self) -> BaseReader:
        """The reader of the package."""
        return self._reader

    def _library_errors(self, name: str | None) -> AbstractContextManager[None]:
        return self._translated()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        self._callers = None
        try:
            with plugin_errors(self._plugin.package, self.path):
                yield
        except (FormatPluginFailed, LegroomError):
            if self._callers is not None:
                raise self._callers from None
            raise

    def _passed(self, callback: Progress) -> Progress:
        def call(count: int) -> None:
            try:
                callback(count)
            except Exception as problem:
                self._callers = problem
                raise

        return call

    def _describe(self) -> Description:
        found = self._reader.describe()
        check_description(found, self._plugin.format.name, self.path)
        return replace(found, reader=self._plugin.identity)

    def _read(self, spec: ArraySpec, out: np.ndarray[Any, Any], progress: Progress) -> None:
        with self._translated():
            self._reader.read_into(spec.name, out, self._passed(progress))

    def _extent(self, spec: ArraySpec) -> Extent | None:
        extent = self._reader.extent(spec.name)
        if extent is None:
            return None
        _require(extent.nbytes == spec.nbytes and extent.offset >= 0, f"the extent of {spec.name!r} has another size")
        _require(_below(extent.path, self.path), f"the extent of {spec.name!r} is in another file")
        end = extent.offset + extent.nbytes
        _require(end <= extent.path.stat().st_size, f"the extent of {spec.name!r} ends after the file")
        return extent

    def _slabs(self, spec: ArraySpec) -> Sequence[Slab] | None:
        slabs = self._reader.slabs(spec.name)
        if slabs is None:
            return None
        at = 0
        for slab in slabs:
            _require(slab.start == at and slab.nbytes >= 0, f"the slabs of {spec.name!r} have a gap or overlap")
            at += slab.nbytes
        _require(at == spec.nbytes, f"the slabs of {spec.name!r} have {at} bytes, the array has {spec.nbytes}")
        return [replace(slab, decode=self._decode(slab, spec.name)) for slab in slabs]

    def _decode(self, slab: Slab, name: str) -> Callable[[], Iterator[memoryview]]:
        def decode() -> Iterator[memoryview]:
            with plugin_errors(self._plugin.package, self.path):
                left = slab.nbytes
                for part in slab.decode():
                    left -= part.nbytes
                    _require(left >= 0, f"a slab of {name!r} has more than {slab.nbytes} bytes")
                    yield part
                _require(left == 0, f"a slab of {name!r} has {left} bytes less than {slab.nbytes}")

        return decode

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        return self._reader.decoding(spec.name)

    def _write(self, spec: TableSpec, path: Path, progress: Progress, ask: Progress) -> int:
        with self._translated():
            taken = self._reader.write_table(spec.name, path, self._passed(progress), self._passed(ask))
            has = path.stat().st_size
            _require(taken == has <= spec.nbytes, f"{spec.name!r} has {has} bytes, stated {taken} of {spec.nbytes}")
        return taken

    def descriptors(self) -> Sequence[int]:
        """File descriptors of the files being read."""
        with self._translated():
            found = self._reader.descriptors()
            _require(bool(found), "descriptors() returned none: a replaced file could not be noticed")
            return found

    def _close(self) -> None:
        with self._translated():
            self._reader.close()


def check_description(found: Description, name: str, path: Path) -> None:
    """Raise ValueError for a description that the cache could not store as it is."""
    _require(isinstance(found, Description), f"describe() returned a {type(found).__name__}, not a Description")
    _require(found.format == name, f"its description has the format {found.format!r}, registered is {name!r}")
    _require(not found.lookups, "its description has lookups, which are for HDF5 alone")
    _require(bool(found.files) and found.files[0] == path, "its description does not begin with the opened file")
    _require(all(_below(file, path) for file in found.files), "its data are in files outside the opened path")
    names = [item.name for item in found.items]
    _require(len(set(names)) == len(names), "two items of its description have the same name")
    _require_json(found.attributes, "the file")
    for item in found.items:
        _require(isinstance(item.name, str) and bool(item.name), f"{item.name!r} is not a name")
        _require_json(item.attributes, repr(item.name))
        _require_json(item.meaning, f"the meaning of {item.name!r}")
        if isinstance(item, ArraySpec):
            _check_array(item, names)
        else:
            _require(isinstance(item, TableSpec), f"{item!r} is neither an ArraySpec nor a TableSpec")
            _require(item.rows >= 0 and item.nbytes >= 0, f"the table {item.name!r} has a negative size")


def _check_array(item: ArraySpec, names: list[str]) -> None:
    lengths = all(isinstance(length, int) and length >= 0 for length in item.shape)
    _require(isinstance(item.shape, tuple) and lengths, f"the shape of {item.name!r} is {item.shape!r}")
    dtype = isinstance(item.dtype, np.dtype) and item.dtype.isnative and not item.dtype.hasobject
    _require(dtype, f"the dtype of {item.name!r} is {item.dtype!r}: native byte order and no objects are needed")
    if item.ragged is not None:
        pair = [f"{item.ragged}/offsets", f"{item.ragged}/values"]
        _require(item.name in pair and set(pair) <= set(names), f"ragged {item.ragged!r} needs the arrays {pair}")


def _require_json(attributes: Any, whose: str) -> None:
    try:
        json.dumps(dict(attributes), allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"the attributes of {whose} cannot be stored as JSON: {problem}") from problem


def _below(file: Path, path: Path) -> bool:
    return file == path or path in file.parents


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
