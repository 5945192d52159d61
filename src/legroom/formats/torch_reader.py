"""Read torch checkpoints: the zip files that ``torch.save`` writes, without torch and without running pickled code.

The pickle in the archive names tensors and says where their bytes are. It is read with an unpickler that knows the few
names which tensors and state dicts need, and refuses every other one, as ``torch.load(weights_only=True)`` does. A
tensor's name is the path to it: ``model/layer.weight``. A key that is not text is in it as Python writes it: ``0.5``,
``('layer', 0)``. Values that are not tensors are left out. A tensor without a path, as in a set, is refused.

bfloat16 and the 8-bit floats have no numpy type: their bits are read as uint16 and uint8, and the true type is in
``attributes["torch_dtype"]``.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from legroom.errors import SourceError, UnsupportedData
from legroom.formats.base_reader import ArraySpec, Checksum, Description, Extent, FileReader, native_dtype
from legroom.formats.decompress_deflate import zlib_module
from legroom.formats.file_reads_and_errors import damaged, wrong_checksum
from legroom.formats.fill_output_arrays import PIECE, Progress, bytes_of, copy_raw
from legroom.formats.npy_reader import data_start, member_infos
from legroom.messages import say

PICKLE = "data.pkl"
_MOST_PICKLE = 1 << 28
_MOST_VALUES = 2_000_000
_MOST_CHARACTERS = 64 * _MOST_VALUES  # of all names
_MOST_PARTS = 64  # of a key that is a tuple
_TYPES = {
    "float64": "f8", "float32": "f4", "float16": "f2", "int64": "i8", "int32": "i4", "int16": "i2", "int8": "i1",
    "uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "u8", "bool": "?", "complex64": "c8", "complex128": "c16",
}  # fmt: skip
_BITS = {
    "bfloat16": "u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1", "float8_e4m3fnuz": "u1", "float8_e5m2fnuz": "u1",
    "float8_e8m0fnu": "u1",
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "LongStorage": "int64",
    "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "BFloat16Storage": "bfloat16", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _DType:
    name: str  # torch's, "" for an untyped storage


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: _DType
    key: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor as the pickle describes it: offset and strides count elements."""

    storage: _Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lazy: str = ""  # "conj" or "neg": torch stores the values without it, and applies it when they are read

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def span(self) -> int:
        """Elements of the storage from the first to the last that belong to it."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def __setstate__(self, state: object) -> None:
        raise ValueError("a tensor with attributes")


class TorchReader(FileReader):
    """A checkpoint written by torch.save."""

    def _describe(self) -> Description:
        self._members = {info.filename: info for info in member_infos(self._file)}
        self._verified: set[str] = set()
        pickles = [name for name in self._members if name.endswith("/" + PICKLE) or name == PICKLE]
        if len(pickles) != 1:
            raise damaged(self.path, f"it has {len(pickles)} files called data.pkl")
        self._folder = pickles[0].removesuffix(PICKLE)
        order = self._members.get(self._folder + "byteorder")
        if order is not None and self._bytes_of(order) != sys.byteorder.encode():
            raise UnsupportedData(
                say("{path} was written on a machine with another byte order", path=self.path),
                fix=(say("load it with torch there, and save it as safetensors"),),
            )
        root, made = self._load(self._members[pickles[0]])
        pairs = list(self._named(root))
        found = dict(pairs)
        reached = {id(tensor) for _, tensor in pairs}
        if self.selection.keys is None and (lost := sum(id(tensor) not in reached for tensor in made)):
            raise UnsupportedData(
                say("{path} has tensors without a name: {count}", path=self.path, count=lost),
                why=say("they are in a set, or in or below a key of a dict that is neither text nor a plain value"),
                fix=(
                    say("save them in dicts and lists: torch.save(dict(weight=tensor), path)"),
                    say("load only what you need: keys=[…]"),
                ),
            )
        if len(found) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            self._require_names([self._spec(*pair) for pair in pairs if counts[pair[0]] > 1])
        self._tensors = {name: found[name] for name in self.selection.choose([*found], self.path)}
        return Description("torch", tuple(self._spec(*item) for item in self._tensors.items()), {}, (self.path,))

    def _load(self, info: zipfile.ZipInfo) -> tuple[Any, list[_Tensor]]:
        """The object, and every tensor that was made for it."""
        if info.file_size > _MOST_PICKLE:
            raise damaged(self.path, f"its data.pkl has {info.file_size} bytes")
        try:
            reader = _Unpickler(io.BytesIO(self._bytes_of(info)), self.path)
            return reader.load(), reader.tensors
        except SourceError:
            raise
        except Exception as problem:  # pickle raises whatever the arguments of a call provoke
            raise damaged(self.path, f"its data.pkl: {problem}") from problem

    def _named(self, root: Any) -> Iterator[tuple[str, _Tensor]]:
        """Every tensor below ``root``, with the path to it."""
        waiting = [("", root)]
        characters = 0
        for seen in range(_MOST_VALUES):
            if not waiting:
                return
            name, value = waiting.pop()
            characters += len(name)
            if isinstance(value, _Tensor):
                yield name or "tensor", value
            elif isinstance(value, dict | list | tuple):
                items = list(value.items() if isinstance(value, dict) else enumerate(value))
                items += getattr(value, "__dict__", {}).items()  # of an OrderedDict: a state dict has _metadata
                below = ((key_name, item) for key, item in reversed(items) if (key_name := _key_name(key)) is not None)
                waiting += [(f"{name}/{key_name}" if name else key_name, item) for key_name, item in below]
            if len(waiting) > _MOST_VALUES - seen or characters > _MOST_CHARACTERS:
                break
        # Containers that contain each other name the same tensors without end, by names that become longer and longer.
        raise damaged(self.path, f"it has more than {_MOST_VALUES} values")

    def _spec(self, name: str, tensor: _Tensor) -> ArraySpec:
        text = _TYPES.get(tensor.dtype) or _BITS.get(tensor.dtype)
        if text is None:
            raise UnsupportedData(
                say("{name!r} of {path} has type {kind}", name=name, path=self.path, kind=tensor.dtype),
                why=say("numpy has no such type"),
                fix=(say("load only what you need: keys=[…]"),),
            )
        if tensor.lazy:
            raise UnsupportedData(
                say("{name!r} of {path} is stored without its {bit} bit applied", name=name, path=self.path,
                    bit=tensor.lazy),
                why=say("torch conjugates or negates it when it is used"),
                fix=(
                    say("save it with its values: torch.save(tensor.resolve_conj().resolve_neg(), path)"),
                    say("load only what you need: keys=[…]"),
                ),
            )  # fmt: skip
        dtype = native_dtype(np.dtype(text))
        info = self._storage_info(tensor)
        if (tensor.offset + tensor.span) * dtype.itemsize > info.file_size:
            raise damaged(self.path, f"{name!r} reaches beyond the {info.file_size} bytes of its storage")
        notes = {"torch_dtype": tensor.dtype} if tensor.dtype in _BITS else {}
        return ArraySpec(name, tensor.shape, dtype, notes, meaning=notes)

    def _storage_info(self, tensor: _Tensor) -> zipfile.ZipInfo:
        info = self._members.get(f"{self._folder}data/{tensor.storage.key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise damaged(self.path, f"storage {tensor.storage.key!r} is missing or compressed")
        return info

    def _extent(self, spec: ArraySpec) -> Extent | None:
        tensor = self._tensors[spec.name]
        info = self._storage_info(tensor)
        if not tensor.contiguous or tensor.offset or spec.nbytes != info.file_size:
            return None  # a part of its storage: read() verifies the whole first
        start = data_start(self._file, info)
        self._file.require(start, spec.nbytes)
        # torch.serialization.set_crc32_options(False) writes files without checksums.
        return Extent(self.path, start, spec.nbytes, Checksum(info.CRC, 0, 0) if info.CRC else None)

    def _read(self, spec: ArraySpec, out: np.ndarray[Any, Any], progress: Progress) -> None:
        tensor = self._tensors[spec.name]
        info = self._storage_info(tensor)
        start = data_start(self._file, info)
        if tensor.contiguous and tensor.offset == 0 and spec.nbytes == info.file_size:
            copy_raw(self._file, start, out, progress)
            if info.CRC and (has := zlib_module().crc32(bytes_of(out))) != info.CRC:
                raise wrong_checksum(self.path, spec.name, has, info.CRC)
            return
        self._verify(tensor.storage.key, info, start, spec.name)
        size = spec.dtype.itemsize
        if tensor.contiguous:
            copy_raw(self._file, start + tensor.offset * size, out, progress)
            return
        part = np.frombuffer(self._file.read_at(start + tensor.offset * size, tensor.span * size), spec.dtype)
        strides = [stride * size for stride in tensor.strides]
        out[...] = np.lib.stride_tricks.as_strided(part, tensor.shape, strides, writeable=False)
        progress(spec.nbytes)

    def _decoding(self, spec: ArraySpec) -> int:  # type: ignore[override]
        tensor = self._tensors[spec.name]
        return 0 if tensor.contiguous else PIECE + tensor.span * spec.dtype.itemsize

    def _verify(self, key: str, info: zipfile.ZipInfo, start: int, name: str) -> None:
        """Verify the checksum of a storage that several tensors are parts of, once."""
        if key in self._verified or not info.CRC:
            return
        has = 0
        for offset in range(0, info.file_size, PIECE):
            has = zlib_module().crc32(self._file.read_at(start + offset, min(PIECE, info.file_size - offset)), has)
        if has != info.CRC:
            raise wrong_checksum(self.path, name, has, info.CRC)
        self._verified.add(key)

    def _bytes_of(self, info: zipfile.ZipInfo) -> bytes:
        """A small member, which torch stores uncompressed."""
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise UnsupportedData(
                say("{name!r} of {path} is compressed or encrypted", name=info.filename, path=self.path),
                why=say("torch.save stores it as it is: the file was packed again"),
                fix=(say("read it with torch.load and save it with torch.save"),),
            )
        data = self._file.read_at(data_start(self._file, info), info.file_size)
        if info.CRC and (has := zlib_module().crc32(data)) != info.CRC:
            raise wrong_checksum(self.path, info.filename, has, info.CRC)
        return data


class _Unpickler(pickle.Unpickler):
    """Reads the pickle of a checkpoint; every name that it may call is here."""

    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file, encoding="utf-8")
        self._path = path
        self.tensors: list[_Tensor] = []

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name; others are refused and nothing is imported."""
        if (module, name) in _CALLS:
            found = _CALLS[module, name]
            return self._tensor if found is _rebuild_tensor else found
        if module == "torch" and name in _STORAGES:
            return _DType(_STORAGES[name])
        if module == "torch" and (name in _TYPES or name in _BITS):
            return _DType(name)
        raise UnsupportedData(
            say("{path} needs {module}.{name}", path=self._path, module=module, name=name),
            why=say("it is pickled code, which is not run: only tensors, dicts, lists and numbers are read"),
            fix=(
                say("save the state dict alone: torch.save(model.state_dict(), path)"),
                say("or save tensors with safetensors.torch.save_file"),
            ),
        )

    def _tensor(self, *arguments: Any) -> _Tensor:
        self.tensors.append(_rebuild_tensor(*arguments))
        return self.tensors[-1]

    def persistent_load(self, pid: Any) -> _Storage:
        """A storage: its type and the name of its file in the archive."""
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[2], str):
            raise ValueError("not a storage")
        if not isinstance(pid[1], _DType) or "/" in pid[2]:
            raise ValueError("not a storage")
        return _Storage(pid[1], pid[2])


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> _Tensor:
    """Stands in for torch._utils._rebuild_tensor_v2 and _v3; only _v3 has the type, both may end with metadata."""
    dtype = next((one.name for one in rest if isinstance(one, _DType)), storage.dtype.name)
    lazy = next((bit for one in rest if isinstance(one, dict) for bit in ("conj", "neg") if one.get(bit)), "")
    sizes = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or len(shape) != len(strides) or len(shape) > 32:
        raise ValueError("not a tensor")
    if not all(type(size) is int and size >= 0 for size in sizes) or prod(shape) > 1 << 50:
        raise ValueError("invalid shape or strides")
    return _Tensor(storage, dtype, offset, tuple(shape), tuple(strides), lazy)


def _key_name(key: Any) -> str | None:
    """A key of a dict as a part of a name; None if it is not made of plain values."""
    if isinstance(key, str):
        return key
    parts, plain = [key], (str, bytes, int, float, NoneType)
    for part in parts:
        if isinstance(part, tuple):
            parts += part
        elif not isinstance(part, plain):
            return None
        if len(parts) > _MOST_PARTS:
            return None
    try:
        return repr(key)
    except ValueError:  # an integer of thousands of digits
        return None


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


_CALLS: dict[tuple[str, str], Callable[..., Any] | _DType] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "UntypedStorage"): _DType(""),
    ("torch", "Size"): tuple,
}
