"""Check arguments of public functions and of the command line; what is out of range raises UsageError.

A public function begins with ``check_arguments(function, locals())``, which compares each argument with its annotation:
a value of another type would fail somewhere inside, with an error of Python's that does not name the argument.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from math import inf
from operator import index
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, cast, get_args, get_origin

from legroom.errors import UsageError
from legroom.messages import listed, phrase, say

WORD = 1 << 64  # a word of the random generators' keys
_SHOWN = 100  # characters of a value's repr


def check_integer(name: str, value: object, least: int) -> int:
    """The value as an int; numpy's integers are integers too, True and 2.0 are not."""
    try:
        number = None if isinstance(value, bool) else index(cast(Any, value))
    except TypeError:
        number = None
    if number is None or number < least:
        raise UsageError(
            say("{name} must be an integer >= {least} (got {value!r})", name=name, least=least, value=value),
            fix=(say("pass {name}={least} or more", name=name, least=least),),
        )
    if number >= WORD:
        raise UsageError(
            say("{name} must be less than 2**64 (got {value!r})", name=name, value=value),
            fix=(say("pass a number between {least} and 2**64 - 1", least=least),),
        )
    return number


def check_seconds(name: str, value: float) -> float:
    """The value, if it is finite and not negative."""
    if not (_is_number(value) and 0 <= value < inf):
        raise UsageError(
            say("{name} must be a number of seconds >= 0 (got {value!r})", name=name, value=value),
            fix=(say("pass {name}={least} or more", name=name, least=0),),
        )
    return value


def refuse_unwritable(path: str | os.PathLike[str], *files: str | os.PathLike[str]) -> None:
    """Refuse a path whose files are directories, or whose directory does not exist or is not writable."""
    folder = os.path.dirname(os.path.abspath(files[0]))
    if any(map(os.path.isdir, files)):
        why = say("it is a directory")
    elif not os.path.isdir(folder):
        why = say("the directory {folder} does not exist", folder=folder)
    elif not os.access(folder, os.W_OK):
        why = say("you have no permission to write to the directory {folder}", folder=folder)
    else:
        return
    fix = say("choose a file in an existing directory that you can write to")
    raise UsageError(say("cannot write {path}", path=path), why=why, fix=(fix,))


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Whether the value is one of the choices."""
    if not isinstance(value, str) or value not in choices:  # a list cannot be looked up in a dict
        raise UsageError(
            say("{name} must be one of {choices} (got {value!r})", name=name, choices=listed(choices), value=value),
            fix=(f"{name}={next(iter(choices))!r}",),
        )


def check_path(name: str, value: object) -> None:
    """Refuse an empty path: it would mean the working directory, as where a variable of the environment is not set."""
    if isinstance(value, (str, bytes)) and not value:
        raise UsageError(
            say("{name} is empty", name=name),
            why=say("an empty path would mean the working directory, {cwd}", cwd=os.getcwd()),
            fix=(say("check the variable that it comes from"), say("pass '.' for the working directory")),
        )


# By annotation.


class _Kind(NamedTuple):
    """One of the types that an annotation names."""

    words: str  # a template
    accepts: Callable[[object], bool]
    name: str = ""  # its field


def check_arguments(function: Any, given: Mapping[str, object], besides: Collection[str] = ()) -> None:
    """Refuse the first argument that is of none of the types of its annotation.

    Arguments that are annotated with Any, and those ``besides``, have checks of their own.
    """
    for name, kinds in _annotated(function):
        if name in besides:
            continue
        value = given[name]
        for kind in kinds:
            if kind.accepts(value):
                break
        else:
            raise _wrong_type(function, name, kinds, value)
        if not value and _KINDS["PathLike"] in kinds:
            check_path(name, value)


def _wrong_type(function: Any, name: str, kinds: tuple[_Kind, ...], value: object) -> UsageError:
    path = _KINDS["PathLike"] in kinds  # a text is one
    words = [say(kind.words, name=kind.name) for kind in kinds if not (path and kind is _KINDS["str"])]
    words = [*dict.fromkeys(words)]
    wanted = say(" or ").join([listed(words[:-1]), words[-1]] if words[1:] else words)
    shown = repr(value)
    if len(shown) > _SHOWN:
        shown = shown[:_SHOWN] + "…"
    defaults = _defaults(function)
    return UsageError(
        say("{name} must be {wanted} (got {value})", name=name, wanted=wanted, value=shown),
        why=say("a value of type {kind} cannot be used for it", kind=type(value).__name__),
        fix=(
            say("pass {wanted}, or omit {name} (default: {default!r})", wanted=words[0], name=name,
                default=defaults[name])
            if name in defaults
            else say("pass {wanted}", wanted=wanted),
        ),
    )  # fmt: skip


def _defaults(function: Any) -> dict[str, object]:
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    return dict(zip(names[len(names) - len(values) :], values, strict=True)) | (function.__kwdefaults__ or {})


@cache
def _annotated(function: Any) -> tuple[tuple[str, tuple[_Kind, ...]], ...]:
    """The arguments whose types are known, with them."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    every = {name: function.__annotations__[name] for name in names if name in function.__annotations__}
    found = {name: tuple(_kinds(annotation, function.__globals__)) for name, annotation in every.items()}
    return tuple((name, kinds) for name, kinds in found.items() if _ANYTHING not in kinds)


def _kinds(annotation: Any, names: Mapping[str, Any]) -> Iterator[_Kind]:
    """The types of an annotation: a text, where the module postpones them, or the type that it names."""
    if isinstance(annotation, str):
        for part in _parts(annotation):
            head = part.partition("[")[0].rpartition(".")[2]
            if head == "Literal":
                yield _choice(re.findall(r"[\"'](.*?)[\"']", part))
            elif head in _KINDS:
                yield _KINDS[head]
            else:
                yield from _kinds(names.get(part, Any), names)
    elif get_origin(annotation) in (UnionType, Union):
        for one in get_args(annotation):
            yield from _kinds(one, names)
    elif get_origin(annotation) is Literal:
        yield _choice(get_args(annotation))
    else:
        kind = get_origin(annotation) or annotation
        name = "None" if kind is type(None) else getattr(kind, "__name__", "")
        if name in _KINDS:
            yield _KINDS[name]
        elif isinstance(kind, type):
            yield _Kind(_OBJECT, lambda value: isinstance(value, kind), name)
        else:
            yield _ANYTHING


def _parts(annotation: str) -> Iterator[str]:
    """``Callable[[int | str], None] | None``: ``Callable[[int | str], None]`` and ``None``."""
    depth = start = 0
    for at, letter in enumerate(annotation):
        depth += (letter == "[") - (letter == "]")
        if letter == "|" and not depth:
            yield annotation[start:at].strip()
            start = at + 1
    yield annotation[start:].strip()


def _choice(values: Iterable[str]) -> _Kind:
    choices = tuple(values)
    one = len(choices) == 1
    words, name = ("{name}", repr(choices[0])) if one else (_ONE_OF, ", ".join(choices))
    return _Kind(words, lambda value: isinstance(value, str) and value in choices, name)


def _is_integer(value: object) -> bool:
    try:
        return not isinstance(value, bool) and index(cast(Any, value)) is not None
    except TypeError:
        return False


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and (hasattr(type(value), "__float__") or hasattr(type(value), "__index__"))


def _is_flag(value: object) -> bool:
    """True and False, numpy's too, and 1 and 0."""
    return type(value).__name__ in ("bool", "bool_") or (type(value) is int and value in (0, 1))


_ANYTHING = _Kind("", lambda value: True)
_OBJECT, _ONE_OF = phrase("an object of type {name}"), phrase("one of {name}")
_LIST = _Kind(phrase("a list"), lambda value: isinstance(value, Iterable) and not isinstance(value, (str, bytes)))
_KINDS = {
    "None": _Kind("None", lambda value: value is None),
    "bool": _Kind(phrase("True or False"), _is_flag),
    "int": _Kind(phrase("an integer"), _is_integer),
    "float": _Kind(phrase("a number"), _is_number),
    "str": _Kind(phrase("a string"), lambda value: isinstance(value, str)),
    "bytes": _Kind("bytes", lambda value: isinstance(value, bytes)),
    "PathLike": _Kind(phrase("a path (str or os.PathLike)"), lambda value: isinstance(value, os.PathLike)),
    "Callable": _Kind(phrase("a function"), callable),
    "Mapping": _Kind(phrase("a dict"), lambda value: isinstance(value, Mapping)),
    "Iterable": _LIST,
    "Sequence": _LIST,
    "tuple": _LIST,
    "Any": _ANYTHING,
}


_GIVEN_SHOWN = 80  # characters


def not_a_path(given: object) -> UsageError:
    """The error for what is given in place of a path."""
    fix = say("pass a path, a glob pattern or a list of paths")
    if hasattr(given, "read"):
        name = getattr(given, "name", None)
        if isinstance(name, (str, os.PathLike)):
            fix = say("pass its path: legroom.open({path!r})", path=os.fspath(name))
        else:
            fix = say("write its content to a file and pass the path")
    elif steps := _steps_to_a_path(given):
        fix = steps
    shown, kind = " ".join(repr(given).split()), type(given)
    home = "" if kind.__module__ in ("builtins", "__main__") else kind.__module__.partition(".")[0] + "."
    return UsageError(
        say("{given} is not a path", given=shown if len(shown) <= _GIVEN_SHOWN else shown[:_GIVEN_SHOWN] + "…"),
        why=say("a path must be str, bytes or os.PathLike, not {kind}", kind=home + kind.__name__),
        fix=(fix,),
    )


def _steps_to_a_path(given: object) -> str:
    """How data in memory get to where they can be opened, or shared without a file; empty: unknown."""
    if hasattr(given, "save_to_disk"):
        return say("save it and pass the directory:\n{code}", code="given.save_to_disk('data'); legroom.open('data')")
    save = (
        "given.to_parquet('data.parquet'); legroom.open('data.parquet')"
        if hasattr(given, "to_parquet")
        else "numpy.save('data.npy', given); legroom.open('data.npy')"
        if hasattr(given, "__array__")
        else ""
    )
    if save:
        return say("write it to a file and pass the path:\n{code}", code=save)
    if isinstance(given, Mapping):
        code = "legroom.freeze(given)"
    elif hasattr(given, "__len__") and hasattr(given, "__getitem__"):
        code = "legroom.freeze([given[i] for i in range(len(given))])"
    else:
        return ""
    return say("for one copy of it that processes share, without a file:\n{code}", code=code)
