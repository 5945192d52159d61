"""The data of a file, one copy for every process.

Covers: what the caller may give, and what is given back. Does not cover: how it comes about (find.py, build.py), the
public door ``legroom.open`` (loader), whose Data also have batches.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from legroom.cache import identity, locks, place
from legroom.cache.attach import Attached, Damaged, OtherFormat, attach
from legroom.cache.dataset import Contents, Data, ragged_of
from legroom.cache.describe import entry_of
from legroom.cache.find import Request, find
from legroom.cache.manifest import Manifest
from legroom.cache.prefault import Prefault
from legroom.errors import EntryUnreadable, LegroomError, NoRoom, UnreadableSource, UsageError
from legroom.formats.protocol import Extent
from legroom.formats.selection import Selection
from legroom.formats.source_file import absolute
from legroom.system.imports import lazy_import
from legroom.units import format_size
from legroom.words import joined, listed, say

BACKINGS = ("auto", "shm", "disk", "inplace")
Where = str | bytes | os.PathLike[str] | os.PathLike[bytes]
D = TypeVar("D", bound=Data)


def open_as(
    kind: type[D],
    path: Where | Iterable[Where],
    keys: str | Iterable[str] | None = None,
    *,
    backing: str = "auto",
    hash: str = "md5",
    wait: bool = True,
    progress: Callable[[int, int], None] | None = None,
    evict: bool = True,
) -> D:
    """What ``legroom.open`` does (its words are there), giving a Data of that kind: layers above add to Data."""
    _check(backing, hash)
    request = Request(source_paths(path), Selection(keys).keys, backing, hash, evict)
    again = (_reopen, (kind, request, None, None, None))
    with _limits_in_words(request):
        if disabled(os.environ) or not locks.SUPPORTED:
            return kind(_plain().in_process(request.paths, request.keys, progress), request.keys, again)
        if backing == "inplace":
            return kind(_plain().in_place(request.paths, request.keys), request.keys, again)
        return _data(kind, _attached(request, wait, progress), request)


@contextmanager
def _limits_in_words(request: Request) -> Iterator[None]:
    """Turn memory or a thread that this process cannot have into NoRoom, and a failed call into StoreError."""
    try:
        yield
    except MemoryError as problem:
        raise _no_memory(request, str(problem)) from problem
    except OSError as problem:
        if isinstance(problem, LegroomError):
            raise
        raise place.store_trouble(problem) from problem  # a temporary file, where the cache is switched off
    except RuntimeError as problem:
        if isinstance(problem, LegroomError) or "can't start new thread" not in str(problem):
            raise
        raise _no_memory(request, str(problem)) from problem


def _no_memory(request: Request, said: str) -> NoRoom:
    why = say("this process can have no more memory or threads")
    limit = _address_space()
    if limit is not None:
        why = say(
            "{why}; its address space is limited to {limit} (ulimit -v)", why=why, limit=format_size(limit)
        )
    return NoRoom(
        say("not enough memory to load {path}", path=request.paths[0]),
        why=joined([why, said]) if said else why,
        fix=(
            say("raise the limits of this process:\nulimit -v unlimited; ulimit -u"),
            say("keys=[…] loads fewer arrays"),
        ),
    )


def _address_space() -> int | None:
    """The most bytes of addresses this process may have; None where there is no such limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def disabled(env: Mapping[str, str]) -> bool:
    """Whether ``LEGROOM_DISABLE`` switches the cache off."""
    return env.get("LEGROOM_DISABLE", "").strip().lower() not in ("", "0", "no", "false", "off")


def source_paths(path: Where | Iterable[Where]) -> tuple[Path, ...]:
    """Absolute paths of what was named: a path, a pattern (its matches sorted), or several of either."""
    found: list[Path] = []
    for one in _named(path):
        text = os.path.expanduser(os.fsdecode(one))
        if "\0" in text:
            raise UsageError(say("a path cannot hold a null character"), fix=(say("check the path"),))
        if glob.has_magic(text) and not os.path.lexists(text):
            matches = sorted(glob.glob(text, recursive=True))
            if not matches:
                raise UnreadableSource(
                    say("nothing matches {pattern}", pattern=text),
                    why=say("the working directory is {cwd}", cwd=os.getcwd()),
                    fix=(say("check the pattern"),),
                )
            found.extend(map(absolute, matches))
        else:
            found.append(absolute(text))
    if not found:
        raise UsageError(say("no file was named"), fix=(say("give a path, a pattern or a list of paths"),))
    return tuple(found)


def _named(path: Any) -> list[Where]:
    """Each path by itself; UsageError for what is none."""
    if isinstance(path, (str, bytes, os.PathLike)):
        return [path]
    given = list(path) if isinstance(path, Iterable) else [path]
    for one in given:
        if not isinstance(one, (str, bytes, os.PathLike)):
            raise UsageError(
                say("{given!r} is no path", given=one),
                why=say("a path is text, bytes or a pathlib.Path, not {kind}", kind=type(one).__name__),
                fix=(say("give a path, a pattern or a list of paths"),),
            )
    return given


def _check(backing: str, hash: str) -> None:
    if backing not in BACKINGS:
        raise UsageError(
            say("there is no backing {backing!r}", backing=backing),
            why=say("the backings are {all}", all=listed(BACKINGS)),
            fix=("backing='auto'",),
        )
    if hash != "md5":
        identity.new_hasher(hash)  # says what is wrong with the name, or what is not installed


def _attached(request: Request, wait: bool, progress: Callable[[int, int], None] | None) -> Attached:
    source = identity.look(request.paths)
    try:
        found = find(request, source, time.time_ns())
    except OSError as problem:
        if isinstance(problem, LegroomError):
            raise
        raise place.store_trouble(problem) from problem
    if found is not None:
        return found
    attached: Attached = lazy_import("legroom.cache.build").build(request, wait=wait, progress=progress)
    return attached


def _plain() -> Any:
    return lazy_import("legroom.cache.plain")


def _data(kind: type[D], attached: Attached, request: Request) -> D:
    manifest = attached.manifest
    memory = attached.backing == "shm"
    contents = Contents(
        entry=entry_of(
            manifest, attached.backing, store=os.fspath(attached.root), in_use=True, last_used=time.time()
        ),
        arrays=attached.arrays,
        tables=attached.tables,
        ragged=ragged_of(manifest.arrays),
        extent=partial(_extent, manifest, attached.root),
        prefault=Prefault(attached.maps, in_memory=memory) if attached.maps else None,
        keep=attached.lease,
        findings=attached.findings,
    )
    root = os.fspath(attached.root)
    again = (_reopen, (kind, request, root, attached.backing, manifest.key))
    return kind(contents, request.keys, again)


def _extent(manifest: Manifest, root: Path, name: str) -> Extent | None:
    for array in manifest.arrays:
        if array.name == name:
            return Extent(root / manifest.key / array.file, len(array.header), array.nbytes)
    return None


def _reopen(kind: type[D], request: Request, root: str | None, backing: Any, key: str | None) -> D:
    """In another process: the same entry by name, else the same source."""
    if root is not None and key is not None and not disabled(os.environ) and locks.SUPPORTED:
        candidate = place.Candidate(Path(root).parent, backing, named=True)
        try:
            if os.fspath(candidate.root) == root:
                with place.open_store(candidate, make=False) as store:
                    found = attach(store, key)
                if found is not None:
                    return _data(kind, found, request)
        except (OSError, place.Unfit, Damaged, OtherFormat, EntryUnreadable):
            pass  # whatever is wrong with it, opening the source says so or builds it anew
    return open_as(
        kind, request.paths, request.keys, backing=request.backing, hash=request.hash, evict=request.evict
    )
