"""One CUDA device: the one place of this package where torch.cuda is spoken to.

Covers: opening a device or saying why there is none; its room, torch's figures, the cap, a warm-up.
Does not cover: what is made of the figures. Tests hand in a module of their own in torch's place.
"""

from __future__ import annotations

import os
from typing import Any

from legroom.errors import NoCuda, UsageError
from legroom.model.box import Gpu
from legroom.probe.gpu_devices import gpus
from legroom.probe.host import Host
from legroom.system.imports import require
from legroom.words import phrase, say

_FIX = (
    phrase("check that the driver is there and gives this process a card: nvidia-smi; legroom doctor"),
    phrase(
        "install a torch built for CUDA: python -c 'import torch; print(torch.version.cuda)' says which it is"
    ),
)

_TOLD: dict[int, float] = {}  # by device: the cap last set here


def import_torch(torch: Any = None) -> Any:
    """torch, or MissingPackage."""
    if torch is not None:
        return torch
    return require("torch", "torch", "legroom.gpu")


def why_no_cuda(torch: Any) -> str | None:
    """Why CUDA cannot be used here, or None."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return say("this torch ({version}) is built without CUDA", version=torch.__version__)
    if not os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip():
        return say("CUDA_VISIBLE_DEVICES is empty")
    return say("torch finds no CUDA device: {why}", why=gpus(Host()).reason or say("the driver gives none"))


def open_device(device: Any, would: str, torch: Any = None) -> CudaDevice:
    """The device; NoCuda says what ``would`` have been done with it."""
    torch = import_torch(torch)
    why = why_no_cuda(torch)
    if why is not None:
        raise NoCuda(say("there is no CUDA device: {would}", would=would), why=why, fix=tuple(map(say, _FIX)))
    chosen = torch.device(
        "cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device
    )
    if chosen.type != "cuda":
        raise UsageError(
            say("{device} is no CUDA device", device=chosen),
            why=say("only a card's memory can be asked about here"),
            fix=(say("give device='cuda', 'cuda:1' or a number"),),
        )
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise UsageError(
            say("there is no cuda:{index}", index=index),
            why=say("torch sees {count} device(s)", count=count),
            fix=(say("give a number from 0 to {last}", last=count - 1),),
        )
    return CudaDevice(torch, index)


class CudaDevice:
    """One device, by its number in torch."""

    def __init__(self, torch: Any, index: int) -> None:
        self.torch = torch
        self.index = index
        self.name = f"cuda:{index}"

    # Figures.

    def room(self) -> tuple[int, int]:
        """(free, size) in bytes, as CUDA gives it out."""
        free, size = self.torch.cuda.mem_get_info(self.index)
        return int(free), int(size)

    def stats(self) -> dict[str, int]:
        """torch's counters; empty before the first allocation."""
        return dict(self.torch.cuda.memory_stats(self.index))

    def allocated(self) -> int:
        """Bytes in tensors."""
        return int(self.torch.cuda.memory_allocated(self.index))

    def reserved(self) -> int:
        """Bytes torch's allocator holds of the card."""
        return int(self.torch.cuda.memory_reserved(self.index))

    def peaks(self) -> tuple[int, int]:
        """(allocated, reserved) at their highest since ``reset_peaks``."""
        cuda = self.torch.cuda
        return int(cuda.max_memory_allocated(self.index)), int(cuda.max_memory_reserved(self.index))

    def reset_peaks(self) -> None:
        """Peaks count from now."""
        self.torch.cuda.reset_peak_memory_stats(self.index)

    def retries(self) -> int:
        """Times the allocator met a refusal and flushed its cache."""
        return int(self.stats().get("num_alloc_retries", 0))

    def largest_free(self) -> int | None:
        """The largest block that is cached and free."""
        blocks = [
            int(block["size"])
            for segment in self.torch.cuda.memory_snapshot()
            if segment.get("device") == self.index
            for block in segment.get("blocks", ())
            if block.get("state") == "inactive"
        ]
        return max(blocks, default=0)

    def pinned(self) -> int | None:
        """Host memory held by torch's pinned allocator; None: this torch does not count it."""
        stats: dict[str, int] = getattr(self.torch.cuda, "host_memory_stats", dict)()
        held = stats.get("allocated_bytes.current")
        return None if held is None else int(held)

    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        major, minor = self.torch.cuda.get_device_capability(self.index)
        return int(major), int(minor)

    def backend(self) -> str:
        """Which allocator torch uses: native or cudaMallocAsync."""
        return str(self.torch.cuda.get_allocator_backend())

    def nvml(self) -> Gpu | None:
        """The same card as NVML shows it, found by its uuid: torch numbers cards after CUDA_VISIBLE_DEVICES."""
        uuid = str(getattr(self.torch.cuda.get_device_properties(self.index), "uuid", "")).lower()
        cards = gpus(Host()).cards
        found = [card for card in cards if uuid and uuid in card.uuid.lower()]
        return found[0] if len(found) == 1 else None

    # Actions.

    def has_context(self) -> bool:
        """Whether this process has a context on the card."""
        ask = getattr(self.torch._C, "_cuda_hasPrimaryContext", None)
        return bool(ask(self.index)) if ask is not None else bool(self.torch.cuda.is_initialized())

    def warm_up(self) -> None:
        """Make the context and have the libraries load what any training loads: cuBLAS, cuDNN, common kernels."""
        torch, at = self.torch, {"device": self.name}
        with torch.enable_grad():
            image = torch.ones((2, 4, 16, 16), requires_grad=True, **at)
            weight = torch.ones((4, 4, 3, 3), requires_grad=True, **at)
            square = torch.ones((64, 64), requires_grad=True, **at)
            found = torch.nn.functional.conv2d(image, weight).mean() + (square @ square).softmax(-1).sum()
            found.backward()
            half = torch.ones((64, 64), dtype=torch.float16, **at)
            (half @ half).sum()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the card."""
        self.torch.cuda.synchronize(self.index)

    def empty_cache(self) -> None:
        """Give cached blocks back to the card."""
        with self.torch.cuda.device(self.index):
            self.torch.cuda.empty_cache()

    def set_allowed(self, allowed: int) -> float:
        """Bound what torch's allocator may reserve; gives the fraction torch was told."""
        fraction = min(1.0, allowed / self.torch_size())
        self.set_fraction(fraction)
        return fraction

    def set_fraction(self, fraction: float) -> None:
        """torch's own cap, remembered for a torch that cannot be asked for it."""
        self.torch.cuda.set_per_process_memory_fraction(fraction, self.index)
        _TOLD[self.index] = fraction

    def torch_size(self) -> int:
        """The size that torch takes its fraction of."""
        return int(self.torch.cuda.get_device_properties(self.index).total_memory)

    def fraction(self) -> float | None:
        """The fraction in force; None: this torch does not tell, and it was not set here."""
        ask = getattr(self.torch.cuda, "get_per_process_memory_fraction", None)
        return _TOLD.get(self.index) if ask is None else float(ask(self.index))
