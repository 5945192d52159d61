"""Writes a batch into a slot: its tensors and arrays as bytes, everything else as a small pickle.

The batch is pickled once, by the pickler that multiprocessing uses. A plain CPU tensor or a numpy array leaves a
placeholder in the pickle and its bytes in the slot. So every kind of container arrives as pickle restores it, and a
tensor that occurs twice is one tensor again. Other tensors (subclasses, sparse, quantised, requiring grad) are reduced
by torch, and their storages are in the slot. Tensors on a device are sent by torch.

A tensor is sent as the bytes from its first to its last element, so it keeps its strides: permuted, expanded,
overlapping. Only one that fills less than half of that memory (a column of a wide table) arrives contiguous. Tensors
whose bytes overlap are sent once and share memory again. An array arrives as multiprocessing's own pickle delivers it:
as a separate copy, writable, in this machine's byte order.
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

from legroom.loader.dataloader.memory_slots import HEADER, NDArray, Slot, window
from legroom.loader.dataloader.torch_internals import storage_id

if TYPE_CHECKING:
    import torch

ALIGN = 64  # what torch's own allocator gives
SMALL = 256  # bytes: smaller arrays stay in the pickle

Span = tuple[int, int]


class SlotWriter:
    """Allocates the bytes of one batch in a slot; without a slot it allocates nothing there."""

    def __init__(self, slot: Slot | None) -> None:
        self.slot = slot
        self.exporter = None if slot is None else slot.exporter()
        self.used = 0

    def allocate(self, nbytes: int) -> NDArray | None:
        """Space for so many bytes, or None."""
        if self.slot is None or self.used + nbytes > self.slot.capacity:
            return None
        offset = self.used
        self.used += -(-nbytes // ALIGN) * ALIGN
        return window(self.exporter, offset, nbytes)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor to fill: in the slot if there is space, else in private memory."""
        import torch

        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        space = self.allocate(nbytes) if nbytes else None
        if space is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return as_tensor(space, dtype, shape)

    def offset(self, address: int, nbytes: int) -> int | None:
        """The offset of these bytes in the slot, or None."""
        if self.slot is None:
            return None
        offset = address - self.slot.address - HEADER
        return offset if offset >= 0 and offset + nbytes <= self.slot.capacity else None


class Buffers:
    """What a pickler leaves out, in order. Separate from the pickler, which would otherwise be part of a cycle."""

    def __init__(self) -> None:
        self.all: list[torch.Tensor | NDArray] = []
        self.by_torch = False  # torch sends a part of the batch
        self._ours = False  # the next buffer that pickle reports is one of ours

    def leave_out(self, piece: torch.Tensor | NDArray) -> pickle.PickleBuffer:
        """The placeholder of a piece; pickle passes it to ``in_band`` before anything else."""
        self.all.append(piece)
        self._ours = True
        return pickle.PickleBuffer(bytearray())

    def in_band(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stays in the pickle; ours, and large ones of other libraries, are left out."""
        if self._ours:
            self._ours = False
            return False
        with memoryview(buffer) as view:
            if view.nbytes < SMALL or not view.contiguous or view.readonly:
                return True
        self.all.append(np.frombuffer(buffer.raw(), np.uint8))
        return False


class BatchPickler(ForkingPickler):
    """Pickles one batch, without what it leaves in ``buffers``."""

    def __init__(self, file: io.BytesIO, buffers: Buffers) -> None:
        super().__init__(file, 5, False, buffers.in_band)
        self.buffers = buffers

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
        if not is_plain(tensor) or tensor.requires_grad:
            self.buffers.by_torch = True
            return NotImplemented
        shape = tuple(tensor.shape)
        if tensor.numel() == 0:
            return _empty_tensor, (tensor.dtype, shape, tensor.stride())
        if tensor.is_contiguous():
            return as_tensor, (self.buffers.leave_out(tensor), tensor.dtype, shape)
        flat, stride = _flat(tensor)
        return as_strided, (self.buffers.leave_out(flat), tensor.dtype, shape, stride)

    def _array(self, array: NDArray) -> Any:
        if array.dtype.hasobject or array.nbytes < SMALL:
            # As the queue's own pickler does: protocol 5 would keep a read-only array read-only.
            return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        as_it_is = pickle.DEFAULT_PROTOCOL >= 5 and (array.flags.c_contiguous or order == "F")
        if array.dtype.byteorder in "<>" and not as_it_is:  # numpy writes "=" for this machine's own
            array = array.astype(array.dtype.newbyteorder("="))
        flat = np.ascontiguousarray(array.T if order == "F" else array)
        read_only = as_it_is and not array.flags.writeable
        return _as_array, (self.buffers.leave_out(flat), array.dtype, array.shape, order, read_only)

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        import torch

        if storage.device.type != "cpu" or not storage.nbytes():
            self.buffers.by_torch = True
            return NotImplemented
        flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return _as_storage, (self.buffers.leave_out(flat),)


def pickle_batch(batch: object) -> tuple[bytes, Buffers]:
    """The pickle without the bytes of tensors and arrays, and these."""
    file, buffers = io.BytesIO(), Buffers()
    BatchPickler(file, buffers).dump(batch)
    return file.getvalue(), buffers


class Region:
    """A range of memory that is copied to the slot as it is, and the numbers of the pieces in it."""

    __slots__ = ("address", "end", "members")

    def __init__(self, piece: torch.Tensor | NDArray, number: int) -> None:
        self.address = _address(piece)
        self.end = self.address + piece.nbytes
        self.members = [number]

    @property
    def lead(self) -> int:
        """Bytes to leave free before it, so that each of several pieces keeps its alignment."""
        return self.address % ALIGN if len(self.members) > 1 else 0

    @property
    def size(self) -> int:
        """Bytes in a slot."""
        return -(-(self.lead + self.end - self.address) // ALIGN) * ALIGN


def find_regions(pieces: list[torch.Tensor | NDArray]) -> list[Region]:
    """The regions of all pieces. Tensors that overlap in one storage are one region; no others share memory."""
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
    return 0 if isinstance(piece, np.ndarray) else storage_id(piece)


def bytes_needed(found: list[Region]) -> int:
    """Bytes of all regions in a slot."""
    return sum(region.size for region in found)


def stacked_bytes(sample: Any) -> int:
    """The most bytes that a sample like this adds to a batch of torch's default_collate."""
    if isinstance(sample, Mapping):
        return sum(stacked_bytes(value) for value in sample.values())
    if isinstance(sample, (list, tuple)):
        return sum(stacked_bytes(value) for value in sample)
    if isinstance(sample, (int, float)):
        return ALIGN  # eight bytes, or the rest of the alignment in a tensor of few samples
    nbytes = getattr(sample, "nbytes", 0)
    return nbytes + ALIGN if isinstance(nbytes, int) and nbytes else 0


def write_regions(pieces: list[torch.Tensor | NDArray], found: list[Region], writer: SlotWriter) -> list[Span] | None:
    """Copy every region into the slot that is not there yet. The span of each piece, or None if they do not all fit."""
    spans: list[Span] = [(0, 0)] * len(pieces)
    taken: list[Span] = []  # of regions that were in the slot already: regions do not share memory
    for region in found:
        nbytes = region.end - region.address
        offset = writer.offset(region.address, nbytes)
        if offset is not None and not any(
            start < offset + nbytes and offset < start + length for start, length in taken
        ):
            taken.append((offset, nbytes))
        else:
            lead = region.lead
            space = writer.allocate(lead + nbytes)
            if space is None or writer.slot is None:
                return None
            _copy(region, pieces[region.members[0]], space[lead:])
            offset = space.ctypes.data + lead - writer.slot.address - HEADER
        if len(region.members) == 1:
            spans[region.members[0]] = (offset, nbytes)
            continue
        for number in region.members:
            piece = pieces[number]
            spans[number] = (offset + _address(piece) - region.address, piece.nbytes)
    return spans


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain numbers in CPU memory."""
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
    """The memory of a tensor that is not contiguous as one dimension, and the strides that restore the tensor."""
    shape, stride = tensor.shape, tensor.stride()
    span, distinct = 1, 1
    for size, step in zip(shape, stride, strict=True):
        span += (size - 1) * step
        distinct *= size if step else 1
    if span <= 2 * distinct:
        return tensor.as_strided((span,), (1,)), stride
    # Expanded dimensions are sent with size 1, and get their stride 0 again on the other side.
    once = tensor.as_strided([size if step else 1 for size, step in zip(shape, stride, strict=True)], stride)
    packed = once.contiguous()
    steps = [new if old else 0 for new, old in zip(packed.stride(), stride, strict=True)]
    return packed.view(-1), tuple(steps)


def _address(piece: torch.Tensor | NDArray) -> int:
    return piece.ctypes.data if isinstance(piece, np.ndarray) else piece.data_ptr()


def _copy(region: Region, first: torch.Tensor | NDArray, space: NDArray) -> None:
    if isinstance(first, np.ndarray):
        space[:] = first.reshape(-1).view(np.uint8)
    elif len(region.members) == 1:
        as_tensor(space, first.dtype, tuple(first.shape)).copy_(first)
    else:
        ctypes.memmove(space.ctypes.data, region.address, region.end - region.address)


# Called by pickle in the training process, with the bytes first.


def as_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on these bytes, with a storage of exactly these bytes.

    Made through numpy, where it has the type: a view is an operation of torch, which releases the GIL, and to get it
    back from the queue's thread takes longer than all the rest.
    """
    import torch

    kind = _numpy_types().get(dtype)
    if kind is None:
        return torch.frombuffer(data, dtype=dtype).view(shape)
    return torch.from_numpy(np.ndarray(shape, kind, data))


@cache
def _numpy_types() -> dict[torch.dtype, np.dtype[Any]]:
    """numpy's names of torch's types; it has no bfloat16, among others."""
    import torch

    names = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64",
             "complex128")  # fmt: skip
    return {getattr(torch, name): np.dtype(name) for name in names}


def as_strided(data: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """The same for a tensor that is not contiguous."""
    import torch

    return torch.frombuffer(data, dtype=dtype).as_strided(shape, stride)


def _empty_tensor(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


def _as_array(data: Any, dtype: Any, shape: tuple[int, ...], order: Any, read_only: bool) -> NDArray:
    array: NDArray = np.ndarray(shape, dtype, data, order=order)
    array.flags.writeable = not read_only
    return array


def _as_storage(data: Any) -> torch.UntypedStorage:
    import torch

    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
