"""A cold start: one process reads the source, the others wait for it.

Covers: what happens between being elected and giving the entry its name.
Does not cover: the election (elect.py), finding what is there already (find.py), the files' bytes (load.py, copy.py).

Lock order, the same everywhere: the source's lock in the home store, the source's lock in the store that the data
go to, the entry's lease, the store's lock. The last is held for moments and nobody who holds it waits.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from logging import DEBUG, WARNING

from legroom.cache import identity, manifest, records, room
from legroom.cache.attach import Attached, Lease, attach, lease, map_entry
from legroom.cache.copy import Layout
from legroom.cache.elect import name_work, turn
from legroom.cache.find import Request, find, find_digest, own_options, put_aside
from legroom.cache.load import Asked, Job, Progress, Written, load, need
from legroom.cache.locks import Lock
from legroom.cache.manifest import FORMAT, Damaged, Manifest, Options, OtherFormat
from legroom.cache.manifest_json import to_json
from legroom.cache.place import Store, Stores, stores
from legroom.cache.plan import plan
from legroom.cache.steps import log, step
from legroom.cache.work import Work
from legroom.errors import EntryDamaged, NoRoom, NoStore, SourceChanged, SourceError, StoreError, UsageError
from legroom.formats.decoding_memory import release_freed_memory
from legroom.formats.detect import open_source
from legroom.model import Finding
from legroom.version import VERSION
from legroom.words import joined, say

# A lock file cannot be made: no inode or block left, or a store that has become read-only.
_CANNOT_HOLD = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_here = threading.local()  # .building: the sources that this thread is building


def build(request: Request, *, wait: bool = True, progress: Progress | None = None) -> Attached:
    """Attach the source's entry, building it where nobody has; at most one process reads it at a time."""
    for last in (False, True):
        asked = Asked(request, identity.look(request.paths), time.time_ns(), wait, progress)
        try:
            with _not_from_itself(asked), stores(make=True) as places:
                for finding in places.findings:
                    log.log(
                        WARNING if finding.severity == "warning" else DEBUG,
                        "%s: %s",
                        finding.message,
                        finding.why,
                    )
                return _elected(asked, places)
        except SourceError as problem:
            # What looks like damage may be two versions, one half each.
            if last or (not isinstance(problem, SourceChanged) and identity.unchanged(asked.source)):
                raise
        except FileNotFoundError as problem:
            # The store was removed under us (logind does so at logout): it is made anew once.
            if last:
                raise StoreError(
                    say("the store vanished while it was written"), why=str(problem), fix=(say("try again"),)
                ) from problem
    raise AssertionError("not reached")


@contextmanager
def _not_from_itself(asked: Asked) -> Iterator[None]:
    """Refuse to open in the progress callback of a load what that load is building: it would wait for itself."""
    building: set[str] = _here.__dict__.setdefault("building", set())
    if asked.source.name in building:
        raise UsageError(
            say("{path} is being loaded by this thread already", path=asked.source.paths[0]),
            why=say("open() was called from the progress callback of its own load"),
            fix=(say("open it after the load has returned"),),
        )
    building.add(asked.source.name)
    try:
        yield
    finally:
        building.discard(asked.source.name)


def _elected(asked: Asked, places: Stores) -> Attached:
    won, places = _turn(asked, places)
    if isinstance(won, Attached):
        return replace(won, findings=places.findings)
    with won:
        found = find(asked.request, asked.source, asked.when_ns)
        if found is None:
            step("elected")
            found = _build(asked, places)
        return replace(found, findings=places.findings)


def _turn(asked: Asked, places: Stores) -> tuple[Lock | Attached, Stores]:
    """Be elected in the first store that can hold the lock file, and the stores that are left.

    Those who are elected in another store because this one was full a moment ago build the entry a second time at
    worst: whoever publishes last attaches what the first has published.
    """
    while True:
        home = places.home
        try:
            return turn(asked, home), places
        except OSError as problem:
            if problem.errno not in _CANNOT_HOLD:
                raise
            why = say("{path}: {problem}", path=home.root, problem=problem.strerror)
            finding = Finding(
                "store-unusable",
                "warning",
                say("{path} is not used as a store", path=home.root),
                why,
                ("legroom cache gc", "LEGROOM_DIR=/some/local/directory"),
            )
            log.warning("%s: %s", finding.message, finding.why)
            places = places.without(home, finding)


def _build(asked: Asked, places: Stores) -> Attached:
    with ExitStack() as stack:
        memory = room.decoding_memory()
        readers = [
            stack.enter_context(open_source(path, asked.request.keys, memory)) for path in asked.source.paths
        ]
        descriptions = [reader.describe() for reader in readers]
        planned = plan(descriptions)
        layout = Layout(readers, planned.arrays)
        job = Job(asked, identity.described(asked.source, descriptions), readers, planned, memory, layout)
        identity.require_own(job.source, readers)
        identity.settle(job.source)
        job.sample = identity.sample(job.source)
        found = _there_already(job, places)
        if found is not None:
            return found
        refused: list[NoRoom] = []
        for store in _wanted(asked.request, places):
            try:
                return _build_in(store, job, places)
            except NoRoom as problem:
                # Memory may fill up in the middle of the load, too. Its traceback would keep what was read.
                refused.append(problem.with_traceback(None))
                problem.__context__ = problem.__cause__ = None
                release_freed_memory()
                log.info("%s", problem)
        raise _refused(job, refused)


def _build_in(store: Store, job: Job, places: Stores) -> Attached:
    """Reserve, load and publish in one store; NoRoom at any moment leaves nothing in it."""
    asked = job.asked
    with ExitStack() as stack:
        work = stack.enter_context(Work(store, need(job, store), evict=asked.request.evict))
        if store.directory != places.home.directory:
            # Processes that share this store and not the home store (other containers) are elected here.
            try:
                won = turn(asked, store)
            except OSError as problem:
                work.raise_full(problem)
                raise
            if isinstance(won, Attached):
                return won
            stack.enter_context(won)
            found = find(asked.request, asked.source, asked.when_ns)
            if found is not None:
                return found
        name_work(asked, places.home, work)
        return _publish(job, work, load(job, work))


def _there_already(job: Job, places: Stores) -> Attached | None:
    """The entry of a file with the same bytes and another name: hashed before anything is copied."""
    asked = job.asked
    for store in places.found:
        record = records.read(store, asked.source)
        # Other keys may have needed other files behind the named one: their digest is not this one's.
        same = record is not None and set(record.lookups) == set(job.source.lookups)
        if record is not None and same and record.believed(asked.when_ns):
            job.digests.update(record.digests)
            job.hashed_ns = record.hashed_ns
    if asked.request.hash in job.digests or not _may_be_there(job, places):
        return None
    step("hash")
    job.hashed_ns = time.time_ns()
    job.digests = {asked.request.hash: identity.digest(job.source, asked.request.hash)}
    for store in places.found:
        if not asked.request.wants(store):
            continue
        found = find_digest(
            asked.request, asked.source, store, job.digests[asked.request.hash], asked.request.hash
        )
        if found is not None:
            if not identity.unchanged(job.source):
                raise identity.changed(asked.source.paths[0])
            _record(job, store, found.manifest.key)
            return found
    return None


def _may_be_there(job: Job, places: Stores) -> bool:
    """Whether some entry was built from as many bytes as this source has, and a few of them are the same."""
    wanted = job.asked.request.hash, job.source.size, job.sample
    return any(records.may_hold(store, *wanted) for store in places.found)


def _wanted(request: Request, places: Stores) -> list[Store]:
    """The stores that the request may be built in, best first."""
    chosen = [store for store in places.found if request.wants(store)]
    if not chosen:
        raise NoStore(
            say("there is no {backing} store", backing=request.backing),
            why=joined(finding.why for finding in places.findings) or say("no candidate could be used"),
            fix=("backing='auto'", "LEGROOM_DIR=/some/local/directory"),
        )
    return chosen


def _refused(job: Job, refused: Sequence[NoRoom]) -> NoRoom:
    if len(refused) == 1:
        return refused[0]
    return NoRoom(
        say("no store has room for {path}", path=job.source.paths[0]),
        why=joined(say("{name}: {why}", name=problem.what, why=problem.why) for problem in refused),
        fix=tuple(dict.fromkeys(line for problem in refused for line in problem.fix)),
    )


def _publish(job: Job, work: Work, written: Written) -> Attached:
    """Give the entry its name, unless its content is there already, and record the source.

    It is mapped before it has its name: whoever takes it away again, even by force, does not take it from us.
    """
    options = own_options(job.asked.request, job.source)
    while True:
        found = _manifest(job, written, options)
        step("lease")
        try:
            lock = _leased(work.store, found.key)
        except OSError as problem:
            work.raise_full(problem)
            raise
        try:
            step("manifest")
            work.write(manifest.NAME, to_json(found))
            work.seal(manifest.NAME)
            attached = map_entry(work.store, found.key, work.fd, lock)
            identity.require_own(job.source, job.readers)
            if not identity.unchanged(job.source):
                raise identity.changed(job.source.paths[0])
            if work.publish(found.key):
                _record(job, work.store, found.key)
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
            if other.version > FORMAT:
                options = replace(options, version=FORMAT)
            else:
                put_aside(work.store, found.key)
        except Damaged:
            put_aside(work.store, found.key)
        else:
            if there is not None:
                _record(job, work.store, found.key)
                return there


def _record(job: Job, store: Store, key: str) -> None:
    """Remember the source's digest. The entry is in use without it: where that fails, the next open hashes again."""
    step("record")
    try:
        records.note_sample(store, job.asked.request.hash, job.source.size, job.sample, key)
        records.write(store, job.source, job.digests, job.hashed_ns)
    except OSError as problem:
        log.warning(
            "%s",
            say(
                "{root}: the digest of {path} could not be recorded ({problem}); the next open hashes the file again",
                root=store.root,
                path=job.source.paths[0],
                problem=problem.strerror or problem,
            ),
        )
    step("recorded")


def _cannot_read_back(store: Store, problem: Damaged) -> EntryDamaged:
    return EntryDamaged(
        say("what was written to {root} does not read back as written", root=store.root),
        why=str(problem),
        fix=(say("LEGROOM_DIR on a local file system"), say("LEGROOM_DISABLE=1 does without the cache")),
    )


def _leased(store: Store, key: str) -> Lease:
    lock = lease(store, key, create=True)
    assert lock is not None  # it was to be created
    return lock


def _manifest(job: Job, written: Written, options: Options) -> Manifest:
    algorithm = job.asked.request.hash
    digest = job.digests[algorithm]
    stamps = {file.path: str(file.stamp) for file in job.source.files}
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
        arrays=written.arrays,
        tables=written.tables,
        attributes=job.plan.attributes,
        built_at=time.time(),
        # Into a file that others read: in no language of this process.
        built_by=f"legroom {VERSION}, pid {os.getpid()} on {socket.gethostname()}",
        cgroups=room.cgroups(),
    )
