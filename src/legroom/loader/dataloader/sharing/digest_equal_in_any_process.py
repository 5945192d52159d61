"""Digests of samples, batches and functions that are equal in different processes, part by part.

pickle would not do: its bytes depend on which strings happen to be one object.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_DEPTH = 12


def leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """(path, digest) of every part of a value: ``["image"]``, ``[1][0]``."""
    import torch

    if depth > _DEPTH:
        yield path, _of(repr(type(value)).encode())
    elif isinstance(value, torch.Tensor):
        yield path, _tensor(value)
    elif isinstance(value, np.ndarray):
        yield path, _array(value)
    elif isinstance(value, Mapping):
        yield path, _of(repr((type(value).__qualname__, list(map(repr, value)))).encode())
        for key, one in value.items():
            yield from leaves(one, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        yield path, _of(f"{type(value).__qualname__} {len(value)}".encode())
        for number, one in enumerate(value):
            yield from leaves(one, f"{path}[{number}]", depth + 1)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield path, _of(f"{type(value).__qualname__} {value!r}".encode())
    else:
        yield path, _other(value, depth)


def digest(value: Any) -> str:
    """One digest of a whole value."""
    return _of(repr(list(leaves(value))).encode())


def differing(one: Any, other: Any) -> list[str]:
    """The paths of the parts in which two values differ."""
    first, second = dict(leaves(one)), dict(leaves(other))
    return [path for path in {**first, **second} if first.get(path) != second.get(path)]


def describe(function: Any) -> str:
    """A text that is equal for equal functions, in different processes too."""
    if function is None:
        return "None"
    if isinstance(function, functools.partial):
        given = _of(repr([*leaves(list(function.args)), *leaves(dict(function.keywords))]).encode())
        return f"partial({describe(function.func)}, {given[:12]})"
    if isinstance(function, types.FunctionType):
        return (
            f"{function.__module__.replace('__mp_main__', '__main__')}.{function.__qualname__} {_code(function)[:12]}"
        )
    if isinstance(function, types.MethodType):
        return f"{describe(function.__func__)} of {describe(function.__self__)}"
    if isinstance(function, (type, types.BuiltinFunctionType)):
        return f"{function.__module__}.{function.__qualname__}"
    kind = type(function)
    state = getattr(function, "__dict__", None)
    return f"{kind.__module__.replace('__mp_main__', '__main__')}.{kind.__qualname__} {digest(state)[:12]}"


def _code(function: types.FunctionType) -> str:
    """Of what a function does; two lambdas of one module have one name."""
    code = function.__code__
    values = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    return _of(code.co_code + repr([one for one in code.co_consts if not isinstance(one, types.CodeType)]).encode()
               + repr([describe(one) if callable(one) else digest(one) for one in values]).encode())  # fmt: skip


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _tensor(value: Any) -> str:
    import torch

    about = f"{value.dtype} {tuple(value.shape)} {value.layout}".encode()
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return _of(about + pickle.dumps(value.detach()))
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return _of(about + (plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""))


def _array(value: Any) -> str:
    about = f"{value.dtype.str} {value.shape}".encode()
    if value.dtype.hasobject:
        return _of(about + repr(list(leaves(value.ravel().tolist()))).encode())
    return _of(about + np.ascontiguousarray(value).tobytes())


def _other(value: Any, depth: int) -> str:
    """An object: an image by its pixels, others by their attributes."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".replace("__mp_main__", "__main__")
    if callable(pixels := getattr(value, "tobytes", None)) and hasattr(value, "size"):
        return _of(f"{kind} {getattr(value, 'mode', '')} {value.size}".encode() + pixels())
    if callable(value):
        return _of(describe(value).encode())
    state = getattr(value, "__dict__", None)
    if state:
        return _of(f"{kind} {list(leaves(state, '', depth + 1))!r}".encode())
    try:
        return _of(kind.encode() + pickle.dumps(value))
    except Exception:
        return _of(kind.encode())
