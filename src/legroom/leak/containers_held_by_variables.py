"""Find what holds memory: walk from the user's variables to the containers, tensors and texts that they keep.

The walk begins at the global variables of the user's modules, at the local variables of running functions, and at the
dataset of a DataLoader worker. It follows attributes, closures, default arguments, class attributes and caches of
functions, reads the length of containers but few of their items, and so knows each holder by the name in the source.
A full list of Python's objects would also find them, but touches every object: a forked worker would copy them all.
"""

from __future__ import annotations

import functools
import queue
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from legroom.leak.object_size import is_tensor, leaf_size
from legroom.leak.user_source_files import is_user_file, user_modules

MOST_OBJECTS = 12_000  # read in one walk
_DEEPEST = 8
_SMALL = 32  # containers up to this length are read completely
_MOST_WORDS = 16  # keys of a dict whose entries have names of their own
_SAMPLED = 6  # items at either end of a larger one
_LEAST_LEAF = 4096  # bytes
_CACHED_FUNCTION = type(functools.lru_cache(lambda: None))
_ATOMS = frozenset({
    int, float, bool, complex, type(None), type(...), types.ModuleType, types.BuiltinFunctionType, types.CodeType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, range, slice, types.GenericAlias, property,
})  # fmt: skip
_SKIPPED_NAMES = frozenset({
    "__builtins__", "__loader__", "__spec__", "__cached__", "__doc__", "__file__", "__package__", "__path__",
    "__annotations__", "__slots__", "__weakref__", "__module__", "__dict__", "__mro__",
})  # fmt: skip
# Attributes of every torch.nn.Module that hold no data of the user; hooks are read where there are any.
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # torch: register_hook, and its like
_OF_EVERY_MODULE = frozenset({
    "training", "_parameters", "_non_persistent_buffers_set", "_is_full_backward_hook", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
})  # fmt: skip
_READS_LOCALS = frozenset({"locals", "vars", "eval", "exec", "dir"})
_LINE_VARIABLES = 0x1  # CO_OPTIMIZED: local variables are not in a dict
Key = tuple[str, str]  # file, name


@dataclass(frozen=True, slots=True)
class Holder:
    """What keeps memory: its name in the source, and where to look for the line that fills it."""

    name: str  # history, self.cache, Trainer.outputs, acts[…], log["loss"]
    word: str  # the last identifier: history, cache, outputs
    file: str  # the file in which it is filled, most likely
    function: str = ""  # of a local variable
    line: int | None = None  # where it is known: the function of a cache

    @property
    def key(self) -> Key:
        return self.file, self.name


@dataclass(slots=True)
class Holding:
    """How much a holder has now: items of a container, or bytes of a tensor, an array or a text."""

    holder: Holder
    unit: str  # items or bytes
    amount: int
    thing: Any  # for measuring; not kept after the walk
    limit: int | None = None  # items that it can hold: maxlen, maxsize


@dataclass
class Walk:
    """One walk over everything that the user's variables hold."""

    found: dict[Key, Holding] = field(default_factory=dict)
    graphs: dict[Key, tuple[Holder, Any]] = field(default_factory=dict)  # variables with an autograd graph
    left: int = MOST_OBJECTS
    _seen: set[int] = field(default_factory=set)
    _stack: deque[tuple[Any, Holder, int]] = field(default_factory=deque)
    _module: Any = ()

    def run(self, frames: Iterable[types.FrameType], dataset: object = None) -> Walk:
        """Read everything; ``dataset`` is that of a DataLoader worker."""
        torch: Any = sys.modules.get("torch")
        self._module = getattr(getattr(torch, "nn", None), "Module", ())
        if dataset is not None:
            self._push(dataset, Holder("dataset", "dataset", _file_of(type(dataset)) or ""), 0)
            self._drain()
        for name, variables in user_modules():
            file = str(variables.get("__file__") or f"<{name}>")
            prefix = "" if name == "__main__" else f"{name}."
            self._seen.add(id(variables))
            for word, value in _items(variables):
                if word not in _SKIPPED_NAMES and not _foreign(value):
                    self._push(value, Holder(prefix + word, word, file), 0)
            self._drain()
        for frame in frames:
            code = frame.f_code
            for word, value in local_variables(frame):
                self._push(value, Holder(word, word, code.co_filename, code.co_name), 0)
            self._drain()
        return self

    def _drain(self) -> None:
        while self._stack and self.left > 0:
            thing, holder, depth = self._stack.popleft()
            self.left -= 1
            try:
                self._read(thing, holder, depth)
            except Exception:  # a class of the user whose attributes raise, a container that changes meanwhile
                continue
        self._stack.clear()

    def _push(self, thing: Any, holder: Holder, depth: int) -> None:
        kind = type(thing)
        if kind in _ATOMS or depth > _DEEPEST or id(thing) in self._seen:
            return
        if kind in (str, bytes) and len(thing) < _LEAST_LEAF:
            return
        if kind.__module__.startswith("legroom.leak"):
            return
        self._seen.add(id(thing))
        self._stack.append((thing, holder, depth))

    def _read(self, thing: Any, holder: Holder, depth: int) -> None:
        if is_tensor(thing):
            self._tensor_of(thing, holder)
        elif isinstance(thing, dict):
            self._note(holder, "items", len(thing), thing)
            if _has_named_entries(thing):
                for key, value in dict.items(thing):
                    name = f"{holder.name}[{key!r}]"
                    self._push(value, Holder(name, holder.word, holder.file, holder.function, holder.line), depth + 1)
            else:
                self._pieces(dict.values(thing), len(thing), holder, depth)
        elif isinstance(thing, (list, tuple, deque, set, frozenset)):
            limit = thing.maxlen if isinstance(thing, deque) else None
            if not isinstance(thing, (tuple, frozenset)):
                self._note(holder, "items", len(thing), thing, limit)
            self._pieces(thing, len(thing), holder, depth)
        elif isinstance(thing, _CACHED_FUNCTION):
            self._cached(thing, holder, depth)
        elif isinstance(thing, types.FunctionType):
            self._function(thing, holder, depth)
        elif isinstance(thing, types.MethodType):
            self._push(thing.__self__, holder, depth)
            self._push(thing.__func__, holder, depth)
        elif isinstance(thing, (staticmethod, classmethod)):
            self._push(thing.__func__, holder, depth)
        elif isinstance(thing, functools.partial):
            self._pieces(thing.args, len(thing.args), holder, depth)
            self._push(thing.func, holder, depth)
        elif isinstance(thing, type):
            self._class(thing, holder, depth)
        elif isinstance(thing, types.GeneratorType):
            if thing.gi_frame is not None:
                for word, value in local_variables(thing.gi_frame):
                    code = thing.gi_code
                    self._push(value, Holder(word, word, code.co_filename, code.co_name), depth + 1)
        elif (size := leaf_size(thing)) is not None:
            if size >= _LEAST_LEAF:
                self._note(holder, "bytes", size, thing)
        else:
            self._object(thing, holder, depth)

    def _note(self, holder: Holder, unit: str, amount: int, thing: Any, limit: int | None = None) -> None:
        known = self.found.get(holder.key)
        if known is None:
            self.found[holder.key] = Holding(holder, unit, amount, thing, limit)
        elif known.unit == unit:  # one of several with this name: lists in a dict, attributes of objects in a list
            if amount > _length(known.thing, unit):
                known.thing = thing
            known.amount += amount
            known.limit = None if limit is None or known.limit is None else known.limit + limit

    def _tensor_of(self, tensor: Any, holder: Holder) -> None:
        size = leaf_size(tensor)
        if size is not None and size >= _LEAST_LEAF:
            self._note(holder, "bytes", size, tensor)
        if tensor.grad_fn is not None:
            self.graphs.setdefault(holder.key, (holder, tensor))
        self._hooks(tensor, holder, 0)

    def _hooks(self, tensor: Any, holder: Holder, depth: int) -> None:
        """Functions that the user has registered on a tensor or parameter: what they keep is in no other variable."""
        for name in _TENSOR_HOOKS:
            for hook in dict.values(getattr(tensor, name, None) or {}):
                self._push(hook, holder, depth + 1)

    def _pieces(self, things: Iterable[Any], count: int, holder: Holder, depth: int) -> None:
        inside = holder
        if not holder.name.endswith("[…]"):
            inside = Holder(f"{holder.name}[…]", holder.word, holder.file, holder.function, holder.line)
        if count <= _SMALL:
            chosen: Iterable[Any] = list(things)
        else:
            first = list(islice(iter(things), _SAMPLED))
            last = list(islice(reversed(things), _SAMPLED)) if isinstance(things, (list, deque)) else []
            chosen = [one for one in (*first, *last) if not is_tensor(one) and leaf_size(one) is None]
        for one in chosen:
            self._push(one, inside, depth + 1)

    def _object(self, thing: Any, holder: Holder, depth: int) -> None:
        kind = type(thing)
        file = _file_of(kind)
        if file is None or not is_user_file(file):
            file = holder.file
        modules = bool(self._module) and isinstance(thing, self._module)
        for word, value in _attributes(thing):
            if word in _SKIPPED_NAMES:
                continue
            if modules:
                if word == "_parameters":
                    for parameter in dict.values(value):
                        self._hooks(parameter, holder, depth)
                if word in _OF_EVERY_MODULE or (word.endswith("_hooks") and not value):
                    continue
                if word == "_modules":
                    for name, child in _items(value):
                        self._push(child, Holder(f"{holder.name}.{name}", name, file), depth + 1)
                    continue
            if isinstance(thing, (queue.Queue,)) or word in ("_buffer", "queue"):
                # The words of the source are q.put(…), not q.queue.append(…).
                self._push(value, Holder(holder.name, holder.word, holder.file, holder.function), depth + 1)
                continue
            self._push(value, Holder(f"{holder.name}.{word}", word, file), depth + 1)
        if (file is not holder.file or is_user_file(_file_of(kind) or "<")) and kind.__module__ not in (
            "builtins",
            "__main__",
        ):
            self._push(kind, Holder(kind.__name__, kind.__name__, file), depth + 1)

    def _class(self, kind: type, holder: Holder, depth: int) -> None:
        file = _file_of(kind)
        if file is None or not is_user_file(file):
            return
        for word, value in _items(vars(kind)):
            if word not in _SKIPPED_NAMES:
                self._push(value, Holder(f"{kind.__name__}.{word}", word, file), depth + 1)

    def _function(self, thing: types.FunctionType, holder: Holder, depth: int) -> None:
        code = thing.__code__
        if not is_user_file(code.co_filename):
            if thing.__closure__ and depth < 3:  # a decorator of a library around a function of the user
                self._cells(thing, depth)
            return
        self._cells(thing, depth)
        names = code.co_varnames[: code.co_argcount]
        for word, value in zip(reversed(names), reversed(thing.__defaults__ or ()), strict=False):
            self._push(value, Holder(word, word, code.co_filename, code.co_name), depth + 1)
        for word, value in (thing.__kwdefaults__ or {}).items():
            self._push(value, Holder(word, word, code.co_filename, code.co_name), depth + 1)
        for word, value in _items(thing.__dict__):
            self._push(value, Holder(f"{code.co_name}.{word}", word, code.co_filename), depth + 1)

    def _cells(self, thing: types.FunctionType, depth: int) -> None:
        code = thing.__code__
        for word, cell in zip(code.co_freevars, thing.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._push(value, Holder(word, word, code.co_filename, code.co_name), depth + 1)

    def _cached(self, thing: Any, holder: Holder, depth: int) -> None:
        info = thing.cache_info()
        code = getattr(getattr(thing, "__wrapped__", None), "__code__", None)
        file, line = (code.co_filename, code.co_firstlineno) if code is not None else (holder.file, None)
        name = getattr(thing, "__name__", holder.name)
        self._note(Holder(f"{name}.cache", name, file, "", line), "items", info.currsize, thing, info.maxsize)
        self._push(getattr(thing, "__wrapped__", None), holder, depth + 1)


def _has_named_entries(thing: dict[Any, Any]) -> bool:
    """Whether its keys are words, as in ``history["loss"]``: then each entry has a name of its own."""
    return len(thing) <= _MOST_WORDS and all(type(key) is str and key.isidentifier() for key in dict.keys(thing))


def newest_items(thing: Any, count: int = 8) -> list[Any]:
    """The items that were added last, as far as the container knows; oldest of them first."""
    if isinstance(thing, _CACHED_FUNCTION):
        import gc

        inside = [one for one in gc.get_referents(thing) if isinstance(one, dict)]
        thing = max(inside, key=len, default={})
    if isinstance(thing, (list, deque)):
        found = list(islice(reversed(thing), count))
    elif isinstance(thing, dict):
        found = list(islice(reversed(dict.items(thing)), count))
    elif isinstance(thing, set):
        return list(islice(iter(thing), count))
    else:
        return []
    found.reverse()
    return found


def local_variables(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The local variables of a running function of the user; none for the code of a module.

    Up to Python 3.12 reading them leaves copies in a dict of the frame, which would keep tensors alive: it is emptied,
    unless the function may use that dict itself.
    """
    code = frame.f_code
    if not code.co_flags & _LINE_VARIABLES or not is_user_file(code.co_filename):
        return []
    variables = frame.f_locals
    found = list(variables.items())
    if sys.version_info < (3, 13) and not _READS_LOCALS.intersection(code.co_names):
        variables.clear()
    return found


def running_frames(start: types.FrameType | None) -> Iterator[types.FrameType]:
    """All calls that are running: those of this thread from the outermost, then those of other threads."""
    own = []
    frame = start
    while frame is not None:
        own.append(frame)
        frame = frame.f_back
    yield from reversed(own)
    inner = set(map(id, own))
    for top in list(sys._current_frames().values()):
        frame = top
        while frame is not None:
            if id(frame) not in inner:
                yield frame
            frame = frame.f_back


def _items(mapping: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A copy, since other threads may change it."""
    return list(mapping.items())


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    """Attributes in the object itself, without running code of its class."""
    try:
        found = _items(object.__getattribute__(thing, "__dict__"))
    except (AttributeError, TypeError):
        found = []
    for kind in type(thing).__mro__[:-1]:
        slots = kind.__dict__.get("__slots__", ())
        for word in (slots,) if isinstance(slots, str) else slots:
            if word not in _SKIPPED_NAMES:
                try:
                    found.append((word, object.__getattribute__(thing, word)))
                except AttributeError:
                    continue
    return found


def _foreign(value: Any) -> bool:
    """Whether a global variable is a function or class of another module, which is read there."""
    if isinstance(value, _CACHED_FUNCTION):
        value = getattr(value, "__wrapped__", None)
    if isinstance(value, types.FunctionType):
        return not is_user_file(value.__code__.co_filename)
    if isinstance(value, type):
        file = _file_of(value)
        return file is None or not is_user_file(file)
    return isinstance(value, types.ModuleType)


@functools.cache
def _file_of_module(name: str) -> str | None:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else ("<stdin>" if name == "__main__" else None)


def _file_of(kind: type) -> str | None:
    return _file_of_module(kind.__module__) if isinstance(kind.__module__, str) else None


def _length(thing: Any, unit: str) -> int:
    try:
        return len(thing) if unit == "items" else leaf_size(thing) or 0
    except TypeError:
        return 0
