"""Encode Python objects as bytes and back, type by type: MessagePack by ormsgpack, with extension types for the rest.

What comes out has the same types and equals what went in. Anything else is refused, with the path of the object.
ormsgpack passes subclasses and unknown types to ``default``; two things it does not are checked here: dictionary keys
that are not str, and bytearray and memoryview, which it would write as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import chain, repeat
from numbers import Complex, Number
from pathlib import PosixPath, PurePosixPath
from typing import Any, Literal, cast

import numpy as np

from legroom.errors import UnsupportedData
from legroom.messages import phrase, say
from legroom.system.lazy_and_optional_imports import require

ENCODING = 1  # grows when a reader of this version could misread what a writer wrote

_TUPLE, _DICT, _INT, _TEXT, _ARRAY, _SCALAR, _BYTEARRAY, _COMPLEX, _SET, _FROZENSET, _PATH, _PURE_PATH, _RANGE = range(
    1, 14
)
# 0xc1 is the one byte that no MessagePack value begins with.
SPECIAL = 0xC1
_TOP_TUPLE, _TOP_ARRAY, TOP_CONTAINER = b"T", b"A", b"C"
LARGE_ARRAY = 1 << 20  # an array from this size on is a read-only view of the shared copy
_DEEPEST = 100  # containers in each other that are always taken; ormsgpack alone takes some more
_ALIGNMENT = 64
_MOST_DECIMAL = 10_000  # bits of an integer key that is written in decimal
_LEAVES = frozenset((int, float, str, bool, type(None), bytes))


class _Refused(Exception):
    """A value cannot be encoded: the path is found by walking the object again."""


@cache
def _library() -> Any:
    return require(
        "ormsgpack", "", "legroom.freeze", package="ormsgpack", instead=(phrase("keep it as a numpy array"),)
    )


class Encoder:
    """Encodes items of a container."""

    def __init__(self) -> None:
        library = _library()
        self._pack: Callable[..., bytes] = library.packb
        self._ext: Callable[[int, bytes], Any] = library.Ext
        self._options = _passthrough(library)
        self._tuples = 0  # in each other, while one is encoded
        self._foreign = False  # whether anything was not of a built-in type
        self._leaks = {bytearray, memoryview, library.Ext}

    def encode_all(self, items: Sequence[Any], paths: Callable[[int], str]) -> list[bytes]:
        """Encode several items. ``paths`` gives the path of each, for the error if one is refused."""
        self._foreign = False
        found: list[bytes] | None = None
        try:
            if tuple in set(map(type, items)):
                found = list(map(self._pack_item, items))
            else:
                found = list(map(self._pack, items, repeat(self._default), repeat(self._options)))
        except Exception:  # whatever a foreign type raises
            self._foreign = True
        if found is None:  # outside of the except clause: a refusal names all that its reader needs
            found = [self._pack_or_carefully(item, paths, index) for index, item in enumerate(items)]
        if self._needs_care(items):
            return [self._carefully(item, paths(index)) for index, item in enumerate(items)]
        return found

    def _pack_or_carefully(self, item: Any, paths: Callable[[int], str], index: int) -> bytes:
        try:
            return self._pack_item(item)
        except Exception:  # the careful way encodes or refuses it
            pass
        return self._carefully(item, paths(index))

    def _pack_item(self, item: Any) -> bytes:
        if type(item) is tuple:
            return b"\xc1T" + self._pack(list(item), self._default, self._options)
        return self._pack(item, self._default, self._options)

    def encode_array(self, array: np.ndarray[Any, Any], position: int, path: str) -> tuple[bytes, memoryview] | None:
        """(head, bytes) of a large array at ``position`` in the data, aligned; None if it is not one."""
        if array.nbytes < LARGE_ARRAY or array.dtype.hasobject:
            return None
        head, flat = self._array_parts(array, path)
        start = position + 5 + len(head)
        padding = -start % _ALIGNMENT
        return b"\xc1A" + len(head).to_bytes(2, "little") + bytes([padding]) + head + bytes(padding), flat

    def _carefully(self, item: Any, path: str) -> bytes:
        """Encode one item by Python code that knows the path of each part of it."""
        if type(item) is tuple:
            plain = [self._plain(part, f"{path}[{index}]", 1) for index, part in enumerate(item)]
            return b"\xc1T" + self._pack(plain, None, self._options)
        return self._pack(self._plain(item, path, 0), None, self._options)

    def _default(self, value: Any) -> Any:
        """What ormsgpack cannot write itself, without a path: a refusal is raised again with it."""
        kind = type(value)
        if kind is tuple and self._tuples < _DEEPEST // 2:
            self._tuples += 1
            try:
                return self._ext(_TUPLE, self._pack(list(value), self._default, self._options))
            finally:
                self._tuples -= 1
        self._foreign = True
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._plain(value, "", 0)
        raise _Refused

    def _plain(self, value: Any, path: str, depth: int) -> Any:
        """The value as ormsgpack can write it exactly: plain types, and extensions for all others."""
        kind = type(value)
        if kind in (float, bool, type(None), bytes):
            return value
        if kind is int:
            if -(1 << 63) <= value < 1 << 64:
                return value
            return self._ext(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        if kind is str:
            return value if _is_utf8(value) else self._ext(_TEXT, value.encode("utf-8", "surrogatepass"))
        if depth >= _DEEPEST:
            what = say("nested more than {most} deep, or it contains itself", most=_DEEPEST)
            raise _refusal(f"{path[:60]}…", what, say("a structure that contains itself has no end to write"))
        if kind is list:
            return [self._plain(part, f"{path}[{index}]", depth + 1) for index, part in enumerate(value)]
        if kind is dict:
            return self._dict(value, path, depth)
        extension = self._extension(value, path, depth)
        if extension is None:
            raise _refusal(path, _description(value))
        return self._ext(*extension)

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        pairs = []
        for key, part in value.items():
            if _has_nan(key):
                raise _refusal(path, say("a dict with a NaN key"), _nan_why())
            below = f"{path}[{key!r:.80}]"
            pairs.append((self._plain(key, f"{below} (key)", depth + 1), self._plain(part, below, depth + 1)))
        if all(type(key) is str for key, _ in pairs):  # an unusual str has become an extension
            return dict(pairs)
        return self._ext(_DICT, self._packed([one for pair in pairs for one in pair]))

    def _extension(self, value: Any, path: str, depth: int) -> tuple[int, bytes] | None:
        kind = type(value)
        if kind is tuple:
            parts = [self._plain(part, f"{path}[{index}]", depth + 1) for index, part in enumerate(value)]
            return _TUPLE, self._packed(parts)
        if kind is np.ndarray:
            head, flat = self._array_parts(value, path)
            return _ARRAY, b"".join((len(head).to_bytes(2, "little"), head, flat))
        if isinstance(value, np.generic) and kind.__module__ == "numpy":
            return _SCALAR, self._scalar(value, path)
        if kind is bytearray:
            return _BYTEARRAY, bytes(value)
        if kind is complex:
            return _COMPLEX, np.array(value, "<c16").tobytes()
        if kind is set or kind is frozenset:
            # In the order of their bytes: equal sets have one encoding in every process.
            packed = sorted(self._packed(self._plain(part, f"{path} (member)", depth + 1)) for part in value)
            return (_SET if kind is set else _FROZENSET), self._packed(packed)
        if kind is PosixPath or kind is PurePosixPath:
            return (_PATH if kind is PosixPath else _PURE_PATH), str(value).encode("utf-8", "surrogatepass")
        if kind is range:
            parts = [self._plain(part, path, depth + 1) for part in (value.start, value.stop, value.step)]
            return _RANGE, self._packed(parts)
        return None

    def _array_parts(self, array: np.ndarray[Any, Any], path: str) -> tuple[bytes, memoryview]:
        """The head of an array (dtype, shape, order) and its bytes."""
        dtype = array.dtype
        if not _is_storable(dtype):
            raise _refusal(path, say("a numpy array of dtype {dtype}", dtype=dtype))
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        order: Literal["F", "C"] = "F" if fortran else "C"
        head = self._pack([_descr(dtype), array.shape, order])  # its tuples become lists
        if array.nbytes == 0:
            return head, memoryview(b"")
        return head, array.ravel(order).view(np.uint8).data  # a copy only if it is not contiguous

    def _scalar(self, value: np.generic, path: str) -> bytes:
        array = np.asarray(value)
        if not _is_storable(array.dtype) or array.dtype.kind == "V":
            raise _refusal(path, say("a numpy scalar of dtype {dtype}", dtype=array.dtype))
        head, flat = self._array_parts(array, path)
        data = b"".join((len(head).to_bytes(2, "little"), head, flat))
        again: Any = _read_array(data)[()]
        if type(again) is not type(value) or not (again == value or (again != again and value != value)):
            raise _refusal(path, say("a numpy scalar that ends in null characters"))  # numpy drops them
        return data

    def _packed(self, value: Any) -> bytes:
        return self._pack(value, None, self._options)

    def _needs_care(self, items: Sequence[Any]) -> bool:
        """Whether a bytearray or memoryview is anywhere in these items, or they are nested too deep to tell.

        Loops in C, and records with the same number of fields are read field by field, so that only fields with
        containers are entered. It still takes longer than ormsgpack itself.
        """
        built_in = not self._foreign
        fields: list[Sequence[Any]] = [items]
        for _ in range(_DEEPEST + 1):
            inside: list[Sequence[Any]] = []
            for parts in fields:
                if built_in and _are_numbers(parts):
                    continue
                kinds = _types_of(parts)
                if kinds <= _LEAVES:
                    continue
                if kinds & self._leaks:
                    return True
                if dict in kinds:
                    dicts = parts if len(kinds) == 1 else [one for one in parts if type(one) is dict]
                    inside += _fields_of(dicts)
                if list in kinds or tuple in kinds:
                    lists = parts if len(kinds) == 1 else [one for one in parts if type(one) in (list, tuple)]
                    if not (built_in and _are_numbers(chain.from_iterable(lists))):
                        inside.append(list(chain.from_iterable(lists)))
            if not inside:
                return False
            fields = inside
        return True


def _are_numbers(parts: Iterable[Any]) -> bool:
    """Whether these parts, all of built-in types, are numbers: nothing else can be added to one.

    The fastest way to know. Not for other types: the sum of two numpy arrays can be as large as the product of both.
    """
    try:
        sum(parts, 0.0)
    except TypeError:
        return False
    return True


def _types_of(parts: Sequence[Any]) -> set[type]:
    found = list(map(type, parts))
    if found and found.count(found[0]) == len(found):  # half the time of a set
        return {found[0]}
    return set(found)


def _fields_of(dicts: Sequence[dict[Any, Any]]) -> list[Sequence[Any]]:
    """The values of these dicts, by field if all have the same number of fields."""
    try:
        return list(zip(*map(dict.values, dicts), strict=True))
    except ValueError:
        return [list(chain.from_iterable(map(dict.values, dicts)))]


def decoder(container: Callable[[int], Any], data: memoryview, array: np.ndarray[Any, Any]) -> Callable[..., Any]:
    """A function that decodes the item between two positions of the data. ``container`` gives nested containers."""
    library = _library()
    unpack, hook = library.unpackb, _decode_extension

    def decode(start: int, end: int) -> Any:
        if data[start] != SPECIAL:
            return unpack(data[start:end], ext_hook=hook)
        kind = data[start + 1 : start + 2]
        if kind == _TOP_TUPLE:
            return tuple(unpack(data[start + 2 : end], ext_hook=hook))
        if kind == TOP_CONTAINER:
            return container(int.from_bytes(data[start + 2 : end], "little"))
        length, padding = int.from_bytes(data[start + 2 : start + 4], "little"), data[start + 4]
        head = unpack(data[start + 5 : start + 5 + length])
        found = _shaped(head, array[start + 5 + length + padding : end])
        found.flags.writeable = False
        return found

    return decode


def _decode_extension(tag: int, data: bytes) -> Any:
    unpack = _library().unpackb
    if tag == _TUPLE:
        return tuple(unpack(data, ext_hook=_decode_extension))
    if tag == _DICT:
        parts = iter(unpack(data, ext_hook=_decode_extension))
        return dict(zip(parts, parts, strict=True))
    if tag == _INT:
        return int.from_bytes(data, "little", signed=True)
    if tag == _TEXT:
        return data.decode("utf-8", "surrogatepass")
    if tag == _ARRAY:
        return _read_array(data).copy("K")
    if tag == _SCALAR:
        return _read_array(data)[()]
    if tag == _BYTEARRAY:
        return bytearray(data)
    if tag == _COMPLEX:
        return complex(np.frombuffer(data, "<c16")[0])
    if tag in (_SET, _FROZENSET):
        return (set if tag == _SET else frozenset)(unpack(one, ext_hook=_decode_extension) for one in unpack(data))
    if tag in (_PATH, _PURE_PATH):
        return (PosixPath if tag == _PATH else PurePosixPath)(data.decode("utf-8", "surrogatepass"))
    if tag == _RANGE:
        return range(*unpack(data, ext_hook=_decode_extension))
    raise ValueError(f"unknown extension {tag}")


def _read_array(data: bytes) -> np.ndarray[Any, Any]:
    length = int.from_bytes(data[:2], "little")
    return _shaped(_library().unpackb(data[2 : 2 + length]), np.frombuffer(data, np.uint8)[2 + length :])


def _shaped(head: Sequence[Any], flat: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    descr, shape, order = head
    return np.ndarray(tuple(shape), _dtype(descr), flat.data, order=order)


@lru_cache(maxsize=256)
def _is_storable(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype can be written and read back exactly: no objects, no types of other packages."""
    if dtype.hasobject:
        return False
    try:
        again = _dtype(_library().unpackb(_library().packb(_descr(dtype))))
    except (TypeError, ValueError):
        return False
    return again == dtype and type(again) is type(dtype) and again.type is dtype.type


def _descr(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None and dtype.subdtype is None else np.lib.format.dtype_to_descr(dtype)


def _dtype(descr: Any) -> np.dtype[Any]:
    return _simple_dtype(descr) if isinstance(descr, str) else np.lib.format.descr_to_dtype(_fields(descr))


@lru_cache(maxsize=256)
def _simple_dtype(descr: str) -> np.dtype[Any]:
    return np.dtype(descr)


def _fields(descr: Any) -> Any:
    """The fields of a structured dtype as tuples, which MessagePack has written as lists."""
    if isinstance(descr, str):
        return descr
    found = []
    for name, kind, *shape in descr:
        if not isinstance(name, str):
            raise ValueError("a field with a title")
        found.append((name, _fields(kind), *(tuple(one) for one in shape)))
    return found


def _passthrough(library: Any) -> int:
    """Every option by which ormsgpack leaves a type to ``default`` instead of converting it."""
    options = 0
    for name in ("BIG_INT", "DATACLASS", "DATETIME", "ENUM", "SUBCLASS", "TUPLE", "UUID"):
        options |= cast(int, getattr(library, f"OPT_PASSTHROUGH_{name}"))
    return options


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refusal(path: str, what: str, why: str | None = None) -> UnsupportedData:
    if not path:
        raise _Refused  # called by ormsgpack, which knows no path: the item is encoded again, carefully
    kept = say(
        "freeze keeps int, float, complex, bool, None, str, bytes, bytearray, list, tuple, dict, set, frozenset, "
        "range, pathlib paths, numpy arrays and numpy scalars; other types and subclasses would not come back as "
        "they are"
    )
    return UnsupportedData(
        say("cannot freeze {path}: {what}", path=path, what=what),
        why=kept if why is None else why,
        fix=(
            say("convert it before: numpy.asarray(image), tuple(point), dict(counts), str(when)"),
            say("keep it out of the frozen object"),
        ),
    )


def _has_nan(key: Any) -> bool:
    return any(map(_has_nan, key)) if type(key) in (tuple, frozenset) else bool(key != key)


def _nan_why() -> str:
    return say("NaN is not equal to itself, so the key could not be found again")


def _description(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.partition(".")[0] == "PIL":
        return say("a PIL image")
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":
        return say("a torch tensor; use its .numpy()")
    return say("an object of type {name}", name=name)


# Keys of a frozen dict are found by a hash that is the same in every process, and for keys that are equal: 1, 1.0, True
# and numpy's 1 are one key to Python.


def key_bytes(key: Any) -> bytes | None:
    """Bytes that equal keys have in common; None for a key that no frozen dict can contain."""
    if isinstance(key, str):
        return b"s" + str.encode(key, "utf-8", "surrogatepass")
    if isinstance(key, (int, np.integer, np.bool_)):
        return _integer_bytes(int(key))
    if isinstance(key, (float, np.floating)):
        number = float(key)
        if number != key or math.isnan(number):
            return None
        return _integer_bytes(int(number)) if number.is_integer() else b"f" + number.hex().encode()
    if isinstance(key, (bytes, memoryview)):
        return b"b" + bytes(key)
    if key is None:
        return b"n"
    if isinstance(key, tuple):
        parts = [key_bytes(part) for part in key]
        if any(part is None for part in parts):
            return None
        return b"t" + b"".join(b"%d:%b" % (len(part), part) for part in cast("list[bytes]", parts))
    if isinstance(key, PurePosixPath):
        return b"p" + str(key).encode("utf-8", "surrogatepass")
    return _other_number_bytes(key) if isinstance(key, Number) else None


def _integer_bytes(number: int) -> bytes:
    # Python refuses to write thousands of digits in decimal.
    return b"i%d" % number if number.bit_length() < _MOST_DECIMAL else b"ix%x" % number


def _other_number_bytes(key: Any) -> bytes | None:
    """The same of a Decimal, a Fraction or a complex number: those of the int or float that it is equal to."""
    part: Any = key.real if isinstance(key, Complex) else key
    for kind in (float, int):
        try:
            number = kind(part)
        except (TypeError, ValueError, OverflowError):
            continue
        if number == key:
            return key_bytes(number)
    return None


def check_keys(keys: Iterable[Any], path: str) -> list[bytes]:
    """The hash bytes of every key of a dict; refuses a key that could not be found again."""
    found = []
    for key in keys:
        if type(key) not in _KEY_TYPES or (text := key_bytes(key)) is None:
            here = f"{path}[{key!r:.80}] (key)"
            nan = _has_nan(key)
            raise _refusal(here, say("NaN as a key"), _nan_why()) if nan else _refusal(here, _description(key))
        found.append(text)
    return found


_KEY_TYPES = {str, int, float, bool, bytes, type(None), tuple, PosixPath, PurePosixPath}
