"""Bytes that an object keeps alive, by memory pool; bounded in the number of objects that are read.

Tensors and arrays count with their whole storage, once, however many views there are.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import types
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

_MOST_OBJECTS = 2000  # of one measurement
_MOST_ITEMS = 64  # of a container inside the objects
_ALIGNED = 16  # bytes: Python and malloc round up to these; a str of three characters takes 64, not 52
_SHARED_TYPES = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType,
    types.FrameType, types.GetSetDescriptorType,
)  # fmt: skip


_tensor_types: dict[type, bool] = {}


def is_tensor(thing: object) -> bool:
    """Whether it is a torch tensor; each type is asked once, since torch's answer takes microseconds."""
    kind = type(thing)
    known = _tensor_types.get(kind)
    if known is None:
        torch: Any = sys.modules.get("torch")
        base = getattr(torch, "Tensor", None)
        if base is None:
            return False
        known = _tensor_types[kind] = base in kind.__mro__
    return known


@dataclass
class ObjectSize:
    """What was counted: bytes by pool (``ram``, ``shm``, ``gpu0``), and what kinds of memory it is."""

    pools: dict[str, int] = field(default_factory=dict)
    graphs: int = 0  # tensors with an autograd graph
    tensors: int = 0
    complete: bool = True

    def add(self, pool: str, count: int) -> None:
        self.pools[pool] = self.pools.get(pool, 0) + count

    def include(self, other: ObjectSize) -> None:
        """Add what was counted of other objects."""
        for pool, count in other.pools.items():
            self.add(pool, count)
        self.graphs += other.graphs
        self.tensors += other.tensors


def size_of(
    things: Iterable[object],
    *,
    most_of_each: int | None = None,
    most_objects: int = _MOST_OBJECTS,
    seen: set[int] | None = None,
) -> ObjectSize:
    """Bytes that these objects keep alive together; ``most_of_each``: at most so many of each, and no buffers.

    ``seen``: what earlier calls have counted, which must be alive still.
    """
    size, seen, left = ObjectSize(), set() if seen is None else seen, most_objects
    stack = deque(things)
    numpy: Any = sys.modules.get("numpy")
    array_type = getattr(numpy, "ndarray", ()) if numpy is not None else ()
    while stack:
        thing = stack.popleft()
        if thing is None or id(thing) in seen or (isinstance(thing, _SHARED_TYPES) and not _ended_frame(thing)):
            continue
        if left == 0:
            size.complete = False
            break
        left -= 1
        seen.add(id(thing))
        if most_of_each is not None and (is_tensor(thing) or (array_type and isinstance(thing, array_type))):
            size.add("ram", 112)
        elif is_tensor(thing):
            _add_tensor(thing, size, seen)
        elif array_type and isinstance(thing, array_type):
            _add_array(thing, size, seen)
        else:
            own = _own_size(thing)
            size.add("ram", (own if most_of_each is None else min(own, most_of_each)) + _rest_of_large(thing))
            stack.extend(_contents(thing))
    return size


def size_per_item(items: Sequence[object]) -> ObjectSize:
    """Bytes of one item of these: what the later half of them adds, so that what all refer to does not count."""
    half = len(items) // 2
    if half == 0:
        return size_of(items)
    few, all_of_them = size_of(items[:half]), size_of(items)
    count = len(items) - half
    added = {pool: max(0, amount - few.pools.get(pool, 0)) // count for pool, amount in all_of_them.pools.items()}
    # Rounded up: where only some of the items are tensors, or have a graph, there are tensors or graphs.
    graphs, tensors = -((few.graphs - all_of_them.graphs) // count), -((few.tensors - all_of_them.tensors) // count)
    return ObjectSize(added, graphs, tensors, all_of_them.complete)


def leaf_size(thing: Any) -> int | None:
    """Bytes of a tensor, an array, a text or a buffer, or of a table; None for anything else."""
    kind = type(thing)
    if kind in (str, bytes, bytearray):
        return sys.getsizeof(thing)
    module = kind.__module__
    try:
        if module.startswith("torch") and hasattr(thing, "untyped_storage"):
            return int(thing.untyped_storage().nbytes())
        if module == "numpy" and hasattr(thing, "nbytes"):
            return int(thing.nbytes)
        if module.startswith(("pandas.core.frame", "pandas.core.series")):
            usage = thing.memory_usage(index=True)
            return int(usage.sum() if hasattr(usage, "sum") else usage)
        if module == "_io" and kind.__name__ in ("BytesIO", "StringIO"):
            return sys.getsizeof(thing)
        if module == "array":
            return sys.getsizeof(thing)
    except Exception:  # a tensor without storage, a closed file
        return None
    return None


def pool_of(tensor: Any) -> str:
    """The pool of a tensor's storage."""
    device = tensor.device
    if device.type == "cuda":
        return f"gpu{device.index or 0}"
    try:
        return "shm" if device.type == "cpu" and tensor.is_shared() else "ram"
    except Exception:  # a tensor without storage
        return "ram"


def _add_tensor(tensor: Any, size: ObjectSize, seen: set[int]) -> None:
    size.tensors += 1
    size.add("ram", sys.getsizeof(tensor) if type(tensor).__module__ != "torch" else 80)
    try:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and -address not in seen:
            seen.add(-address)
            if tensor.device.type != "meta":
                size.add(pool_of(tensor), int(storage.nbytes()))
    except Exception:  # sparse and fake tensors have no storage
        pass
    if tensor.grad_fn is not None:
        size.graphs += 1


def _add_array(array: Any, size: ObjectSize, seen: set[int]) -> None:
    base = array
    while type(base.base) is type(array):
        base = base.base
    size.add("ram", 112)
    if base.base is not None and not isinstance(base.base, (bytes, bytearray)):
        return  # memory of something else: a mapped file, a tensor, the shared cache
    if -id(base) not in seen:
        seen.add(-id(base))
        size.add("ram", int(base.nbytes))


def _own_size(thing: Any) -> int:
    if isinstance(thing, mmap.mmap):
        try:
            return len(thing)
        except ValueError:  # closed
            return 0
    if isinstance(thing, (ctypes.Array, ctypes.Structure)):
        return ctypes.sizeof(thing)
    try:
        return -(-sys.getsizeof(thing, 0) // _ALIGNED) * _ALIGNED
    except Exception:
        return 0


def _contents(thing: Any) -> Iterable[object]:
    """What an object refers to; of a large container the first items, which size_per_item compares alike."""
    kind = type(thing)
    if kind in (str, bytes, int, float, bool, complex):
        return ()
    if isinstance(thing, dict) and len(thing) > _MOST_ITEMS:
        return [part for pair in islice(dict.items(thing), _MOST_ITEMS) for part in pair]
    if isinstance(thing, (list, tuple)) and len(thing) > _MOST_ITEMS:
        return list(islice(iter(thing), _MOST_ITEMS))
    return gc.get_referents(thing)


def _rest_of_large(thing: Any) -> int:
    """About the bytes of the items of a large container that `_contents` leaves out, without what they refer to."""
    if not isinstance(thing, (list, tuple, dict)) or len(thing) <= _MOST_ITEMS:
        return 0
    few = list(islice(iter(thing.values() if isinstance(thing, dict) else thing), _MOST_ITEMS))
    return sum(map(_own_size, few)) // len(few) * (len(thing) - len(few))


def _ended_frame(thing: object) -> bool:
    """Whether it is the frame of a call that has ended: an exception keeps it, with its variables."""
    if not isinstance(thing, types.FrameType):
        return False
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame is thing:
            return False
        frame = frame.f_back
    return not any(thing is running for running in sys._current_frames().values())
