"""Downloads of remote objects in a store: where they are, who works on them, how much room they take.

A download is the directory ``work/download-<id>``. Its id is a hash of the URL and the version, so a later attempt, by
any process, finds what has arrived. Its lock file beside it is held while a process works on it. One without a holder
is kept for the next attempt until ``gc`` finds it older than a day, or its room is needed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from legroom.cache import eviction, locks, store_free_space
from legroom.cache.download import Download, first_problem
from legroom.cache.file_stamps import StampedFile
from legroom.cache.find_or_build_entry import in_first_store
from legroom.cache.locks import Lock
from legroom.cache.plan_entry_files import SourceLayout
from legroom.cache.source_stamps_and_digests import Source
from legroom.cache.staging_directory import StagingDirectory
from legroom.cache.store_directories import BUILDING, DOWNLOAD, LOCK, WORK, Store, Stores, open_stores, step, store_lock
from legroom.cache.store_free_space import BuildNeed
from legroom.errors import (
    DamagedSource,
    LegroomError,
    NoRoom,
    SourceChanged,
    SourceError,
    TransferDamaged,
    UnknownFormat,
    UnsupportedData,
)
from legroom.formats.file_reads_and_errors import arriving
from legroom.messages import say
from legroom.remote.remote_object import ObjectStamp, ObjectUrl

_POLL = 0.05
_USELESS = (DamagedSource, SourceChanged, TransferDamaged, UnknownFormat, UnsupportedData)
Progress = Callable[[int, int], None]


_supplies: dict[str, Callable[[Download], None]] = {}


@contextmanager
def supplied(url: ObjectUrl, begun: Callable[[Download], None]) -> Iterator[None]:
    """Let this process's downloads of an object take their pieces from ``Download.put``. ``begun`` gets each one."""
    _supplies[url.identity] = begun
    try:
        yield
    finally:
        _supplies.pop(url.identity, None)


class Fetched:
    """The remote objects of a source while it is being built: files on this machine that fill while they are read."""

    def __init__(self, source: Source, downloads: Sequence[Download], reservation: Reservation | None) -> None:
        self.source = source
        self._downloads = {download.path: download for download in downloads}
        self._reservation = reservation

    def want(self, layout: SourceLayout) -> None:
        """Ask for the bytes of the arrays that are selected, before they are waited for."""
        for extent in layout.extents.values():
            if extent is not None and extent.path in self._downloads:
                self._downloads[extent.path].want(extent.offset, extent.nbytes)

    def is_whole_file(self, path: Path, size: int, store: Store) -> bool:
        """Whether a file is a download of this many bytes in that store, and all of it comes."""
        download = self._downloads.get(path)
        held = self._reservation.store if self._reservation is not None else None
        return download is not None and held is store and download.is_whole and download.size == size

    def crc32(self, path: Path, start: int) -> int:
        """The checksum of a download that has come, from ``start`` to its end."""
        return self._downloads[path].crc32(start)

    def update_reservation(self) -> None:
        """Reserve what is still to come."""
        if self._reservation is not None:
            self._reservation.update(self._downloads.values())

    def fail(self, problem: BaseException) -> None:
        """Let every reader that waits fail with this, however long the server is silent."""
        for download in self._downloads.values():
            download.fail(problem)


@contextmanager
def fetched(
    source: Source,
    stores: Stores,
    *,
    whole: bool,
    evict: bool,
    progress: Progress | None,
    wants: Callable[[Store], bool] = lambda _: True,
    announce: Callable[[Reservation], None] | None = None,
) -> Iterator[Fetched]:
    """Download the remote objects of a source. Yields the source with the files on this machine.

    When the entry is published, or the data turn out to be unusable, the downloads are removed. After any other
    failure they are kept for the next attempt.
    """
    # By name: one object may have several URLs, with other signatures. In the same order in every process, so that no
    # two wait for each other.
    named = {name: file for file in source.files if (name := _name(file)) is not None}
    remote = sorted(named.items())
    if not remote:
        yield Fetched(source, (), None)
        return
    downloads: dict[str, Download] = {}
    with ExitStack() as stack:
        total = sum(file.size for _, file in remote)
        # An .npy object becomes the entry's file. Any other needs its room a second time for the entry.
        once = len(remote) == 1 and remote[0][1].path.name.endswith(".npy") and whole
        preferred = sorted(stores.found, key=lambda store: not wants(store))
        store = _choose(preferred, list(named), total, total if once else 2 * total, evict=evict, whole=whole)
        reservation = stack.enter_context(Reservation(store, whole=whole, evict=evict))
        held: list[str] = []
        useless = False
        try:
            begun: list[tuple[Download, Callable[[Download], None] | None]] = []
            for name, file in remote:
                assert isinstance(file.path, ObjectUrl) and isinstance(file.stamp, ObjectStamp)
                stack.enter_context(_locked(store, name))
                held.append(name)
                supply = _supplies.pop(file.path.identity, None)  # once: another attempt fetches by itself
                in_memory, taken = store.backing == "shm", supply is not None
                folder = _folder(store, name)
                download = Download(
                    file.path, file.stamp, folder, whole=whole, ask=reservation.ask, supplied=taken,
                    through=store_free_space.fills_memory(store, BuildNeed(total)), in_memory=in_memory,
                )  # fmt: skip
                downloads[name] = stack.enter_context(download)
                begun.append((download, supply))
            reservation.update(downloads.values())
            step("download")
            if announce is not None:
                announce(reservation)
            report = partial(_report, downloads.values(), reservation, progress, threading.get_ident())
            for download, supply in begun:
                download.waiting = report
                download.start()
                stack.enter_context(arriving(download.path, download))
                if supply is not None:
                    supply(download)
            files = tuple(_local(file, downloads) for file in source.files)
            yield Fetched(replace(source, files=files), list(downloads.values()), reservation)
            useless = True
        except SourceError as problem:
            useless = isinstance(first_problem(downloads.values()) or problem, _USELESS)
            raise in_words_of_the_url(problem, downloads.values()) from None
        finally:
            for download in downloads.values():
                download.close()
            if useless:
                _remove(store, held)


@contextmanager
def temporary_file(url: ObjectUrl, stamp: ObjectStamp, *, whole: bool) -> Iterator[Path]:
    """An object as a file that fills while it is read, and is removed afterwards. Not for other processes."""
    with ExitStack() as stack:
        stores = stack.enter_context(open_stores(make=True))
        need = BuildNeed((stamp.size or 0) if whole else 0, 3)
        work = in_first_store(
            (stores.election_store, *stores.found[1:])[::-1],  # the disk first: it is read once
            lambda store: stack.enter_context(StagingDirectory(store, need, evict=True)),
            str(url),
        )
        through = work.fills_memory()
        download = stack.enter_context(
            Download(url, stamp, work.folder, whole=whole, ask=work.check_capacity, through=through)
        )
        try:
            download.start()
            stack.enter_context(arriving(download.path, download))
            yield download.path
        except SourceError as problem:
            raise in_words_of_the_url(problem, [download]) from None


def _report(downloads: Iterable[Download], reservation: Reservation, progress: Progress | None, thread: int) -> None:
    """Report what has arrived, for readers that need the whole object before they can begin."""
    if threading.get_ident() != thread:
        return
    reservation.update(downloads)
    if progress is not None:
        progress(sum(one.present for one in downloads), sum(one.stamp.size or 0 for one in downloads))


def _name(file: StampedFile) -> str | None:
    """The directory of a remote object's download in ``work/``."""
    if not isinstance(file.path, ObjectUrl):
        return None
    text = repr((1, file.path.identity, str(file.stamp), file.stamp.size))
    return DOWNLOAD + hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _local(file: StampedFile, downloads: Mapping[str, Download]) -> StampedFile:
    download = downloads.get(_name(file) or "")
    return file if download is None else replace(file, stamp=download.stamp, local=download.path)


def in_words_of_the_url(problem: SourceError, downloads: Iterable[Download]) -> LegroomError:
    """The error of the download if it has failed, else the reader's with the URL in place of the local file."""
    failed = first_problem(downloads)
    if isinstance(failed, LegroomError):
        return failed
    for download in downloads:
        local, url = os.fspath(download.path), str(download.url)
        problem.what, problem.why = problem.what.replace(local, url), problem.why.replace(local, url)
        problem.fix = tuple(_with_a_local_name(problem.fix, local, download.url))
        problem.args = (problem.what,)
    return problem


def _with_a_local_name(fixes: Sequence[str], local: str, url: ObjectUrl) -> Iterator[str]:
    """The fixes with a file of the object's name in the current directory: commands cannot write to a URL."""
    if any(local in line for line in fixes):
        yield say("download {url} to this machine first, as {name}", url=url, name=url.name)
    for line in fixes:
        yield line.replace(local, url.name)


def _choose(
    stores: Sequence[Store], names: Sequence[str], total: int, with_entry: int, *, evict: bool, whole: bool
) -> Store:
    """The store for the downloads: one that has them in part, or has room for the objects and the entry, or for one."""
    for store in stores:
        if any(_exists(store, name) for name in names):
            return store
    refused: NoRoom | None = None
    for store, need in (*((one, with_entry) for one in stores), *((one, total) for one in stores[::-1])):
        try:
            with store_lock(store):
                store_free_space.check_fits(store, BuildNeed(need))
            return store
        except NoRoom as problem:
            refused = problem
    if not whole:  # parts of them may fit: their room is asked for when they come
        return max(stores, key=_free)
    for store in stores[::-1] if evict else ():
        with store_lock(store):
            eviction.remove_unused_downloads(store)
            if eviction.evict_until_fits(store, BuildNeed(total)):
                return store
    assert refused is not None
    raise NoRoom(
        say("no store has enough free space to download {count} objects", count=len(names))
        if len(names) > 1
        else say("no store has enough free space to download the object"),
        why=refused.why,
        fix=refused.fix,
    )


def _free(store: Store) -> int:
    with store_lock(store):
        bound = store_free_space.tightest(store_free_space.bounds(store))
        return bound.free - store_free_space.outstanding_reservations(store)


class Reservation:
    """Room for downloads that are running: counted by every process that loads into the store."""

    def __init__(self, store: Store, *, whole: bool, evict: bool) -> None:
        """``whole``: all of each object comes. Else nothing is reserved, and ``evict`` makes room for what comes."""
        self.store, self._whole, self._evict = store, whole, evict and not whole
        self.lock_file = BUILDING + secrets.token_hex(8) + LOCK
        with store_lock(store):
            lock = locks.acquire(store.work, self.lock_file)
        assert lock is not None  # the name is random and new
        self._lock = lock

    def update(self, downloads: Iterable[Download]) -> None:
        """Reserve what is still to come."""
        some = list(downloads)
        total = sum(one.stamp.size or 0 for one in some)
        done = sum(one.present for one in some)
        store_free_space.write_reservation(self._lock.fd, total - done if self._whole else 0, done, total)

    def ask(self, count: int) -> None:
        """Raise NoRoom if that many more bytes no longer fit."""
        try:
            store_free_space.check_now(self.store, count, BuildNeed(count))
        except NoRoom:
            if not self._evict:
                raise
            with store_lock(self.store):
                if not eviction.evict_until_fits(self.store, BuildNeed(count), mine=self.lock_file):
                    raise

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError), store_lock(self.store), suppress(FileNotFoundError):
            os.unlink(self.lock_file, dir_fd=self.store.work)
        self._lock.release()


@contextmanager
def _locked(store: Store, name: str) -> Iterator[Lock]:
    """Hold the download's lock. Waits for a process that works on it for another entry."""
    while True:
        with store_lock(store):
            lock = locks.acquire(store.work, name + LOCK)
        if lock is not None:
            break
        time.sleep(_POLL)
    try:
        yield lock
    finally:
        lock.release()


def _folder(store: Store, name: str) -> Path:
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=store.work)
    return store.root / WORK / name


def _exists(store: Store, name: str) -> bool:
    try:
        os.stat(name, dir_fd=store.work, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _remove(store: Store, names: Sequence[str]) -> None:
    """Remove downloads whose locks this process holds."""
    for name in names:
        with suppress(OSError), store_lock(store):
            eviction.remove_download(store, name)
