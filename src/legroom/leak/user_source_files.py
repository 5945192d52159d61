"""Which source files are the user's own, and which line of them is running or made an object."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from types import FrameType
from typing import NamedTuple

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class CodeLine(NamedTuple):
    """A line of source code."""

    file: str
    number: int


@cache
def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {path for name in names if (path := sysconfig.get_paths().get(name))}
    return tuple(folder + os.sep for folder in found | {os.path.realpath(path) for path in found})


@cache
def is_user_file(file: str) -> bool:
    """Whether a source file is neither Python's, nor an installed package's, nor Legroom's. A notebook's cells are."""
    if file.startswith("<"):
        return file.startswith(("<ipython-input", "<stdin>", "<string>"))
    if "ipykernel_" in file:
        return True
    for path in (file, os.path.realpath(file)):  # the second takes longer, and most are found by the first
        if path.startswith((_HERE, *_library_folders())):
            return False
        if f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path:
            return False
    return True


def user_line(frame: FrameType | None) -> CodeLine | None:
    """The innermost line of the user's code in that call stack; None if there is none."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return CodeLine(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def nearest_user_line(frames: Iterable[tuple[str, int]]) -> CodeLine | None:
    """Of a traceback, innermost frame first, the first line of the user's code; if there is none, the innermost."""
    innermost = None
    for file, number in frames:
        if innermost is None and not file.startswith("<frozen"):
            innermost = CodeLine(file, number)
        if is_user_file(file):
            return CodeLine(file, number)
    return innermost


def user_lines(frames: Iterable[tuple[str, int]]) -> tuple[CodeLine, ...]:
    """All lines of the user's code in a traceback, in its order."""
    return tuple(CodeLine(file, number) for file, number in frames if is_user_file(file))


_user_modules: tuple[int, list[str]] = (0, [])  # number of modules, and names of the user's among them


def user_modules() -> list[tuple[str, dict[str, object]]]:
    """Names and global variables of the user's modules, ``__main__`` first."""
    global _user_modules
    if len(sys.modules) != _user_modules[0]:
        names = [name for name, module in list(sys.modules.items()) if _is_users(name, module)]
        _user_modules = len(sys.modules), sorted(names, key=lambda name: name != "__main__")
    found = [(name, sys.modules.get(name)) for name in _user_modules[1]]
    return [(name, vars(module)) for name, module in found if module is not None]


def _is_users(name: str, module: object) -> bool:
    if name == "__main__":
        return True
    if name == "__mp_main__" and sys.modules.get("__main__") is module:  # in a spawned process
        return False
    try:
        file = vars(module).get("__file__")
    except TypeError:  # not a module
        return False
    return isinstance(file, str) and os.path.isabs(file) and is_user_file(file)
