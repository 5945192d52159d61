"""``legroom.weights``: the tensors of a model from safetensors files or torch checkpoints, one shared copy of each.

On the host the tensors lie in the cache, which reads files in large blocks with several threads: every process maps the
same copy. On a GPU they are uploaded through page-locked chunks; with ``shared=True`` all processes on that GPU map one
copy, which must not be written to. No pickled code is run: checkpoints are read as ``weights_only=True`` would.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from legroom.cache.cached_arrays_and_tables import CachedData, torch_name
from legroom.cache.find_or_build_entry import OpenRequest, find_manifest, open_as, source_paths
from legroom.errors import LegroomError, NoRoom, RemoteError, UnknownFormat, UnreadableSource, UsageError
from legroom.formats.base_reader import Extent, Selection
from legroom.formats.unsupported_file_types import stands_in, unsupported_directory
from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.loader.batches.cuda_calls_for_gather import Driver, open_driver
from legroom.loader.batches.cuda_upload import Upload, upload
from legroom.loader.shared_gpu_memory import SharedCopy, share
from legroom.messages import listed, say
from legroom.remote.remote_object import ObjectUrl, SourcePath, is_url
from legroom.system.argument_checks import check_arguments
from legroom.system.lazy_and_optional_imports import lazy_import, require
from legroom.units import format_size

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
_MOST_INDEX = 64 << 20
_MOST_STAGED = 1 << 30  # bytes of GPU memory for tensors that are converted into shared memory
_ALIGNMENT = 512  # of tensors in shared GPU memory: what torch's allocator gives


class Weights(Mapping[str, "torch.Tensor"]):
    """Names and tensors of a model.

    Tensors stay valid without it, because a model may use them longer. Those in shared GPU memory are valid until
    ``close``, which a ``with`` block calls at its end.
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], why: str, seconds: Mapping[str, float], on_close: Callable[[], None]
    ) -> None:
        self.why = why  # where the tensors are, and why not shared where that was asked for
        self.seconds = dict(seconds)  # what took how long; "upload …" are sums over its threads
        self._tensors, self._on_close = tensors, on_close
        self._pid = os.getpid()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        size = format_size(sum(tensor.nbytes for tensor in self._tensors.values()))
        count = len(self._tensors)
        return f"<legroom.weights: {count} {'tensor' if count == 1 else 'tensors'}, {size}>"

    def close(self) -> None:
        """Release everything. Tensors in shared GPU memory become invalid."""
        self._tensors = {}
        on_close, self._on_close = self._on_close, _nothing
        if self._pid == os.getpid():
            on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def weights(
    path: str | os.PathLike[str],
    device: Any = None,
    *,
    shared: bool = False,
    keys: str | Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
) -> Weights:
    """The tensors of a model.

    Args:
        path: A file or URL: safetensors, or a torch checkpoint (``torch.save`` of tensors in dicts and lists). Or a
            directory as transformers writes it: one file, or shards with an index.
        device: A CUDA device; None leaves the tensors in RAM, in the copy that all processes share.
        shared: With a device, all processes on this GPU share one copy. Its tensors must not be written to.
        keys: The tensors to take, by name or group; None takes all.
        dtype: Convert floating-point tensors to this type. On the host this makes a copy of this process's own.
    """
    check_arguments(weights, locals(), ("keys",))
    torch = require("torch", "torch", "legroom.weights")
    if shared and device is None:
        raise UsageError(
            say("shared=True needs a device"),
            why=say("tensors in RAM are shared between processes already"),
            fix=("device='cuda', shared=True", say("or remove shared=True")),
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(
            say("dtype must be a floating-point torch.dtype (got {value!r})", value=dtype),
            fix=("dtype=torch.bfloat16",),
        )
    text = os.fspath(path)
    on_host = device is None or str(device) == "cpu"
    driver = None if on_host else open_driver(device)
    where = source_paths(text)[0] if is_url(text) else Path(text)
    if driver is not None and shared and keys is None:
        found = _shared_by_others(driver, where, dtype)
        if found is not None:
            return found
    opened = _Opened(where, keys, map_pages=on_host)
    try:
        if driver is None:
            tensors = {name: _converted(one.tensor(), dtype) for name, one in opened.tensors.items()}
            why = say("in RAM, shared by all processes that use these files")
            return Weights(tensors, why, opened.seconds, opened.close)
        if not shared:
            return _on_device(driver, opened, dtype, say("in GPU memory of this process"))
        try:
            return _shared_on_device(driver, opened, dtype)
        except CudaRefused as refusal:
            return _on_device(driver, opened, dtype, say("this process's own copy: {why}", why=refusal))
    except BaseException:
        opened.close()
        raise


@dataclass(frozen=True, slots=True)
class _HostTensor:
    """A tensor as it lies in the cache."""

    array: NDArray
    dtype: torch.dtype
    where: Callable[[], Extent | None]  # the file that has the same bytes

    def upload(self, there: torch.Tensor) -> Upload:
        """The copy of this tensor to one on a GPU."""
        if not self.array.flags.c_contiguous:
            return Upload(np.ascontiguousarray(self.array), there)
        file = self.where()
        return Upload(self.array, there, file if file is not None and file.checksum is None else None)

    def tensor(self) -> torch.Tensor:
        import torch

        array = self.array if self.array.flags.c_contiguous else np.ascontiguousarray(self.array)
        found = (
            torch.from_numpy(array.reshape(-1).view(np.uint8)) if array.nbytes else torch.empty(0, dtype=torch.uint8)
        )
        return found.view(self.dtype).view(array.shape)


class _Opened:
    """The files of a model, attached in the cache. ``map_pages`` in the background: not for files that are read."""

    def __init__(self, path: SourcePath, keys: str | Iterable[str] | None, *, map_pages: bool) -> None:
        start = time.perf_counter()
        self._stack = ExitStack()
        self.seconds: dict[str, float] = {}
        self.title = str(path)
        self.data: list[CachedData] = []
        self.tensors: dict[str, _HostTensor] = {}
        wanted = Selection(keys)
        try:
            for file, names in _files(path):
                taken = wanted.keys
                if names is not None and taken is not None:
                    taken = tuple(name for name in names if wanted.takes(name))
                    if not taken:
                        continue
                request = OpenRequest(source_paths(file), taken, prefault=map_pages)
                try:
                    data = self._stack.enter_context(open_as(CachedData, request))
                except UnknownFormat as problem:
                    if not problem.converts:
                        raise
                    raise _not_weights(problem) from problem
                self.data.append(data)
                self._require_complete(path, file, names if taken is None else None, data.info.arrays)
                for name, about in data.info.arrays.items():
                    if names is not None and name not in names:
                        continue  # in the file, but not in the index
                    array = data[name]
                    exact = _torch_dtype(about.attributes, array.dtype)
                    self.tensors[name] = _HostTensor(array, exact, partial(data.where, name))
            if wanted.keys is not None:
                wanted.check(self.tensors, self.tensors, path)
        except BaseException:
            self.close()
            raise
        self.took("open", start)

    def _require_complete(
        self, path: SourcePath, file: SourcePath, names: list[str] | None, found: Collection[str]
    ) -> None:
        """Refuse a shard that lacks tensors of the index, and a tensor that two files have: which one is right?"""
        if names is not None and (lost := [name for name in names if name not in found]):
            raise UnreadableSource(
                say("{path} is not complete", path=path),
                why=say(
                    "{file} lacks {count} tensors of the index: {names}",
                    file=file,
                    count=len(lost),
                    names=listed(lost[:5]),
                ),
                fix=(say("download or save the model again"),),
            )
        if names is None and (twice := [name for name in found if name in self.tensors]):
            raise UnreadableSource(
                say("{path} has tensors twice", path=path),
                why=say("{file} and an earlier file have {names}", file=file, names=listed(twice[:5])),
                fix=(say("pass one file, or add {index}", index=INDEXES[0]),),
            )

    def took(self, what: str, start: float) -> float:
        """Note the time since ``start``; returns the time now."""
        now = time.perf_counter()
        self.seconds[what] = now - start
        return now

    def close(self) -> None:
        """Release the files; arrays that are still referenced stay valid."""
        self.tensors.clear()
        self._stack.close()


def _not_weights(problem: UnknownFormat) -> UnknownFormat:
    """The same error, without the advice to convert a file to a format of datasets."""
    fix = say("pass a safetensors file, a torch checkpoint, or the directory of a model")
    return UnknownFormat(problem.what, why=problem.why, fix=(fix,))


def _torch_dtype(attributes: Mapping[str, object], dtype: np.dtype[Any]) -> torch.dtype:
    """The type of a tensor that is stored as an array of ``dtype``."""
    import torch

    name = torch_name(attributes)
    found: torch.dtype = getattr(torch, name) if name else _plain_dtype(dtype)
    return found


@cache
def _plain_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype


def _files(path: SourcePath) -> list[tuple[SourcePath, list[str] | None]]:
    """The files of a model, and the tensors to take of each; None: all.

    A URL that has no ending is a directory, as hf://organisation/model is.
    """
    below: Callable[[str], SourcePath]
    exists: Callable[[Any], bool]
    if isinstance(path, ObjectUrl):
        if "." in path.name:
            return [(path, None)]
        below, exists = path.below, lazy_import("legroom.remote.object_store").exists
    elif not path.is_dir():
        return [(path, None)]
    else:
        below, exists = path.joinpath, os.path.lexists
    for name in INDEXES:
        if exists(below(name)):
            return [(below(file), names) for file, names in _shards(below(name))]
    for name in SINGLE:
        if exists(below(name)):
            return [(below(name), None)]
    if isinstance(path, Path) and (found := sorted(path.glob("*.safetensors"))):
        return [(file, None) for file in found]
    other = unsupported_directory(path) if isinstance(path, Path) else None
    if other is not None:
        raise UnreadableSource(say("no weights in {path}", path=path), why=other.why, fix=other.fix)
    names = listed((*INDEXES, *SINGLE))
    raise UnreadableSource(
        say("no weights in {path}", path=path),
        why=say("it has none of {names}, and no *.safetensors", names=names)
        if isinstance(path, Path)
        else say("it has none of {names}", names=names),
        fix=(say("pass the file itself"),),
    )


def _index_text(index: SourcePath) -> bytes:
    if isinstance(index, ObjectUrl):
        found: bytes = lazy_import("legroom.remote.object_store").read_small(index, _MOST_INDEX)
        return found
    return index.read_bytes()


def _shards(index: SourcePath) -> list[tuple[str, list[str] | None]]:
    try:
        places = json.loads(_index_text(index))["weight_map"]
        by_file: dict[str, list[str]] = {}
        for name, file in places.items():
            by_file.setdefault(_below_index(file), []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        if isinstance(problem, RemoteError):
            raise
        other = stands_in(index) if isinstance(index, Path) else None
        raise UnreadableSource(
            say("cannot read {path}", path=index),
            why=other.why if other is not None else str(problem) or type(problem).__name__,
            fix=other.fix if other is not None else (say("download or save the model again"),),
        ) from problem
    return [(file, names) for file, names in sorted(by_file.items())]


def _below_index(file: str) -> str:
    """The file of a shard, relative to its index: by its last name alone it could be another one."""
    found = posixpath.normpath(file)
    if found == ".." or found.startswith(("/", "../")):
        raise ValueError(f"the file {file!r} of the index is not below its directory")
    return found


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _on_device(driver: Driver, opened: _Opened, dtype: torch.dtype | None, why: str) -> Weights:
    """Tensors in memory of their own each: a model may free, save and write them one by one."""
    import torch

    start = time.perf_counter()
    tensors: dict[str, torch.Tensor] = {}
    total = sum(one.array.nbytes for one in opened.tensors.values())

    def allocated() -> Iterator[Upload]:
        """Each tensor when its turn comes: allocating all of them would take as long as half of the copy."""
        for name, one in opened.tensors.items():
            try:
                tensors[name] = torch.empty(one.array.shape, dtype=one.dtype, device=driver.device)
            except RuntimeError as problem:
                raise _no_room(driver, total, str(problem).partition("\n")[0]) from problem
            yield one.upload(tensors[name])

    upload_seconds = upload(driver, allocated(), total)
    start = opened.took("copy", start)
    opened.seconds |= {f"upload {what}": taken for what, taken in upload_seconds.phases.items()}
    found: dict[str, torch.Tensor] = {}
    for name in opened.tensors:
        found[name] = _converted(tensors.pop(name), dtype)  # frees the tensor it was converted from
    opened.close()
    opened.took("finish", start)
    return Weights(found, why, opened.seconds, _nothing)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a tensor lies in shared GPU memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _shared_on_device(driver: Driver, opened: _Opened, dtype: torch.dtype | None) -> Weights:
    start = time.perf_counter()
    entries = [data.info for data in opened.data]
    if any(entry.key is None or entry.store is None for entry in entries):
        raise CudaRefused(say("the weights are not in the shared cache"))
    slots, total = _layout({name: (one.array.shape, one.dtype) for name, one in opened.tensors.items()}, dtype)
    groups = _groups([name for name in slots if slots[name].dtype != opened.tensors[name].dtype], opened.tensors)
    room = total + max((sum(opened.tensors[name].array.nbytes for name in group) for group in groups), default=0)
    shared = share(
        driver.api(), Path(str(entries[0].store)), _copy_name([str(entry.key) for entry in entries], slots), total,
        partial(_fill, driver, opened.tensors, slots), check_room=partial(_check_room, driver, room),
        title=opened.title,
    )  # fmt: skip
    opened.took("share", start)
    found = _attached(driver, shared, slots, opened.seconds)
    opened.close()
    return found


def _attached(driver: Driver, shared: SharedCopy, slots: Mapping[str, _Slot], seconds: Mapping[str, float]) -> Weights:
    """The tensors of a shared copy, which is closed where that fails."""
    start = time.perf_counter()
    try:
        tensors = _views(driver, shared.address, slots)
    except BaseException:
        shared.close()
        raise
    why = say("copied to the GPU here for all processes") if shared.made_here else say("shared with other processes")
    seconds = {**seconds, "finish": time.perf_counter() - start}
    return Weights(tensors, why, seconds, partial(_release, driver, shared))


def _shared_by_others(driver: Driver, path: SourcePath, dtype: torch.dtype | None) -> Weights | None:
    """The copy that another process has. Only the manifests are read, which takes half of the time of mapping files.

    None where no process has it, and in any doubt: then the files are attached, which checks everything.
    """
    start = time.perf_counter()
    keys: list[str] = []
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    try:
        with ExitStack() as leases:
            store: Path | None = None
            for file, names in _files(path):
                found = find_manifest(OpenRequest(source_paths(file)))
                if found is None:
                    return None
                manifest, root, held = found
                leases.enter_context(held)
                store = store or root
                keys.append(manifest.key)
                wanted = None if names is None else set(names)
                arrays = {one.name: one for one in manifest.arrays if wanted is None or one.name in wanted}
                if (
                    manifest.tables
                    or len(arrays) != len(wanted or manifest.arrays)
                    or not stored.keys().isdisjoint(arrays)
                ):
                    return None
                for name, one in arrays.items():
                    stored[name] = one.shape, _torch_dtype(one.attributes, one.dtype)
            if store is None:
                return None
            slots, total = _layout(stored, dtype)
            opened = time.perf_counter()
            shared = share(
                driver.api(), store, _copy_name(keys, slots), total, _refuse_to_make, check_room=_refuse_to_make,
                title=str(path),
            )  # fmt: skip
        return _attached(driver, shared, slots, {"open": opened - start, "share": time.perf_counter() - opened})
    except (LegroomError, OSError, CudaRefused):
        return None


def _refuse_to_make(*_: object) -> None:
    raise CudaRefused("no other process has the copy")


def _copy_name(keys: list[str], slots: Mapping[str, _Slot]) -> str:
    """The name of a copy: the same for the same tensors at the same places."""
    places = [[name, *map(str, (slot.offset, slot.shape, slot.dtype))] for name, slot in slots.items()]
    return "weights " + hashlib.sha256(json.dumps([keys, places]).encode()).hexdigest()


def _layout(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], dtype: torch.dtype | None
) -> tuple[dict[str, _Slot], int]:
    slots: dict[str, _Slot] = {}
    total = 0
    for name, (shape, exact) in sorted(tensors.items()):
        kind = dtype if dtype is not None and exact.is_floating_point else exact
        slots[name] = _Slot(total, shape, kind)
        total += -(-prod(shape) * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
    return slots, max(total, _ALIGNMENT)


def _views(driver: Driver, address: int, slots: Mapping[str, _Slot]) -> dict[str, torch.Tensor]:
    """The tensors in shared GPU memory, each with a storage of its own: a model may save one of them."""
    import torch

    sizes = {name: prod(slot.shape) * slot.dtype.itemsize for name, slot in slots.items()}
    found = iter(driver.at_all(((address + slots[name].offset, size) for name, size in sizes.items() if size), 1))
    return {
        name: next(found).view(slot.dtype).view(slot.shape)
        if sizes[name]
        else torch.empty(slot.shape, dtype=slot.dtype, device=driver.device)
        for name, slot in slots.items()
    }


def _fill(driver: Driver, tensors: Mapping[str, _HostTensor], slots: Mapping[str, _Slot], address: int) -> None:
    import torch

    there = _views(driver, address, slots)
    same = [name for name, slot in slots.items() if slot.dtype == tensors[name].dtype]
    upload(
        driver, (tensors[name].upload(there[name]) for name in same), sum(tensors[name].array.nbytes for name in same)
    )
    for group in _groups([name for name in slots if slots[name].dtype != tensors[name].dtype], tensors):
        total = sum(tensors[name].array.nbytes for name in group)
        try:
            staged = {
                name: torch.empty(slots[name].shape, dtype=tensors[name].dtype, device=driver.device) for name in group
            }
        except RuntimeError as problem:
            raise _no_room(driver, total, str(problem).partition("\n")[0]) from problem
        upload(driver, (tensors[name].upload(tensor) for name, tensor in staged.items()), total)
        for name, tensor in staged.items():
            there[name].copy_(tensor)
        driver.synchronize()
    driver.synchronize()


def _groups(names: Iterable[str], tensors: Mapping[str, _HostTensor]) -> Iterator[list[str]]:
    """Tensors that are converted together: each group takes GPU memory once more for a moment."""
    group: list[str] = []
    size = 0
    for name in names:
        if group and size + tensors[name].array.nbytes > _MOST_STAGED:
            yield group
            group, size = [], 0
        group.append(name)
        size += tensors[name].array.nbytes
    if group:
        yield group


def _check_room(driver: Driver, size: int) -> None:
    free, total = driver.memory()
    if size > free:
        raise _no_room(driver, size, say("{free} of {total} free", free=format_size(free), total=format_size(total)))


def _no_room(driver: Driver, size: int, why: str) -> NoRoom:
    return NoRoom(
        say("the weights do not fit in the memory of {device}", device=driver.device),
        why=say("{size} to copy; {problem}", size=format_size(size), problem=why),
        fix=(say("load them as a smaller type, or fewer: keys=(…)"),),
    )


def _release(driver: Driver, shared: SharedCopy) -> None:
    driver.synchronize()
    shared.close()


def _nothing() -> None:
    return
