"""A batch, written into a slot: its tensors and arrays as bytes there, everything else as a small pickle.

Covers: what is carried in the slot, what is pickled, how each is put together again. Does not cover: choosing the slot
(arena/pool.py), how long it is held afterwards (arena/inbox.py).

The batch is pickled once, by the pickler that multiprocessing itself uses, with an eye on what it meets: a plain CPU
tensor or a numpy array leaves a placeholder behind and its bytes in the slot. So containers of every kind come through
as pickle brings them, and one tensor that is there twice is one tensor again. Other tensors (subclasses, sparse,
quantised, requiring grad) are taken apart by torch, and the storages underneath lie in the slot. What is on a device
goes torch's own way.

A tensor travels as the bytes from its first to its last element, so it keeps its strides: permuted, expanded,
overlapping. Only one that fills less than half of that memory (a column of a wide table) comes out contiguous. Tensors
whose bytes overlap travel once and share memory again. An array arrives as multiprocessing's own pickle delivers it: as
a copy of its own, writable, in this machine's byte order.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.loader.arena.slot import HEADER, Slot, window

if TYPE_CHECKING:
    import torch

ALIGN = 64  # what torch's own allocator gives
SMALL = 256  # an array below this is as well off in the pickle

NDArray = np.ndarray[Any, Any]
Span = tuple[int, int]


class Writer:
    """Where the next bytes of one batch go; without a slot everything waits for one."""

    def __init__(self, slot: Slot | None) -> None:
        self.slot = slot
        self.exporter = None if slot is None else slot.exporter()
        self.used = 0

    def place(self, nbytes: int) -> NDArray | None:
        """Room for so many bytes, or None."""
        if self.slot is None or self.used + nbytes > self.slot.capacity:
            return None
        offset = self.used
        self.used += -(-nbytes // ALIGN) * ALIGN
        return window(self.exporter, offset, nbytes)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor to be filled: in the slot where there is room, else in memory of this process."""
        import torch

        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        room = self.place(nbytes) if nbytes else None
        return (
            torch.empty(shape, dtype=dtype, device="cpu") if room is None else as_tensor(room, dtype, shape)
        )

    def offset(self, address: int, nbytes: int) -> int | None:
        """Where those bytes lie in the slot, if they do."""
        if self.slot is None:
            return None
        offset = address - self.slot.address - HEADER
        return offset if offset >= 0 and offset + nbytes <= self.slot.capacity else None


class Pieces:
    """What a pickler leaves out, in order. Apart from the pickler, which would otherwise be part of a cycle."""

    def __init__(self) -> None:
        self.all: list[torch.Tensor | NDArray] = []
        self.by_torch = False  # something went torch's own way
        self._ours = False

    def leave(self, piece: torch.Tensor | NDArray) -> pickle.PickleBuffer:
        """The placeholder of a piece; pickle hands it to ``out_of_band`` before anything else."""
        self.all.append(piece)
        self._ours = True
        return pickle.PickleBuffer(bytearray())

    def out_of_band(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stays in the pickle; ours, and large ones of any library's, are left out."""
        if self._ours:
            self._ours = False
            return False
        with memoryview(buffer) as view:
            if view.nbytes < SMALL or not view.contiguous or view.readonly:
                return True
        self.all.append(np.frombuffer(buffer.raw(), np.uint8))
        return False


class Packer(ForkingPickler):
    """Pickles one batch, without what it leaves in ``pieces``."""

    def __init__(self, file: io.BytesIO, pieces: Pieces) -> None:
        super().__init__(file, 5, False, pieces.out_of_band)
        self.pieces = pieces

    def reducer_override(self, obj: Any) -> Any:
        import torch

        kind = type(obj)
        if kind is torch.Tensor:
            return self._tensor(obj)
        if kind is np.ndarray:
            return self._array(obj)
        if kind is torch.UntypedStorage:
            return self._storage(obj)
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if not plain(tensor) or tensor.requires_grad:
            self.pieces.by_torch = True
            return NotImplemented
        shape = tuple(tensor.shape)
        if tensor.numel() == 0:
            return _no_tensor, (tensor.dtype, shape, tensor.stride())
        if tensor.is_contiguous():
            return as_tensor, (self.pieces.leave(tensor), tensor.dtype, shape)
        flat, stride = _flat(tensor)
        return as_strided, (self.pieces.leave(flat), tensor.dtype, shape, stride)

    def _array(self, array: NDArray) -> Any:
        if array.dtype.hasobject or array.nbytes < SMALL:
            # As the queue's own pickler does it: protocol 5 would keep a read-only array read-only.
            return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        as_it_is = pickle.DEFAULT_PROTOCOL >= 5 and (array.flags.c_contiguous or order == "F")
        if array.dtype.byteorder in "<>" and not as_it_is:  # numpy writes "=" for this machine's own
            array = array.astype(array.dtype.newbyteorder("="))
        flat = np.ascontiguousarray(array.T if order == "F" else array)
        fixed = as_it_is and not array.flags.writeable
        return _as_array, (self.pieces.leave(flat), array.dtype, array.shape, order, fixed)

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        import torch

        if storage.device.type != "cpu" or not storage.nbytes():
            self.pieces.by_torch = True
            return NotImplemented
        flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return _as_storage, (self.pieces.leave(flat),)


def pickled(batch: object) -> tuple[bytes, Pieces]:
    """The batch without its bytes, and those."""
    file, pieces = io.BytesIO(), Pieces()
    Packer(file, pieces).dump(batch)
    return file.getvalue(), pieces


class Region:
    """Memory of this process that goes into the slot as it lies, with the pieces in it (by number)."""

    __slots__ = ("address", "end", "members")

    def __init__(self, piece: torch.Tensor | NDArray, number: int) -> None:
        self.address = _address(piece)
        self.end = self.address + piece.nbytes
        self.members = [number]

    @property
    def lead(self) -> int:
        """Bytes to leave free before it, so that each of several pieces stays aligned as it is."""
        return self.address % ALIGN if len(self.members) > 1 else 0

    @property
    def room(self) -> int:
        """The bytes it takes in a slot."""
        return -(-(self.lead + self.end - self.address) // ALIGN) * ALIGN


def regions(pieces: list[torch.Tensor | NDArray]) -> list[Region]:
    """Where the pieces lie. Tensors that overlap in one storage are one region; nothing else shares memory in torch."""
    found = [Region(piece, number) for number, piece in enumerate(pieces)]
    if len(found) == 1 or not _overlap(sorted(found, key=lambda region: region.address)):
        return found
    merged: list[Region] = []
    last: tuple[object, Region] | None = None
    for storage, region in sorted(
        ((_storage_of(pieces[region.members[0]]), region) for region in found),
        key=lambda pair: (pair[0], pair[1].address),
    ):
        if last is not None and storage and storage == last[0] and region.address < last[1].end:
            last[1].end = max(last[1].end, region.end)
            last[1].members += region.members
        else:
            merged.append(region)
            last = storage, region
    return merged


def _overlap(found: list[Region]) -> bool:
    return any(later.address < earlier.end for earlier, later in pairwise(found))


def _storage_of(piece: torch.Tensor | NDArray) -> int:
    """The identity of a tensor's storage; 0 for an array."""
    return 0 if isinstance(piece, np.ndarray) else piece.untyped_storage()._cdata


def needed(found: list[Region]) -> int:
    """The bytes that all regions take in a slot."""
    return sum(region.room for region in found)


def stacked(sample: Any) -> int:
    """The bytes that one more sample like this adds to a batch of torch's default collate, at the most."""
    if isinstance(sample, Mapping):
        return sum(stacked(value) for value in sample.values())
    if isinstance(sample, (list, tuple)):
        return sum(stacked(value) for value in sample)
    if isinstance(sample, (int, float)):
        return ALIGN  # eight bytes, or the rest of a line that a tensor of few samples does not fill
    nbytes = getattr(sample, "nbytes", 0)
    return nbytes + ALIGN if isinstance(nbytes, int) and nbytes else 0


def write(pieces: list[torch.Tensor | NDArray], found: list[Region], writer: Writer) -> list[Span] | None:
    """Put every region into the slot that is not there yet. Where each piece lies, or None if they do not all fit."""
    spans: list[Span] = [(0, 0)] * len(pieces)
    taken: list[Span] = []  # of the slot, by regions that lie there already: regions do not share memory
    for region in found:
        nbytes = region.end - region.address
        offset = writer.offset(region.address, nbytes)
        if offset is not None and not any(
            start < offset + nbytes and offset < start + length for start, length in taken
        ):
            taken.append((offset, nbytes))
        else:
            lead = region.lead
            room = writer.place(lead + nbytes)
            if room is None or writer.slot is None:
                return None
            _copy(region, pieces[region.members[0]], room[lead:])
            offset = room.ctypes.data + lead - writer.slot.address - HEADER
        if len(region.members) == 1:
            spans[region.members[0]] = (offset, nbytes)
            continue
        for number in region.members:
            piece = pieces[number]
            spans[number] = (offset + _address(piece) - region.address, piece.nbytes)
    return spans


def plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is just numbers in memory of this process."""
    import torch

    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def _flat(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The memory of a tensor that is not contiguous, in one line, and the strides that make the tensor of it."""
    shape, stride = tensor.shape, tensor.stride()
    span, distinct = 1, 1
    for size, step in zip(shape, stride, strict=True):
        span += (size - 1) * step
        distinct *= size if step else 1
    if span <= 2 * distinct:
        return tensor.as_strided((span,), (1,)), stride
    # What was expanded stays so: a size of 1 there, and the stride 0 again on the other side.
    once = tensor.as_strided([size if step else 1 for size, step in zip(shape, stride, strict=True)], stride)
    packed = once.contiguous()
    steps = [new if old else 0 for new, old in zip(packed.stride(), stride, strict=True)]
    return packed.view(-1), tuple(steps)


def _address(piece: torch.Tensor | NDArray) -> int:
    return piece.ctypes.data if isinstance(piece, np.ndarray) else piece.data_ptr()


def _copy(region: Region, first: torch.Tensor | NDArray, room: NDArray) -> None:
    if isinstance(first, np.ndarray):
        room[:] = first.reshape(-1).view(np.uint8)
    elif len(region.members) == 1:
        as_tensor(room, first.dtype, tuple(first.shape)).copy_(first)
    else:
        ctypes.memmove(room.ctypes.data, region.address, region.end - region.address)


# What pickle calls on the other side, with the bytes first.


def as_tensor(room: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on those bytes, with a storage of exactly them.

    By way of numpy, where it has the type: making a view is an operation of torch's, which lets other threads have the
    interpreter meanwhile, and getting it back from the queue's own thread takes longer than all the rest.
    """
    import torch

    kind = _numpy_types().get(dtype)
    if kind is None:
        return torch.frombuffer(room, dtype=dtype).view(shape)
    return torch.from_numpy(np.ndarray(shape, kind, room))


@cache
def _numpy_types() -> dict[torch.dtype, np.dtype[Any]]:
    """What numpy calls torch's types; bfloat16 and others it does not have."""
    import torch

    names = [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
    return {getattr(torch, name): np.dtype(name) for name in names}


def as_strided(
    room: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """The same for a dense tensor in another order of dimensions."""
    import torch

    return torch.frombuffer(room, dtype=dtype).as_strided(shape, stride)


def _no_tensor(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


def _as_array(room: Any, dtype: Any, shape: tuple[int, ...], order: Any, fixed: bool) -> NDArray:
    array: NDArray = np.ndarray(shape, dtype, room, order=order)
    array.flags.writeable = not fixed
    return array


def _as_storage(room: Any) -> torch.UntypedStorage:
    import torch

    return torch.frombuffer(room, dtype=torch.uint8).untyped_storage()
