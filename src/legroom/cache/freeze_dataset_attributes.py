"""``legroom.freeze_dataset``: find the large lists and dicts of a dataset, and freeze them in place.

Also measures how much memory such an attribute takes as Python objects, by a sample of its items.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from legroom.cache.freeze_list_or_dict import freeze
from legroom.cache.frozen_sequence_and_mapping import FrozenMapping, FrozenSequence
from legroom.errors import UnsupportedData, UsageError
from legroom.messages import say
from legroom.probe.copy_on_write import PAGE, CopiedMemory, share_of
from legroom.system.argument_checks import check_arguments
from legroom.units import format_size

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
    for name, value in _attributes(owner).items():
        if type(value) in (list, tuple, dict):
            inside = [one for one in islice(value, 64) if _is_dataset(one)] if type(value) is not dict else []
            if inside:
                for index, one in enumerate(inside):
                    yield from _containers(one, f"{prefix}{name}[{index}].", depth + 1, seen)
            else:
                yield prefix + name, value, lambda new, name=name: setattr(owner, name, new)  # type: ignore[misc]
        elif _is_dataset(value):
            yield from _containers(value, f"{prefix}{name}.", depth + 1, seen)


def _attributes(owner: Any) -> dict[str, Any]:
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
    return _Measure(most_of_each).of(value, 0)


class _Measure:
    """Adds up sizes of objects; one that is met twice counts once."""

    def __init__(self, most_of_each: int) -> None:
        self._seen: set[int] = set()
        self._left = _MOST_PARTS
        self._most = most_of_each

    def of(self, value: Any, depth: int) -> int:
        if id(value) in self._seen or self._left <= 0:
            return 0
        self._seen.add(id(value))
        self._left -= 1
        size = min(self._most, sys.getsizeof(value, 0))
        if self._most < sys.maxsize and not isinstance(value, _INLINE):
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
        return size + sum(self.of(part, depth + 1) for part in parts) * count // len(parts)
