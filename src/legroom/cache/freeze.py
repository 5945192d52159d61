"""``legroom.freeze`` and ``legroom.freeze_dataset``: lists and dicts of Python objects as one shared copy in the cache.

The entry's key is the digest of the encoded bytes. So every process encodes its object once to know the key, and one of
them writes: the first to take the lock of objects with the same sample. The others compute their digest meanwhile,
and attach.

``freeze_dataset`` finds the large lists and dicts of a dataset, and freezes them in place. How much memory an attribute
takes as Python objects is measured by a sample of its items.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from legroom.cache import locks, source_digest_records, store_free_space
from legroom.cache.elect_builder_and_publish import elect, publish_entry, this_builder
from legroom.cache.find_or_build_entry import (
    CANNOT_ATTACH,
    attach_named,
    attach_usable,
    in_first_store,
    resource_errors,
)
from legroom.cache.frozen_encoding import ENCODING, Encoder
from legroom.cache.frozen_sequence_and_mapping import ARRAYS, FrozenContents, FrozenMapping, FrozenSequence
from legroom.cache.frozen_writer import TYPES, FileOutputs, MemoryOutputs, Outputs, is_large, write_object
from legroom.cache.lease_and_map_entry import Attached, entry_record
from legroom.cache.locks import Lock
from legroom.cache.manifest import FORMAT, FROZEN, Manifest, Options, key_of
from legroom.cache.staging_directory import StagingDirectory
from legroom.cache.store_directories import Store, Stores, log, open_stores, step
from legroom.errors import NotLoaded, StoreError, UnsupportedData, UsageError
from legroom.messages import say
from legroom.probe.copy_on_write import PAGE, CopiedMemory, share_of
from legroom.records.cache_entry import Entry, EntryArray
from legroom.system.argument_checks import check_arguments
from legroom.system.processes_and_threads import legroom_disabled
from legroom.units import format_size

_HASH = "md5"
_SAMPLES = 64  # items in the sample
_POLL = 0.02

View = FrozenSequence | FrozenMapping


def freeze(obj: Any, *, name: str | None = None) -> Any:
    """Put a list, tuple or dict of Python objects into the cache, and return a view of the shared copy.

    Reading a Python object writes its reference count, so each forked DataLoader worker copies the pages of a plain
    list while it only reads it. A frozen one is bytes: workers, ranks and other jobs that freeze equal content share
    one copy.

    The result is a FrozenSequence or a FrozenMapping. Items are decoded on access; changing one changes nothing else.
    UnsupportedData is raised, with the path, if an object cannot be kept exactly, and NoRoom if no store has space.

    Args:
        obj: A list, tuple or dict. A frozen object is returned as it is.
        name: A name for ``legroom cache list``, such as ``"coco-train"``. It is not part of the identity.
    """
    if isinstance(obj, (FrozenSequence, FrozenMapping)):
        return obj
    if type(obj) not in TYPES:
        raise UsageError(
            say("legroom.freeze takes a list, a tuple or a dict, not {kind}", kind=type(obj).__name__),
            why=say("numpy arrays and tensors need no freezing: reading them copies nothing"),
            fix=(say("pass list(…) or dict(…)"), say("for arrays in a file, use legroom.open")),
        )
    if name is not None and (not isinstance(name, str) or not name or not name.isprintable()):
        raise UsageError(say("name must be printable text, not {given!r}", given=name), fix=("name='coco-train'",))
    called = name or "object"
    with resource_errors(called, parts=False):
        if legroom_disabled(os.environ) or not locks.SUPPORTED:
            return _in_this_process(obj, called, name)
        work = _Freezing(obj, called, name)
        for last in (False, True):
            try:
                with open_stores(make=True) as stores:
                    return _contents(_found_or_built(work, stores)).view()
            except FileNotFoundError:
                if last:  # else the store was removed (logind does so at logout): create it again, once
                    raise
    raise AssertionError("not reached")


@dataclass
class _Freezing:
    """One call of freeze: the object, what identifies it, and how much it will take."""

    obj: Any
    called: str  # in messages
    name: str | None
    sample: str = ""
    estimate: int = 0
    digest: str | None = None

    def __post_init__(self) -> None:
        obj, called = self.obj, self.called
        count, kind = len(obj), type(obj).__name__
        if isinstance(obj, dict):  # which cannot be entered in the middle
            pairs = list(islice(obj.items(), _SAMPLES))
            chosen = [(f"{called} (key {index})", key) for index, (key, _) in enumerate(pairs)]
            chosen += [(f"{called}[{key!r:.80}]", value) for key, value in pairs]
        else:
            places = range(0, count, max(1, count // _SAMPLES))[:_SAMPLES]
            chosen = [(f"{called}[{place}]", obj[place]) for place in places]
        small = [(path, one) for path, one in chosen if not is_large(one)]
        encoded = Encoder().encode_all([one for _, one in small], lambda index: small[index][0])
        hasher = hashlib.blake2b(f"{ENCODING} {kind} {count} ".encode(), digest_size=8)
        for data in encoded:
            hasher.update(b"%d:%b" % (len(data), data))
        self.sample = hasher.hexdigest()
        each = sum(map(len, encoded)) // max(1, len(encoded)) + 8
        self.estimate = count * (each if kind != "dict" else 2 * each + 12)

    def known_digest(self) -> str:
        """What its entry is found by: computed by encoding all of it, once."""
        if self.digest is None:
            step("digest")
            self.digest = write_object(self.obj, self.called, Outputs()).digest
        return self.digest

    def may_exist(self, stores: Stores) -> bool:
        """Whether an object with this sample has an entry."""
        return any(source_digest_records.may_hold(store, _HASH, len(self.obj), self.sample) for store in stores.found)


def _found_or_built(work: _Freezing, stores: Stores) -> Attached:
    if work.may_exist(stores) and (found := _find(work, stores)) is not None:
        return found
    won, stores = elect(stores, lambda store: _wait_for_turn(work, store, stores))
    if isinstance(won, Attached):
        return won
    with won:
        # It may have been published between the first look and the lock.
        if (work.digest is not None or work.may_exist(stores)) and (found := _find(work, stores)) is not None:
            return found
        step("elected")
        return in_first_store(list(stores.found), lambda store: _build_in(store, work), work.called)


def _wait_for_turn(work: _Freezing, store: Store, stores: Stores) -> Lock | Attached:
    """Take the lock of objects with this sample, or wait for the process that holds it and attach its entry."""
    name = f"src-{FROZEN}-{work.sample}.lock"
    while True:
        lock = locks.acquire(store.locks, name)
        if lock is not None:
            return lock
        found = _find(work, stores)  # the digest is computed while the other process writes
        if found is not None:
            return found
        time.sleep(_POLL)


def _find(work: _Freezing, stores: Stores) -> Attached | None:
    """Attach the object's entry in any store, or the one that was made beside an entry of a newer format."""
    for store in stores.distinct:
        for options in (Options(), Options(version=FORMAT)):
            found = attach_usable(store, key_of(work.known_digest(), _HASH, options))
            if found is not None:
                return found
    return None


def _build_in(store: Store, work: _Freezing) -> Attached:
    """Encode into a private directory of the store, and publish it. NoRoom at any point leaves nothing in it."""
    need = store_free_space.BuildNeed(work.estimate + work.estimate // 8 + (1 << 18), len(ARRAYS) + 8, several=False)
    with ExitStack() as stack:
        staging = stack.enter_context(StagingDirectory(store, need, evict=True))
        outputs = stack.enter_context(FileOutputs(staging))
        step("write")
        try:
            written = write_object(work.obj, work.called, outputs)
            step("written")
            arrays = outputs.sealed(written)
        except OSError as problem:
            staging.raise_if_full(problem)
            raise
        work.digest = written.digest
        size = sum(array.nbytes for array in arrays)

        def describe(options: Options) -> Manifest:
            assert work.digest is not None
            return Manifest(
                key=key_of(work.digest, _HASH, options),
                hash=_HASH,
                digest=work.digest,
                options=options,
                paths=(),
                stamps=(),
                source_bytes=size,
                sample=work.sample,
                kind=FROZEN,
                arrays=arrays,
                tables=(),
                attributes=_entry_attributes(work.obj, work.name),
                built_at=time.time(),
                built_by=this_builder(),
                cgroups=store_free_space.memory_cgroup_inodes(),
            )

        def record(key: str) -> None:
            try:
                source_digest_records.note_sample(store, _HASH, len(work.obj), work.sample, key)
            except OSError as problem:  # the next process finds the entry when it publishes its own
                log.warning("%s", say("{root}: {problem}", root=store.root, problem=problem.strerror or problem))

        return publish_entry(staging, describe, Options(), record=record)


def _entry_attributes(obj: Any, name: str | None) -> dict[str, Any]:
    about: dict[str, Any] = {"encoding": ENCODING, "type": type(obj).__name__, "items": len(obj)}
    return about | ({"name": name} if name is not None else {})


def _contents(attached: Attached) -> FrozenContents:
    manifest, root = attached.manifest, os.fspath(attached.root)
    if (
        manifest.kind != FROZEN
        or manifest.attributes.get("encoding") != ENCODING
        or set(attached.arrays) != set(ARRAYS)
    ):
        raise StoreError(
            say("{key} is not a frozen object that this version can read", key=manifest.key),
            why=say("its format is {kind}, encoding {encoding}",
                    kind=manifest.kind, encoding=manifest.attributes.get("encoding")),
            fix=(say("use the version of Legroom that froze it"), say("freeze the object again")),
        )  # fmt: skip
    record = entry_record(manifest, attached.backing, store=root, in_use=True, last_used=time.time())
    return FrozenContents(attached.arrays, record, (root, attached.backing, manifest.key))


def attach_frozen(root: str, backing: Any, key: str) -> FrozenContents:
    """The contents of a frozen object that another process has pickled."""
    why = say("the entry was dropped, or the other process runs on another machine or in another container")
    found = None
    try:
        found = attach_named(root, backing, key)
    except CANNOT_ATTACH as problem:
        why = str(problem)
    if found is None:
        raise NotLoaded(
            say("the frozen object {key} is not in the cache any more", key=key[:12]),
            why=why,
            fix=(say("keep a process alive that has it open: an entry in use is not evicted"),
                 say("call legroom.freeze again where the object is made")),
        )  # fmt: skip
    return _contents(found)


# Without a store (LEGROOM_DISABLE=1, Windows): the same bytes in this process. Forked workers share them too.


def _in_this_process(obj: Any, called: str, name: str | None) -> View:
    kept = MemoryOutputs()
    written = write_object(obj, called, kept)
    arrays = {part: np.frombuffer(bytes(kept.buffers.pop(part)), dtype) for part, dtype in ARRAYS.items()}
    size = sum(array.nbytes for array in arrays.values())
    shapes = {part: EntryArray(array.shape, str(array.dtype), array.nbytes) for part, array in arrays.items()}
    entry = Entry(
        None, (), written.digest, _HASH, FROZEN, "memory", size, shapes, {}, _entry_attributes(obj, name)
    )  # fmt: skip
    return FrozenContents(arrays, entry, None).view()


_SAMPLE = 256  # items of a container whose size is measured
_DEEPEST = 6  # containers in each other that are measured, datasets in each other that are entered
_MOST_PARTS = 20_000  # objects measured for one attribute
_LEAST = 1 << 20
_ADDRESSES = 2000  # items whose pages are looked up
_INLINE = (str, bytes, tuple, int)  # whose contents follow the reference count
_GC_HEAD = 16  # bytes before an object that the garbage collector knows


@dataclass(frozen=True, slots=True)
class FrozenAttribute:
    """One list or dict of a dataset, and what freeze_dataset did with it."""

    name: str  # "samples", "dataset.samples" for one of a dataset inside
    type: str
    items: int
    bytes: int  # as Python objects, estimated from a sample
    frozen: int | None  # bytes of the shared copy; None: it was left as it is
    why: str | None = None  # why it was left

    def __str__(self) -> str:
        size = format_size(self.bytes)
        if self.frozen is None:
            return say("{name}: {size} not frozen: {why}", name=self.name, size=size, why=self.why)
        return say(
            "{name}: {type} of {items} items, {size} of Python objects, now {frozen} shared",
            name=self.name, type=self.type, items=self.items, size=size, frozen=format_size(self.frozen),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LargeAttribute:
    """A list or dict of a dataset, where it is, and its estimated size as Python objects."""

    name: str
    value: Any
    bytes: int
    replace: Callable[[Any], None]


def freeze_dataset(dataset: Any, *, at_least: int = _LEAST) -> tuple[FrozenAttribute, ...]:
    """Freeze the large lists and dicts among a dataset's attributes, in place. Call it before workers start.

    Attributes of datasets inside it (Subset, ConcatDataset) are included. One list under two names, such as ``samples``
    and ``imgs`` of ImageFolder, is frozen once and stays one object. What cannot be frozen stays as it is. The result
    lists both, largest first.

    Args:
        dataset: Any object with attributes, usually a torch Dataset.
        at_least: Leave what takes fewer bytes than this as Python objects.
    """
    check_arguments(freeze_dataset, locals())
    done: dict[int, tuple[Any, FrozenAttribute]] = {}
    found = []
    for one in large_attributes(dataset, at_least=at_least):
        if id(one.value) not in done:
            done[id(one.value)] = _frozen(one)
        view, told = done[id(one.value)]
        if told.frozen is not None:
            try:
                one.replace(view)
            except (AttributeError, TypeError) as problem:  # a property, or a frozen dataclass
                told = _told(one, None, str(problem))
        found.append(FrozenAttribute(one.name, told.type, told.items, told.bytes, told.frozen, told.why))
    return tuple(found)


def _frozen(one: LargeAttribute) -> tuple[Any, FrozenAttribute]:
    try:
        view = freeze(one.value, name=one.name)
    except (UnsupportedData, UsageError) as problem:
        return one.value, _told(one, None, problem.what)
    return view, _told(one, view.info.bytes, None)


def _told(one: LargeAttribute, frozen: int | None, why: str | None) -> FrozenAttribute:
    return FrozenAttribute(one.name, type(one.value).__name__, len(one.value), one.bytes, frozen, why)


def large_attributes(dataset: Any, *, at_least: int = _LEAST) -> list[LargeAttribute]:
    """The lists, tuples and dicts of a dataset that take at least so many bytes as Python objects, largest first."""
    if isinstance(dataset, (str, bytes, int, float, type(None))):
        raise UsageError(say("{kind} is not a dataset", kind=type(dataset).__name__), fix=(say("pass the dataset"),))
    if isinstance(dataset, (list, tuple, dict)):
        raise UsageError(
            say("a {kind} has no attributes to replace", kind=type(dataset).__name__),
            fix=("dataset = legroom.freeze(dataset)",),
        )
    found = [
        LargeAttribute(name, value, size, replace)
        for name, value, replace in _containers(dataset, "", 0, set())
        if (size := python_bytes(value)) >= at_least
    ]
    return sorted(found, key=lambda one: -one.bytes)


def copied_parts(dataset: Any, memory: CopiedMemory, samples: int) -> list[dict[str, Any]]:
    """Of each large attribute, how much a worker copied, as fields of a CopiedAttribute. Looking it up copies too.

    ``samples``: how many it has read at least. Pages that were written to do not count. The size is what reading can
    copy: of a long text the page with its reference count.
    """
    if isinstance(dataset, (list, tuple, dict)):
        found = [LargeAttribute("dataset", dataset, python_bytes(dataset), lambda _: None)]
    else:
        found = large_attributes(dataset)
    parts: dict[int, dict[str, Any]] = {}  # one list under two names is one
    for one in found:
        size = python_bytes(one.value, most_of_each=PAGE)
        fields = {
            "name": one.name, "type": type(one.value).__name__, "bytes": size,
            "copied": int(_read_share(_addresses(one.value), memory) * size),
            "read": int(min(1.0, samples / max(1, len(one.value))) * size),
        }  # fmt: skip
        parts.setdefault(id(one.value), fields)
    return list(parts.values())


def _read_share(addresses: list[int], memory: CopiedMemory) -> float:
    """The share of these addresses on pages that were copied and only read, as far as pages were compared."""
    copied = share_of(addresses, memory.pages) or 0.0
    if memory.reason is not None:  # contents could not be compared
        return copied
    if not (compared := share_of(addresses, memory.compared)):
        return 0.0
    return copied * (share_of(addresses, memory.alike) or 0.0) / compared


def _addresses(value: Any) -> list[int]:
    """Addresses of a sample of its items and of what these contain."""
    values = list(islice(value.values(), _MOST_PARTS)) if isinstance(value, dict) else value
    some = values[:: max(1, len(values) // _ADDRESSES)]
    inside = [part for one in some if isinstance(one, (list, tuple)) for part in one[:4]]
    inside += [part for one in some if isinstance(one, dict) for part in islice(one.values(), 4)]
    return [id(one) for one in (*some, *inside)]


def _containers(
    owner: Any, prefix: str, depth: int, seen: set[int]
) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Every list, tuple and dict among the attributes, also of datasets inside."""
    if id(owner) in seen or depth > _DEEPEST:
        return
    seen.add(id(owner))
    for name, value in _dataset_attributes(owner).items():
        if type(value) in (list, tuple, dict):
            inside = [one for one in islice(value, 64) if _is_dataset(one)] if type(value) is not dict else []
            if inside:
                for index, one in enumerate(inside):
                    yield from _containers(one, f"{prefix}{name}[{index}].", depth + 1, seen)
            else:
                yield prefix + name, value, lambda new, name=name: setattr(owner, name, new)  # type: ignore[misc]
        elif _is_dataset(value):
            yield from _containers(value, f"{prefix}{name}.", depth + 1, seen)


def _dataset_attributes(owner: Any) -> dict[str, Any]:
    found = dict(getattr(owner, "__dict__", {}))
    for kind in type(owner).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(owner, name):
                found[name] = getattr(owner, name)
    return found


def _is_dataset(value: Any) -> bool:
    """Whether it is a torch Dataset, or an object like one, without importing torch."""
    kind = type(value)
    if kind.__module__ in ("builtins", "numpy") or isinstance(value, (FrozenSequence, FrozenMapping)):
        return False
    if any(base.__module__.startswith("torch.utils.data") for base in kind.__mro__):
        return True
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and hasattr(value, "__dict__")


def python_bytes(value: Any, *, most_of_each: int = sys.maxsize) -> int:
    """Bytes that a container takes as Python objects, from a sample of its items; ``most_of_each`` object."""
    seen: set[int] = set()  # one that is met twice counts once

    def measure(value: Any, depth: int) -> int:
        if id(value) in seen or len(seen) >= _MOST_PARTS:
            return 0
        seen.add(id(value))
        size = min(most_of_each, sys.getsizeof(value, 0))
        if most_of_each < sys.maxsize and not isinstance(value, _INLINE):
            size = min(size, type(value).__basicsize__ + _GC_HEAD)  # the rest lies elsewhere, as an array's data do
        parts: Sequence[Any] = ()
        count = 0
        if isinstance(value, Mapping):
            count = len(value)
            parts = [part for pair in islice(value.items(), _SAMPLE) for part in pair]
            count *= 2
        elif isinstance(value, (list, tuple)):
            count = len(value)
            parts = value[:: max(1, count // _SAMPLE)][:_SAMPLE]
        elif isinstance(value, (set, frozenset)):
            count = len(value)
            parts = list(islice(value, _SAMPLE))
        if not parts or depth >= _DEEPEST:
            return size
        return size + sum(measure(part, depth + 1) for part in parts) * count // len(parts)

    return measure(value, 0)
