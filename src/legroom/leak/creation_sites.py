"""Which line made what is still alive: tracemalloc, switched on for a few steps at a time.

A window counts the live blocks of each line in the middle and at the end. A line whose blocks stay alive has more of
them at the end; what is freed in every step has as many as before. tracemalloc of the script itself is left alone: no
window is opened while it traces, and one that it starts ends ours.
"""

from __future__ import annotations

import _tracemalloc
import ctypes
import functools
import gc
import sys
import tracemalloc
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from legroom.leak.containers_held_by_variables import newest_items
from legroom.leak.object_size import ObjectSize, is_tensor, pool_of, size_of
from legroom.leak.user_source_files import CodeLine, nearest_user_line, user_lines

_FRAMES = 12
_MOST_SITES = 24
_MOST_OBJECTS, _FEWEST_OBJECTS = 8000, 32  # read for the size of a container's items: of all, and of each
_MOST_ITEMS_READ, _MOST_ITEMS_TRACED, _MOST_ITEMS_OF_WINDOW = 4096, 256, 1024  # of a container, and of all
_UNORDERED = 32  # items of a container of which it is not known which ones a window has added
_MOST_ORIGINS, _MOST_THROUGH = 6, 6  # lines noted of each container in a window, and of the calls around each
_GOLDEN = 0.6180339887
_SMALL = 8  # items of a part that is read piece by piece
_BEFORE_OBJECT = (
    32,
    16,
    24,
)  # bytes between an allocation and its object: garbage collection, __dict__, weak references
_OURS = __file__.rpartition("/")[0]


@dataclass
class Tracing:
    """Windows of tracemalloc beside a script that may use it too."""

    open: bool = False
    scripts_own: bool = False  # the script has started tracemalloc
    aborted: bool = False  # the script started or stopped it in our window
    _middle: dict[Any, tuple[int, int]] = field(default_factory=dict)
    _originals: dict[str, Any] = field(default_factory=dict)

    def install(self) -> None:
        """Notice when the script starts and stops tracemalloc itself."""
        self.scripts_own = tracemalloc.is_tracing()
        self._originals = {name: getattr(tracemalloc, name) for name in ("start", "stop", "is_tracing")}

        def start(nframe: int = 1) -> None:
            self._leave()
            self.scripts_own = True
            self._originals["start"](nframe)

        def stop() -> None:
            self._leave()
            self.scripts_own = False
            self._originals["stop"]()

        def is_tracing() -> bool:
            return False if self.open else bool(self._originals["is_tracing"]())

        for function in (start, stop, is_tracing):
            setattr(tracemalloc, function.__name__, function)

    def remove(self) -> None:
        """End a window, and give the script its functions back."""
        self._leave()
        for name, original in self._originals.items():
            setattr(tracemalloc, name, original)
        self._originals.clear()

    def begin(self) -> bool:
        """Open a window, unless the script uses tracemalloc."""
        if self.scripts_own or _tracemalloc.is_tracing():
            return False
        _tracemalloc.start(_FRAMES)
        self.open, self.aborted, self._middle = True, False, {}
        return True

    def middle(self) -> None:
        """Count what is alive now."""
        if self.open:
            self._middle = _live()

    def end(self) -> list[tuple[str, int, int, int, int, int]]:
        """What lines made that is alive, of those that have more alive than in the middle; call `close` after it.

        File, line, blocks and bytes, and how many of both came after the middle; the most bytes of those first.
        """
        if not self.open:
            return []
        sites: dict[CodeLine, tuple[int, int, int, int]] = {}
        for traceback, (size, count) in _live().items():
            frames = [(frame.filename, frame.lineno) for frame in reversed(traceback)]
            if any(file.startswith(_OURS) for file, _ in frames):
                continue  # made by the recording itself
            line = nearest_user_line(frames)
            if line is None:
                continue
            before_size, before_count = self._middle.get(traceback, (0, 0))
            blocks, held, later_blocks, later = sites.get(line, (0, 0, 0, 0))
            later_blocks, later = later_blocks + count - before_count, later + size - before_size
            sites[line] = blocks + count, held + size, later_blocks, later
        found = [(*line, *numbers) for line, numbers in sites.items() if numbers[2] > 0 and numbers[3] > 0]
        return sorted(found, key=lambda row: -row[-1])[:_MOST_SITES]

    def close(self) -> None:
        """Stop tracing."""
        if self.open:
            self.open = False
            self._middle = {}
            _tracemalloc.stop()

    def _leave(self) -> None:
        if self.open:
            self.aborted = True
            self.close()


class Origin(NamedTuple):
    """Which line made an object, and the user's lines in the calls around it, innermost first."""

    line: CodeLine
    through: tuple[CodeLine, ...]


def origin(thing: object) -> Origin | None:
    """Which line made an object, while tracemalloc traces; None if it had been made before."""
    found = _traceback_of(thing) if _tracemalloc.is_tracing() else None
    if found is None:
        return None
    line = nearest_user_line(found)
    return None if line is None else Origin(line, tuple(one for one in user_lines(found) if one != line))


def bytes_by_origin(items: Sequence[Any], *, pairs: bool) -> tuple[dict[Origin, ObjectSize], ObjectSize]:
    """Bytes of these items of a container by the line that made them, and of those for which none is known.

    ``pairs``: they are keys and values of a dict. What several share counts for the first.
    """
    found: dict[Origin, ObjectSize] = {}
    unknown, seen = ObjectSize(), set[int]()
    most = max(_FEWEST_OBJECTS, _MOST_OBJECTS // max(1, len(items)))
    for whole in (part for item in items for part in (reversed(item) if pairs else (item,))):
        around = origin(whole)
        for part in _parts(whole):
            at = origin(part)
            if at is None or part is whole:
                at = around
            elif around is not None:  # a tuple is made where it is added
                at = at._replace(through=(*at.through, around.line, *around.through))
            size = size_of([part], most_objects=most, seen=seen)
            (unknown if at is None else found.setdefault(at, ObjectSize())).include(size)
    return found, unknown


def creations(items: Sequence[Any], *, pairs: bool) -> list[tuple[object, ...]]:
    """The same as rows of a record: lines that made the most, and a row without a file. Empty if none is known."""
    found, unknown = bytes_by_origin(items, pairs=pairs)
    by_size = sorted(found.items(), key=lambda one: -sum(one[1].pools.values()))
    by_graphs = sorted(by_size, key=lambda one: -one[1].graphs)
    kept = dict((*by_size[:_MOST_ORIGINS], *by_graphs[:_MOST_ORIGINS]))
    rows = [(*at.line, made.pools, made.graphs, made.tensors, at.through[:_MOST_THROUGH]) for at, made in kept.items()]
    return [*rows, ("", 0, unknown.pools, unknown.graphs, unknown.tensors, ())] if rows else []


def creations_in_window(
    holders: Mapping[int, Any], sizes: Mapping[int, int]
) -> Iterator[tuple[int, list[tuple[object, ...]]]]:
    """By container: which lines made what was added; empty if all of that had been made before the window.

    ``sizes``: of those that keep an order, when the window began. One of whose items nothing is known is left out.
    """
    left = _MOST_ITEMS_OF_WINDOW
    for number, thing in holders.items():
        before = sizes.get(number)
        added = _UNORDERED if before is None else max(2, len(thing) - before)
        items = some_of(newest_items(thing, min(added, _MOST_ITEMS_READ)), max(2, min(left, _MOST_ITEMS_TRACED)))
        left -= len(items)
        made = creations(items, pairs=not isinstance(thing, (list, deque, set))) if items else []
        if made or (items and before is not None and len(thing) >= before + min(2, len(items))):
            yield number, made


def some_of(items: list[Any], most: int) -> list[Any]:
    """At most so many of them, spread so that no period of the items is met again and again."""
    if len(items) <= most:
        return items
    return [items[at] for at in sorted({int(number * _GOLDEN % 1 * len(items)) for number in range(most)})]


def _parts(thing: Any) -> Sequence[object]:
    if isinstance(thing, (tuple, list)) and 0 < len(thing) <= _SMALL:
        return thing
    if isinstance(thing, dict) and 0 < len(thing) <= _SMALL:
        return list(dict.values(thing))
    return (thing,)


def _traceback_of(thing: object) -> Any:
    """Frames of the allocation, innermost first. tracemalloc of Python 3.11 does not find objects with a __dict__."""
    found = _tracemalloc._get_object_traceback(thing)
    look_up = _address_look_up()
    if found is None and look_up is not None:
        for before in _BEFORE_OBJECT:
            found = look_up(0, id(thing) - before)
            if found is not None:
                break
    return found


@functools.cache
def _address_look_up() -> Any:
    """CPython's function from an address to its traceback; None where it is not exported."""
    try:
        function = ctypes.pythonapi._PyTraceMalloc_GetTraceback
    except AttributeError:
        return None
    function.argtypes, function.restype = (ctypes.c_uint, ctypes.c_size_t), ctypes.py_object
    return function


def live_tensors() -> dict[CodeLine, tuple[int, dict[str, int]]]:
    """Tensors that were made in this window and are alive, by line: how many, and bytes by pool.

    Reads every object that Python's garbage collector knows: only for growth that nothing else explains.
    """
    found: dict[CodeLine, tuple[int, dict[str, int]]] = {}
    if "torch" not in sys.modules:
        return found
    seen: set[int] = set()
    for thing in gc.get_objects():
        if not is_tensor(thing):
            continue
        made = origin(thing)
        if made is None:
            continue
        line = made.line
        try:
            storage = thing.untyped_storage()
            address, size, pool = storage.data_ptr(), int(storage.nbytes()), pool_of(thing)
        except Exception:  # a tensor without storage
            continue
        count, pools = found.setdefault(line, (0, {}))
        if address not in seen:
            seen.add(address)
            pools[pool] = pools.get(pool, 0) + size
        found[line] = count + 1, pools
    return found


def _live() -> dict[Any, tuple[int, int]]:
    snapshot = tracemalloc.Snapshot(
        _tracemalloc._get_traces(), _tracemalloc.get_traceback_limit()
    )  # tracemalloc.take_snapshot would ask the script's view of is_tracing
    return {one.traceback: (one.size, one.count) for one in snapshot.statistics("traceback")}
