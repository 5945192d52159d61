"""Build an entry: one process reads the source, the others wait for it.

Election and publishing are here. write_entry_files.py writes the files.

Lock order, the same everywhere: the source's lock in the election store, the source's lock in the store that gets the
data, the entry's lease, the store's lock. The last is held briefly, and its holder never waits for another lock.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from logging import DEBUG, WARNING
from pathlib import Path

from legroom.cache import (
    downloads_in_store,
    locks,
    manifest,
    source_digest_records,
    source_stamps_and_digests,
    store_free_space,
)
from legroom.cache.file_stamps import StampedFolder
from legroom.cache.find_or_build_entry import (
    OpenRequest,
    discard_unusable,
    entry_options,
    find_by_digest,
    find_entry,
    in_first_store,
    remember_versions,
    stores_wanted,
)
from legroom.cache.lease_and_map_entry import Attached, attach, lease, map_entry
from legroom.cache.locks import Lock
from legroom.cache.manifest import FORMAT, Damaged, Manifest, Options, OtherFormat, to_json
from legroom.cache.mapped_files_and_checksums import opened
from legroom.cache.plan_entry_files import SourceLayout, plan_files
from legroom.cache.source_stamps_and_digests import Source
from legroom.cache.staging_directory import StagingDirectory
from legroom.cache.store_directories import (
    BUILDING,
    IN_MEMORY,
    Store,
    Stores,
    existing_stores,
    filesystem_at,
    log,
    open_stores,
    read_small_file,
    step,
    store_lock,
)
from legroom.cache.write_entry_files import (
    BuildJob,
    BuildRequest,
    Progress,
    WrittenFiles,
    storage_need,
    write_entry_files,
)
from legroom.errors import (
    EntryDamaged,
    NoRoom,
    NotLoaded,
    RemoteError,
    SourceChanged,
    SourceError,
    StoreError,
    TransferDamaged,
    UsageError,
)
from legroom.formats.detect import open_source
from legroom.formats.file_reads_and_errors import make_room_for_files
from legroom.messages import say
from legroom.records.finding_and_alarm import Finding
from legroom.remote.remote_object import ObjectStamp, ObjectUrl, SourcePath
from legroom.version import VERSION

# A lock file cannot be created: no inode or block left, or the store has become read-only.
_CANNOT_HOLD = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_here = threading.local()  # .building: the sources that this thread is building


def build(request: OpenRequest, *, wait: bool = True, progress: Progress | None = None) -> Attached:
    """Attach the source's entry, and build it if no process has. At most one process reads the source at a time."""
    doubts: dict[str, str] = {}  # by path, the digest of a download that was not as expected
    for last in (False, True):
        source = source_stamps_and_digests.with_doubts(
            source_stamps_and_digests.stamp_source(request.paths, ask=last), doubts
        )
        asked = BuildRequest(request, source, time.time_ns(), wait, progress)
        try:
            with _refuse_nested_open(asked), open_stores(make=True) as stores:
                for finding in stores.findings:
                    log.log(WARNING if finding.severity == "warning" else DEBUG, "%s: %s", finding.message, finding.why)
                return _elected(asked, stores)
        except TransferDamaged as problem:
            if last:
                raise
            doubts[problem.path] = problem.digest  # once more from the beginning
            problem.with_traceback(None)  # its frames would keep what the next attempt opens
        except SourceError as problem:
            if last or isinstance(problem, RemoteError):  # requests were repeated already
                raise
            # Apparent damage may be a mix of two versions of the file.
            if not isinstance(problem, SourceChanged) and source_stamps_and_digests.is_unchanged(asked.source):
                raise
            problem.with_traceback(None)
        except FileNotFoundError as problem:
            # The store was removed (logind does so at logout): create it again, once.
            if last:
                raise StoreError(
                    say("the store was removed while an entry was being written"),
                    why=str(problem),
                    fix=(say("try again"),),
                ) from problem
    raise AssertionError("not reached")


@contextmanager
def _refuse_nested_open(asked: BuildRequest) -> Iterator[None]:
    """Refuse to open, in a load's progress callback, the source of that load: it would wait for itself."""
    building: set[str] = _here.__dict__.setdefault("building", set())
    if asked.source.name in building:
        raise UsageError(
            say("this thread is already loading {path}", path=asked.source.paths[0]),
            why=say("open() was called from the progress callback of its own load"),
            fix=(say("open it after the load has returned"),),
        )
    building.add(asked.source.name)
    try:
        yield
    finally:
        building.discard(asked.source.name)


def _elected(asked: BuildRequest, stores: Stores) -> Attached:
    won, stores = elect(stores, lambda store: wait_for_turn(asked, store))
    remember_versions(asked.source)
    if isinstance(won, Attached):
        return replace(won, findings=stores.findings)
    with won:
        found = find_entry(asked.request, asked.source, asked.when_ns)
        if found is None:
            step("elected")
            found = _build(asked, stores)
        return replace(found, findings=stores.findings)


def elect(stores: Stores, turn: Callable[[Store], Lock | Attached]) -> tuple[Lock | Attached, Stores]:
    """Be elected in the first store that can hold the lock file, by ``turn``. Also returns the remaining stores.

    A process elected in another store, because this one was full for a moment, builds the entry a second time at worst.
    The last to publish attaches what the first has published.
    """
    while True:
        elected_in = stores.election_store
        try:
            return turn(elected_in), stores
        except OSError as problem:
            if problem.errno not in _CANNOT_HOLD:
                raise
            why = say("{path}: {problem}", path=elected_in.root, problem=problem.strerror)
            finding = Finding(
                "store-unusable",
                "warning",
                say("{path} is not used as a store", path=elected_in.root),
                why,
                ("legroom cache gc", "LEGROOM_DIR=/some/local/directory"),
            )
            log.warning("%s: %s", finding.message, finding.why)
            stores = stores.without(elected_in, finding)


def _build(asked: BuildRequest, stores: Stores) -> Attached:
    found = _find_stated_content(asked, stores)
    if found is not None:
        return found
    partly = asked.request.keys is not None and asked.source.has_versions
    with ExitStack() as stack:
        memory = store_free_space.decoding_memory()
        source, fetched = asked.source, None
        if source.is_remote:
            fetched = stack.enter_context(
                downloads_in_store.fetched(
                    source,
                    stores,
                    whole=not partly,
                    evict=asked.request.evict,
                    progress=asked.progress,
                    wants=asked.request.wants,
                    announce=partial(announce_builder, asked, stores.election_store),
                )
            )
            source = fetched.source
        paths = [file_of(source, path) for path in asked.source.paths]
        request = asked.request
        make_room_for_files(len(paths))
        readers = [stack.enter_context(open_source(path, request.keys, memory, request.dtype)) for path in paths]
        descriptions = [reader.describe() for reader in readers]
        planned = plan_files(descriptions, asked.source.paths)
        layout = SourceLayout(readers, planned.arrays)
        job = BuildJob(
            asked,
            source_stamps_and_digests.with_referenced_files(source, descriptions),
            readers,
            planned,
            memory,
            layout,
        )
        source_stamps_and_digests.require_stamped(job.source, readers)
        source_stamps_and_digests.flush_source(job.source)
        if fetched is not None:
            job.fetched, job.partly = fetched, partly
            fetched.want(layout)
        else:
            job.sample = source_stamps_and_digests.sample_source(job.source)
        found = _find_same_content(job, stores)
        if found is not None:
            return found
        return in_first_store(
            stores_wanted(asked.request, stores), lambda store: _build_in(store, job, stores), str(job.source.paths[0]),
            lambda: list(_other_ways(job, stores)),
        )  # fmt: skip


def _other_ways(job: BuildJob, stores: Stores) -> Iterator[str]:
    """What works now, where the stores that were asked for have no room."""
    asked = job.asked
    for store in stores.found:
        if not asked.request.wants(store) and _has_room(job, store):
            yield say("use the store that has room, {root}: backing='auto'", root=store.root)
    if len(job.readers) == 1 and not asked.source.is_remote and not job.plan.tables:
        [path], [reader] = asked.source.paths, job.readers
        extents = [(target.spec, reader.extent(target.spec.name)) for target in job.plan.arrays]
        if all(one is not None and one.offset % max(1, spec.dtype.alignment) == 0 for spec, one in extents):
            code = f"legroom.open({os.fspath(path)!r}, backing='inplace')"
            yield say("map the file where it is, without a copy:\n{code}", code=code)


def _has_room(job: BuildJob, store: Store) -> bool:
    try:
        with store_lock(store):
            store_free_space.check_fits(store, storage_need(job, store))
    except (NoRoom, OSError):
        return False
    return True


def file_of(source: Source, path: SourcePath) -> Path:
    """The file on this machine that has the data of a path."""
    if isinstance(path, ObjectUrl):
        return next(file.readable for file in source.files if file.path == path)
    return path


def _find_stated_content(asked: BuildRequest, stores: Stores) -> Attached | None:
    """Find the entry of a remote object by the MD5 that its store states, before anything is downloaded.

    An ETag that equals the MD5 of an entry of the same size is that MD5, whatever else ETags are.
    """
    files = asked.source.files
    if not asked.source.is_remote or len(files) != 1 or not isinstance(files[0].stamp, ObjectStamp):
        return None
    digest = files[0].stamp.expected.get("md5")
    if digest is None:
        return None
    for store in stores.found:
        if not asked.request.wants(store):
            continue
        # The format is not known before its bytes are.
        tried = (
            find_by_digest(asked.request, asked.source, store, digest, "md5", readers)
            for readers in (None, *((one,) for one in manifest.reader_identities()))
        )
        found = next((one for one in tried if one is not None), None)
        if found is None:
            continue
        if found.manifest.source_bytes == files[0].size:
            with suppress(OSError):
                readers = found.manifest.options.readers
                source_digest_records.write_record(store, asked.source, {"md5": digest}, time.time_ns(), readers)
            return found
        found.lease.release()
    return None


def _build_in(store: Store, job: BuildJob, stores: Stores) -> Attached:
    """Reserve, load and publish in one store. NoRoom at any point leaves nothing in it."""
    asked = job.asked
    with ExitStack() as stack:
        work = stack.enter_context(StagingDirectory(store, storage_need(job, store), evict=asked.request.evict))
        if store.directory != stores.election_store.directory:
            # Processes that share this store but not the election store (other containers) are elected here.
            try:
                won = wait_for_turn(asked, store)
            except OSError as problem:
                work.raise_if_full(problem)
                raise
            if isinstance(won, Attached):
                return won
            stack.enter_context(won)
            found = find_entry(asked.request, asked.source, asked.when_ns)
            if found is not None:
                return found
        announce_builder(asked, stores.election_store, work)
        return _publish(job, work, write_entry_files(job, work))


def _find_same_content(job: BuildJob, stores: Stores) -> Attached | None:
    """Find the entry of a file with the same bytes and another name: hash before copying anything."""
    asked, remote = job.asked, job.asked.source.is_remote
    for store in stores.found:
        record = source_digest_records.read_record(store, asked.source)
        # Other keys may refer to other files, and have another digest.
        same = record is not None and set(record.lookups) == set(job.source.lookups)
        if record is not None and same and record.is_trusted(asked.when_ns) and _times_tell(job.source):
            # What was downloaded is hashed in any case: a known version says nothing about this transfer.
            known = {name: one for name, one in record.digests.items() if name != job.algorithm or not remote}
            job.digests.update(known)
            job.hashed_ns = record.hashed_ns
    if job.partly:
        job.hashed_ns = time.time_ns()
        job.digests["version"] = source_stamps_and_digests.version_digest(asked.source)
    if job.algorithm in job.digests or remote or not _may_exist(job, stores):
        return None
    step("hash")
    job.hashed_ns = time.time_ns()
    job.digests = {asked.request.hash: source_stamps_and_digests.digest_source(job.source, asked.request.hash)}
    for store in stores.found:
        if not asked.request.wants(store):
            continue
        found = find_by_digest(
            asked.request, asked.source, store, job.digests[asked.request.hash], asked.request.hash, job.plan.readers
        )
        if found is not None:
            if not source_stamps_and_digests.is_unchanged(job.source):
                raise source_stamps_and_digests.source_changed_error(asked.source.paths[0])
            _record(job, store, found.manifest.key)
            return found
    return None


def _times_tell(source: Source) -> bool:
    """Whether new bytes always mean new times. Not of a file in memory: it can change through a mapping without.

    Then its digest is not taken from its record: an entry would have other data than its digest says.
    """
    files = source.files[:1] if isinstance(source.files, StampedFolder) else source.all_files
    devices: dict[int, str] = {}  # a file on each; a link, or a file that is mounted, is elsewhere than its directory
    for file in files:
        if not isinstance(file.path, ObjectUrl):
            with suppress(OSError):
                devices.setdefault(os.stat(file.path).st_dev, os.path.realpath(file.path))
    return not any(filesystem_at(path, device) in IN_MEMORY for device, path in devices.items())


def _may_exist(job: BuildJob, stores: Stores) -> bool:
    """Whether an entry exists that was built from a source of the same size with the same sample."""
    wanted = job.asked.request.hash, job.source.size, job.sample
    return any(source_digest_records.may_hold(store, *wanted) for store in stores.found)


def _publish(job: BuildJob, work: StagingDirectory, written: WrittenFiles) -> Attached:
    if not job.sample and not job.partly:
        job.sample = source_stamps_and_digests.sample_source(job.source)

    def check() -> None:
        source_stamps_and_digests.require_stamped(job.source, job.readers)
        if not job.source.is_bound and not source_stamps_and_digests.is_unchanged(job.source):
            raise source_stamps_and_digests.source_changed_error(job.source.paths[0])

    return publish_entry(
        work,
        lambda options: _manifest(job, written, options),
        entry_options(job.asked.request, job.source, job.plan.readers),
        check=check,
        record=lambda key: _record(job, work.store, key),
    )


def publish_entry(
    work: StagingDirectory,
    describe: Callable[[Options], Manifest],
    options: Options,
    *,
    check: Callable[[], None] = lambda: None,
    record: Callable[[str], None] = lambda _: None,
) -> Attached:
    """Give the entry its name, unless the same content is already there, and record the source.

    It is mapped before it gets its name, so that even a forced removal cannot take it from this process. ``check``
    raises if the source has changed; ``record`` remembers the source of the entry that is there in the end.
    """
    while True:
        found = describe(options)
        step("lease")
        try:
            lock = lease(work.store, found.key, create=True)
        except OSError as problem:
            work.raise_if_full(problem)
            raise
        assert lock is not None  # create=True
        try:
            step("manifest")
            with suppress(FileNotFoundError):
                os.unlink(manifest.MANIFEST_NAME, dir_fd=work.fd)  # of the attempt before
            try:
                work.write_sealed(manifest.MANIFEST_NAME, to_json(found))
            except OSError as problem:
                work.raise_if_full(problem)
                raise
            attached = map_entry(work.store, found.key, work.fd, lock)
            check()
            if work.publish(found.key):
                record(found.key)
                lock.touch()
                step("done")
                return attached
        except Damaged as problem:
            lock.release()
            raise _cannot_read_back(work.store, problem) from problem
        except BaseException:
            lock.release()
            raise
        lock.release()
        del attached
        try:
            there = attach(work.store, found.key)
        except OtherFormat as other:
            if other.newer:
                options = replace(options, version=FORMAT)
            else:
                discard_unusable(work.store, found.key)
        except Damaged:
            discard_unusable(work.store, found.key)
        else:
            if there is not None:
                record(found.key)
                return there


def _record(job: BuildJob, store: Store, key: str) -> None:
    """Record the source's digest. The entry works without it: if this fails, the next open hashes the source again."""
    step("record")
    try:
        if job.sample:
            source_digest_records.note_sample(store, job.algorithm, job.source.size, job.sample, key)
        source_digest_records.write_record(store, job.source, job.digests, job.hashed_ns, job.plan.readers)
    except OSError as problem:
        log.warning(
            "%s",
            say(
                "{root}: could not record the digest of {path} ({problem}). The next open hashes the file again.",
                root=store.root,
                path=job.source.paths[0],
                problem=problem.strerror or problem,
            ),
        )
    step("recorded")


def _cannot_read_back(store: Store, problem: Damaged) -> EntryDamaged:
    return EntryDamaged(
        say("data written to {root} reads back differently", root=store.root),
        why=str(problem),
        fix=(
            say("set LEGROOM_DIR to a directory on a local file system"),
            say("set LEGROOM_DISABLE=1 to read without the cache"),
        ),
    )


def _manifest(job: BuildJob, written: WrittenFiles, options: Options) -> Manifest:
    algorithm = job.algorithm
    digest = job.digests[algorithm]
    in_folder = isinstance(job.source.files, StampedFolder)  # the directory has no stamp of its own
    stamps = {file.path: str(file.stamp) for file in (() if in_folder else job.source.files)}
    return Manifest(
        key=manifest.key_of(digest, algorithm, options),
        hash=algorithm,
        digest=digest,
        options=options,
        paths=tuple(os.fspath(path) for path in job.source.paths),
        stamps=tuple(stamps.get(path, "") for path in job.source.paths),
        source_bytes=job.source.size,
        sample=job.sample,
        kind=job.plan.kind,
        kinds=job.plan.kinds,
        arrays=written.arrays,
        tables=written.tables,
        attributes=job.plan.attributes,
        built_at=time.time(),
        built_by=this_builder(),
        cgroups=store_free_space.memory_cgroup_inodes(),
    )


def this_builder() -> str:
    """This process, as manifests name it. Not translated: other processes read it."""
    return f"legroom {VERSION}, pid {os.getpid()} on {socket.gethostname()}"


_POLL = 0.05


def wait_for_turn(asked: BuildRequest, store: Store) -> Lock | Attached:
    """Wait to become the builder, or for the builder to finish."""
    name = f"src-{asked.source.name}.lock"
    pause = 0.002
    while True:
        lock = locks.acquire(store.locks, name)
        if lock is not None:
            return lock
        found = find_entry(asked.request, asked.source, asked.when_ns)
        if found is not None:
            return found
        if not asked.wait:
            raise NotLoaded(
                say("another process is loading {path}", path=asked.source.paths[0]),
                why=say("wait=False was given"),
                fix=(say("omit wait=False to wait for it"), say("try again later")),
            )
        if asked.progress is not None:
            _report_other(store, name, asked.progress)
        time.sleep(pause)
        pause = min(_POLL, pause * 1.5)


def _report_other(store: Store, name: str, progress: Progress) -> None:
    """Report the progress of the builder that the lock file names."""
    try:
        text = read_small_file(store.locks, name, 100).decode("ascii", "replace")
    except OSError:
        return
    backing, _, work = text.strip().partition(" ")
    if not work.startswith(BUILDING) or "/" in work:
        return
    for other in existing_stores():
        if other.backing == backing:
            _, done, total = store_free_space.read_reservation(other, work)
            if total:
                progress(done, total)


def announce_builder(
    asked: BuildRequest, elected_in: Store, work: StagingDirectory | downloads_in_store.Reservation
) -> None:
    """Write into the election's lock file which staging directory reports the progress."""
    name, flags = f"src-{asked.source.name}.lock", os.O_WRONLY | os.O_NOFOLLOW
    with opened(name, flags, dir_fd=elected_in.locks) as fd, suppress(OSError):
        # Where /dev/shm is full to the last page, others wait without progress.
        os.pwrite(fd, f"{work.store.backing} {work.lock_file}\n".encode(), 0)
