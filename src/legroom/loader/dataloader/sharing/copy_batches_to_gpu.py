"""In a trainer: brings batches to its GPU, as private tensors that can be written.

A batch of the group is copied from the host once for all trainers on a GPU, into a ring in shared GPU memory
(``assign_copies_to_gpu.py`` decides who does it). Every trainer copies its tensors from there within the GPU, and
releases the slot of the ring when that copy is done. Where a batch is not in the ring, the trainer copies it from
pinned memory of its own. So no trainer depends on another: one that is stopped or killed costs the others a fraction of
a second once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from legroom.errors import UsageError
from legroom.gpu.cuda_driver_api import READ_WRITE, CudaRefused, DriverApi
from legroom.loader.dataloader.pin_memory import map_batch
from legroom.loader.dataloader.sharing.assign_copies_to_gpu import Claim, RingMemory
from legroom.loader.shared_gpu_memory import SharedCopy, share
from legroom.messages import say
from legroom.units import format_size

if TYPE_CHECKING:
    import torch

_LEFT = 10  # of the GPU's memory, this part stays free


class OnHost(NamedTuple):
    """A batch of the group in its slot on the host."""

    serial: int
    address: int  # of the slot's data
    nbytes: int


class ClaimAnswer(NamedTuple):
    """What the producer answered to a claim."""

    claim: Claim
    slot: int
    memory: RingMemory
    create: bool  # this trainer makes the memory; others map what is there
    tell: Callable[[str, int], None]  # tells the producer what was done with the batch


Ask = Callable[
    [int, int], ClaimAnswer | None
]  # claims a batch of so many bytes; None: this trainer copies it for itself


class _Gone(Exception):
    """No process has the memory of a ring any more."""


class GpuBatches:
    """The batches of one trainer on its GPU."""

    def __init__(self, gpu: CudaGpu, store: Path) -> None:
        self.gpu, self.uuid = gpu, ""
        self.pid = os.getpid()
        self._store = store
        self._ring: SharedCopy | None = None
        self._memory: RingMemory | None = None
        self._reading: list[tuple[Any, int, ClaimAnswer]] = []
        self.why_own = gpu.why_no_ring()  # why this trainer uses no ring
        if self.why_own is None:
            gpu.api.enter()
            self.uuid = gpu.api.uuid()

    @property
    def why(self) -> str:
        """How batches come to the GPU."""
        if self.why_own is None:
            return say("batches are copied to {device} once for all trainers on it", device=self.gpu.name)
        return say("each trainer copies its batches to {device}: {why}", device=self.gpu.name, why=self.why_own)

    def moved(self, batch: Any, where: OnHost | None, ask: Ask) -> Any:
        """The batch with all tensors on the GPU; what is no tensor stays as it is."""
        self.release_read()
        base = None
        if where is not None and self.uuid and self.why_own is None:
            base = self._in_ring(where, ask) if _any_in_slot(batch, where) else None
        made: dict[int, Any] = {}

        def move(one: Any) -> Any:
            if id(one) not in made:  # what is one tensor stays one
                made[id(one)] = one, self._leaf(one, where, base)
            return made[id(one)][1]

        try:
            return map_batch(batch, move)
        finally:  # also if the memory of the GPU does not suffice
            if base is not None and where is not None:
                self._reading.append((self.gpu.mark(), where.serial, base[1]))

    def _leaf(self, one: Any, where: OnHost | None, base: tuple[int, ClaimAnswer] | None) -> Any:
        import torch

        if base is not None and where is not None and _in_slot(one, where):
            return self.gpu.private(one, base[0] + one.data_ptr() - where.address)
        if isinstance(one, torch.Tensor) or (hasattr(one, "pin_memory") and hasattr(one, "to")):
            return self.gpu.own(one)
        return None

    def _in_ring(self, where: OnHost, ask: Ask) -> tuple[int, ClaimAnswer] | None:
        """The GPU address of a batch in the ring, copied there if this trainer is the first; None: not in the ring."""
        answer = ask(where.serial, where.nbytes)
        if answer is None:
            return None
        try:
            address = self._map(answer, where.serial) + answer.slot * answer.memory.nbytes
            if answer.claim is Claim.COPY:
                self.gpu.upload(_bytes_at(where.address, where.nbytes), address)
                answer.tell("copied", where.serial)
            return address, answer
        except _Gone:  # with the last trainer that had it
            answer.tell("no-copy" if answer.claim is Claim.COPY else "read", where.serial)
            return None
        except (CudaRefused, OSError) as refusal:
            self.why_own = str(refusal)
            answer.tell("no-ring", where.serial)
            self.close()
            return None

    def _map(self, answer: ClaimAnswer, serial: int) -> int:
        memory = answer.memory
        if self._ring is None or self._memory != memory:
            self.close()
            total = memory.nbytes * memory.slots

            def fill(_: int) -> None:
                if not answer.create:
                    raise _Gone

            def check_room() -> None:
                if answer.create:
                    self._check_room(total)

            ring = share(self.gpu.api, self._store, memory.name, total, fill, check_room=check_room)
            self._ring, self._memory = ring, memory
            ring.api.set_access(ring.address, ring.size, READ_WRITE)  # for when this trainer copies
            answer.tell("mapped", serial)
        return self._ring.address

    def _check_room(self, total: int) -> None:
        free, size = self.gpu.memory()
        if total > free - size // _LEFT:
            raise CudaRefused(
                say("the batches need {total} of GPU memory; {free} of {size} free", total=format_size(total),
                    free=format_size(free), size=format_size(size))
            )  # fmt: skip

    def release_read(self) -> None:
        """Tell the producer which batches this trainer has read."""
        while self._reading and self.gpu.done(self._reading[0][0]):
            _, serial, answer = self._reading.pop(0)
            answer.tell("read", serial)

    def close(self) -> None:
        """Unmap the ring, when nothing reads it any more."""
        if self.pid != os.getpid():
            return
        if self._reading:
            self.gpu.wait()
            self.release_read()
        ring, self._ring, self._memory = self._ring, None, None
        if ring is not None:
            self.gpu.wait()
            ring.close()


def _any_in_slot(batch: Any, where: OnHost) -> bool:
    found = False

    def look(one: Any) -> Any:
        nonlocal found
        found = found or _in_slot(one, where)
        return one if found else None  # nothing further is needed

    map_batch(batch, look)
    return found


def _in_slot(one: Any, where: OnHost) -> bool:
    """Whether it is a tensor with its bytes in the slot, in a layout that can be copied byte by byte."""
    import torch

    if type(one) is not torch.Tensor or one.layout is not torch.strided or one.requires_grad or not one.numel():
        return False
    if one.is_conj() or one.is_neg() or one.is_quantized or one.device.type != "cpu":
        return False
    return where.address <= one.data_ptr() and one.data_ptr() + extent(one) <= where.address + where.nbytes


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _bytes_at(address: int, nbytes: int) -> np.ndarray[Any, Any]:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))


def gpu_of(device: object) -> CudaGpu:
    """The GPU of the argument ``device``: "cuda", "cuda:1", 1 or a torch.device."""
    import torch

    try:
        asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(str(device))
    except RuntimeError as problem:
        raise UsageError(
            say("{device!r} is not a device", device=device), why=str(problem).partition("\n")[0],
            fix=("device='cuda'",),
        ) from problem  # fmt: skip
    if asked.type != "cuda":
        raise UsageError(
            say("{device} is not a CUDA device", device=asked), fix=(say("device='cuda', or device=None"),)
        )
    if not torch.cuda.is_available():
        raise UsageError(
            say("CUDA is not available"),
            why=say("torch {version} is built without CUDA", version=torch.__version__)
            if torch.version.cuda is None
            else say("torch {version} finds no usable GPU", version=torch.__version__),
            fix=(say("device=None returns batches in RAM"), say("list the GPUs:\nlegroom doctor")),
        )
    return CudaGpu(torch.device("cuda", torch.cuda.current_device() if asked.index is None else asked.index))


class CudaGpu:
    """A CUDA device, with a stream of its own for the copies."""

    api: DriverApi

    def __init__(self, device: torch.device) -> None:
        import torch

        self.name, self._device = str(device), device
        self._torch: Any = torch
        self._stream: Any = self._torch.cuda.Stream(device)
        self._staging: Any = None
        self._why: str | None = None
        if torch.version.hip is not None:
            self._why = say("torch is built for ROCm")
            return
        try:
            self.api = DriverApi(device.index)
        except CudaRefused as refusal:
            self._why = str(refusal)

    def why_no_ring(self) -> str | None:
        """Why GPU memory cannot be shared, or None."""
        return self._why or self.api.why_no_shared_memory()

    def upload(self, source: np.ndarray[Any, Any], address: int) -> None:
        """Copy bytes from the host to a GPU address; they are there when this returns.

        Through pinned memory of this process: the slot's private map must not be registered with CUDA.
        """
        use = self._torch
        try:
            if self._staging is None or self._staging.numel() < source.nbytes:
                self._staging = use.empty(source.nbytes, dtype=use.uint8, device="cpu", pin_memory=True)
            staged = self._staging[: source.nbytes]
            staged.copy_(use.from_numpy(source))
            with use.cuda.stream(self._stream):
                self._at(address, source.nbytes).copy_(staged, non_blocking=True)
                event = use.cuda.Event()
                event.record(self._stream)
            event.synchronize()
        except RuntimeError as problem:
            raise CudaRefused(str(problem).partition("\n")[0]) from problem

    def private(self, like: torch.Tensor, address: int) -> torch.Tensor:
        """Queue a copy of a tensor like this one, which is at a GPU address, into memory of this process."""
        use = self._torch
        current = use.cuda.current_stream(self._device)
        with use.cuda.stream(self._stream):
            made: torch.Tensor = use.empty_like(like, device=self._device)
            there = self._at(address, extent(like)).view(like.dtype).as_strided(like.size(), like.stride())
            made.copy_(there, non_blocking=True)
        current.wait_stream(self._stream)
        made.record_stream(current)
        return made

    def _at(self, address: int, nbytes: int) -> torch.Tensor:
        with self._torch.cuda.device(self._device):
            found: torch.Tensor = self._torch.as_tensor(_Bytes(address, nbytes), device=self._device)
        if found.data_ptr() != address:
            raise CudaRefused(say("torch copies GPU memory instead of using it in place"))
        return found

    def mark(self) -> Any:
        """An object that covers the copies that are queued."""
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event

    def done(self, mark: Any) -> bool:
        """Whether those are done."""
        return bool(mark.query())

    def own(self, tensor: Any) -> Any:
        """A copy of a tensor of the host, or of a type with its methods, through pinned memory of this process."""
        if not isinstance(tensor, self._torch.Tensor) or tensor.device.type != "cpu":
            return tensor.to(self._device)
        if tensor.layout is not self._torch.strided:
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def wait(self) -> None:
        """Wait until all copies are done."""
        self._stream.synchronize()

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = self._torch.cuda.mem_get_info(self._device)
        return int(free), int(total)


class _Bytes:
    """A GPU address with ``__cuda_array_interface__``, which torch accepts as a CUDA array."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),  # torch refuses an array marked read-only
            "shape": (nbytes,), "strides": None, "typestr": "|u1", "version": 3,
        }  # fmt: skip
