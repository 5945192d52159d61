"""Which lines of the source fill a holder, and how much each adds: ``history.append(x)``, ``cache[key] = x``. Pure.

The source is parsed, not run. A name can be filled in several lines; all of them are returned. A window of tracemalloc
saw which lines made the newest items; the source tells which line adds what such a line makes.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from legroom.leak.record_files import CreatedItems, HolderRecord
from legroom.leak.user_source_files import is_user_file
from legroom.records.memory_growth import SourceLine

# Methods that add to a container or a queue; others may too, but then the object's own class is searched as well.
_ADDING = frozenset({
    "append", "appendleft", "add", "extend", "extendleft", "insert", "update", "setdefault", "put", "put_nowait",
    "push", "write", "writelines", "send", "record", "log", "store", "register", "submit",
})  # fmt: skip


_MOST_NAMES_OF_A_VALUE = 4  # that are followed from where it was made to where it is added


@dataclass(frozen=True, slots=True)
class FillLine:
    """A line that fills a name."""

    word: str  # the identifier that is filled
    line: int
    function: str  # the function around it; empty at the level of the module
    itself: bool  # the new value is made from the old one: total += loss
    attribute: bool  # self.history rather than history
    last: int = 0  # the last line of the statement
    uses: frozenset[str] = frozenset()  # identifiers in what is added
    entry: str | None = None  # log["loss"].append(x) fills this entry


@lru_cache(maxsize=2)  # a tree takes a hundred times the memory of its source, and what is read from it is kept
def _nodes(source: str) -> tuple[tuple[ast.AST, str], ...]:
    """Every node of a source, with the function around it; empty if it cannot be parsed."""
    try:
        return tuple(_nodes_in(ast.parse(source), ""))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _nodes_in(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        yield child, function
        yield from _nodes_in(child, _inside(child, function))


@lru_cache(maxsize=64)
def fill_lines(source: str) -> tuple[FillLine, ...]:
    """Every line of a source that fills something; empty if it cannot be parsed."""
    return tuple(
        replace(one, last=getattr(node, "end_lineno", None) or one.line, uses=_added_words(node))
        for node, function in _nodes(source)
        for one in _of_statement(node, function)
    )


def lines_for(
    source: str, word: str, function: str = "", *, itself: bool = False, entry: str | None = None
) -> list[int]:
    """The lines that fill ``word``; those in the named function first, if there are any there.

    ``itself``: only lines whose new value is made from the old one, which is how sums and hidden states grow.
    ``entry``: without lines that fill another entry, ``log["loss"]`` where ``log["text"]`` is meant.
    """
    found = [one for one in fill_lines(source) if one.word == word and (one.itself or not itself)]
    if entry is not None:
        found = [one for one in found if one.entry in (None, entry)] or found
    if not itself:
        found = _through_aliases(source, word, found)
    inside = [one for one in found if function and one.function.split(".")[-1] == function]
    return sorted({one.line for one in inside or found})


def line_that_added(source: str, lines: Sequence[int], frames: Sequence[int]) -> int | None:
    """Which of these lines, which all fill the same container, added an object; None if that cannot be told.

    ``frames``: the lines of this source in the calls that made it, innermost first. It was made in the statement that
    adds it, or the names that it had lead there: ``x = make()``, ``log.keep(x)``, and ``self.rows.append(value)``.
    """
    filling = [one for one in fill_lines(source) if one.line in lines]
    for number in frames:
        here = {one.line for one in filling if one.line <= number <= one.last}
        if here or number in lines:
            return max(here or {number})
    for number in frames:
        begins = [one for one in _flows(source) if one.line <= number <= one.last]
        for one in sorted(begins, key=lambda one: one.last - one.line):
            if (found := _line_behind(source, one, filling)) is not None:
                return found
    return None


def _line_behind(source: str, begin: _Flow, filling: Sequence[FillLine]) -> int | None:
    names = {(begin.inside, word) for word in begin.words}
    for _ in range(_MOST_NAMES_OF_A_VALUE):
        adding = {fill.line for fill in filling if any((fill.function, word) in names for word in fill.uses)}
        if adding:
            return adding.pop() if len(adding) == 1 else None
        names = {
            (one.inside, word)
            for one in _flows(source)
            if any((one.function, used) in names for used in one.uses)
            for word in one.words
        }
    return None


@dataclass(frozen=True, slots=True)
class _Flow:
    """A statement that gives a value a name: an assignment, the head of a ``for``, a call with its parameters."""

    words: frozenset[str]  # the names
    inside: str  # the function in which they are names
    uses: frozenset[str]  # identifiers in the value
    function: str  # the function around the statement
    line: int
    last: int


@lru_cache(maxsize=64)
def _flows(source: str) -> tuple[_Flow, ...]:
    parameters: dict[str, list[tuple[str, frozenset[str]]]] = {}
    for node, function in _nodes(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            words = frozenset(one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))
            parameters.setdefault(node.name, []).append((_inside(node, function), words - {"self", "cls"}))
    return tuple(_flows_of(_nodes(source), parameters))


def _flows_of(
    nodes: Sequence[tuple[ast.AST, str]], parameters: Mapping[str, Sequence[tuple[str, frozenset[str]]]]
) -> Iterator[_Flow]:
    for child, function in nodes:
        targets: Sequence[ast.expr] = ()
        value: ast.expr | None = None
        last: int = getattr(child, "end_lineno", None) or 0
        if isinstance(child, ast.Assign):
            targets, value = child.targets, child.value
        elif isinstance(child, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            targets, value = [child.target], child.value
        elif isinstance(child, (ast.For, ast.AsyncFor)):
            targets, value, last = [child.target], child.iter, child.iter.end_lineno or child.lineno
        elif isinstance(child, ast.Call):
            for inside, words in parameters.get(_last_word(child.func) or "", ()):
                yield _Flow(words, inside, _added_words(child), function, child.lineno, last)
        words = frozenset(one.id for one in _flat(targets) if isinstance(one, ast.Name))
        if words and value is not None:
            yield _Flow(words, function, frozenset(_words(value)), function, value.lineno, last)


def _inside(node: ast.AST, function: str) -> str:
    """The function around what is in that node."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return function
    return f"{function}.{node.name}" if function else node.name


def _through_aliases(source: str, word: str, found: list[FillLine]) -> list[FillLine]:
    """Also lines that fill a part under a name of its own: ``part = history.setdefault(key, [])``, ``part.append(x)``.

    The line that only gives the part its name is then not one that fills.
    """
    named = {(one.function, one.word): one.line for one in _aliases(source) if one.part_of == word}
    filled = [
        one for one in fill_lines(source)
        if (one.function, one.word) in named and not one.itself and not one.attribute
    ]  # fmt: skip
    only_named = {named[one.function, one.word] for one in filled}
    return [one for one in found if one.line not in only_named] + filled


@dataclass(frozen=True, slots=True)
class _Alias:
    """A line that gives a container, or a part of it, another name."""

    word: str
    part_of: str
    line: int
    function: str


@lru_cache(maxsize=64)
def _aliases(source: str) -> tuple[_Alias, ...]:
    found = []
    for node, function in _nodes(source):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        whole = _part_of(node.value) if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and whole is not None:
            found.append(_Alias(target.id, whole, target.lineno, function))
    return tuple(found)


def _part_of(value: ast.expr) -> str | None:
    """The container of which this is a part, or which it is: history of ``self.history[key]``."""
    while True:
        if isinstance(value, ast.Subscript):
            value = value.value
        elif isinstance(value, ast.Call):
            if not isinstance(value.func, ast.Attribute) or value.func.attr not in ("setdefault", "get"):
                return None
            value = value.func.value
        else:
            return _last_word(value)


# Functions that only read what they are given.
_READING = frozenset({
    "len", "print", "sum", "min", "max", "any", "all", "iter", "enumerate", "zip", "sorted", "list", "tuple", "set",
    "str", "repr", "isinstance", "type", "id", "range", "reversed", "map", "filter", "mean", "stack", "cat",
    "concatenate", "array", "tensor", "save", "dump", "dumps", "info", "debug", "format", "join",
})  # fmt: skip


def passing_lines(source: str, word: str) -> list[int]:
    """Lines that pass ``word`` to another function, which may fill it under another name."""
    found = set()
    for node, _ in _nodes(source):
        if isinstance(node, ast.Call) and any(_last_word(part) == word for part in node.args):
            name = _last_word(node.func)
            if name is not None and name not in _READING:
                found.add(node.lineno)
    return sorted(found)


def _last_word(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _added_words(node: ast.AST) -> frozenset[str]:
    """Identifiers in what a statement adds."""
    if isinstance(node, ast.Call):
        parts: list[ast.AST] = [*node.args, *node.keywords]
    else:
        value = getattr(node, "value", None)
        parts = [] if value is None else [value]
    return frozenset(word for part in parts for word in _words(part))


def _of_statement(node: ast.AST, function: str) -> Iterator[FillLine]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING:
        entry = _text(node.args[0]) if node.func.attr == "setdefault" and node.args else None
        for one in _filled(node.func.value, node.lineno, function, itself=False):
            yield replace(one, entry=entry) if entry is not None else one
    elif isinstance(node, ast.AugAssign):
        yield from _filled(node.target, node.lineno, function, itself=True)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        used = set(_words(node.value))
        for target in _flat(targets):
            for one in _filled(target, node.lineno, function, itself=False):
                again = one.word in used
                if again or isinstance(target, ast.Subscript):
                    yield replace(one, itself=again)


def _flat(targets: Sequence[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            yield from _flat(target.elts)
        elif isinstance(target, ast.Starred):
            yield from _flat([target.value])
        else:
            yield target


def _filled(target: ast.expr, line: int, function: str, *, itself: bool) -> Iterator[FillLine]:
    """The identifier that is filled: history in ``history[k].append`` and in ``self.history.append``."""
    entry: str | None = None
    while isinstance(target, (ast.Subscript, ast.Call)):
        key = target.slice if isinstance(target, ast.Subscript) else None
        arguments = target.args if isinstance(target, ast.Call) else []
        target = target.value if isinstance(target, ast.Subscript) else target.func
        if isinstance(target, ast.Attribute) and target.attr in ("setdefault", "get"):
            target, key = target.value, arguments[0] if arguments else key
        entry = entry or _text(key)
    if isinstance(target, ast.Name):
        yield FillLine(target.id, line, function, itself, attribute=False, entry=entry)
    elif isinstance(target, ast.Attribute):
        yield FillLine(target.attr, line, function, itself, attribute=True, entry=entry)


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _words(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


_ENTRY = re.compile(r"\['(\w+)'\](?:\[…\])?$")  # of log['loss']


def lines_of(holder: HolderRecord) -> tuple[SourceLine, ...]:
    """Where the source fills the holder."""
    if holder.line is not None:
        return (SourceLine(holder.file, holder.line),)
    itself = holder.unit in ("nodes", "bytes")
    source = "".join(linecache.getlines(holder.file))
    entry = _ENTRY.search(holder.name)
    key = None if entry is None else entry[1]
    found = lines_for(source, holder.word, holder.function, itself=itself, entry=key)
    if not found and itself:
        found = lines_for(source, holder.word, holder.function, entry=key)
    if not found:
        found = passing_lines(source, holder.word)
    return tuple(SourceLine(holder.file, number) for number in found)


def shares_of_lines(
    holder: HolderRecord, lines: Sequence[SourceLine], pool: str, *, graph: bool
) -> dict[SourceLine, float]:
    """How much of the newest items' bytes, or of their graphs, each line adds, as far as it was seen."""

    def amount(items: CreatedItems) -> int:
        return items.graphs if graph else items.pools.get(pool, 0)

    total = sum(amount(items) for items in (*holder.created, *holder.unknown))
    shares: dict[SourceLine, float] = {}
    for items in holder.created:
        line = _line_that_added(holder, items, lines)
        if line is not None and total > 0 and amount(items):
            shares[line] = shares.get(line, 0.0) + amount(items) / total
    return shares


def _line_that_added(holder: HolderRecord, items: CreatedItems, lines: Sequence[SourceLine]) -> SourceLine | None:
    frames = [number for file, number in ((items.file, items.line), *items.through) if file == holder.file]
    source = "".join(linecache.getlines(holder.file))
    number = line_that_added(source, [one.line for one in lines], frames)
    return None if number is None else SourceLine(holder.file, number)


def items_made(
    holder: HolderRecord, pool: str, lines: Sequence[SourceLine], *, graph: bool, line: SourceLine | None
) -> list[CreatedItems]:
    """What was seen to be made of its items, the largest first; only what that line added, where one is given."""
    made = [one for one in holder.created if line is None or _line_that_added(holder, one, lines) == line]
    users = [one for one in made if is_user_file(one.file)] or made
    amounts: dict[tuple[str, int], tuple[int, int, int]] = {}
    for one in users:
        bytes_before, graphs, count = amounts.get((one.file, one.line), (0, 0, 0))
        amounts[one.file, one.line] = bytes_before + one.pools.get(pool, 0), graphs + one.graphs, count + 1

    def rank(one: CreatedItems) -> tuple[int, int, int, int]:
        size, graphs, count = amounts[one.file, one.line]
        return -graphs if graph else 0, -size, -count, one.line

    return sorted(users, key=rank)
