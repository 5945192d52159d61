"""One CUDA device: every call of this package to torch.cuda, and the device's entry in NVML.

Tests pass a fake module in place of torch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from legroom.errors import NoCuda, UsageError
from legroom.messages import counted, phrase, say
from legroom.probe.gpu_devices import gpus
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.machine import Gpu
from legroom.system.lazy_and_optional_imports import require

_FIX = (
    phrase("check that the NVIDIA driver works and this process can see a GPU: nvidia-smi; legroom doctor"),
    phrase(
        "install a torch built for CUDA; this one's CUDA version: python -c 'import torch; print(torch.version.cuda)'"
    ),
)

_ALLOCATOR_BLOCK = 512  # torch's caching allocator rounds every request up to a multiple of this
_LAST_FRACTION: dict[int, float] = {}  # by device index, for a torch that cannot report its fraction


def import_torch(torch: Any = None) -> Any:
    """``torch`` itself if it is given, else the imported module; MissingPackage if it is not installed."""
    if torch is not None:
        return torch
    return require("torch", "torch", "legroom.gpu")


def why_no_cuda(torch: Any) -> str | None:
    """Why CUDA cannot be used here; None if it can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return say("this torch ({version}) is built without CUDA", version=torch.__version__)
    if not os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip():
        return say("CUDA_VISIBLE_DEVICES is empty")
    return say("torch finds no CUDA device: {why}", why=gpus(Host()).reason or say("the driver reports none"))


def allocator_size(size: int) -> int:
    """Bytes that torch's caching allocator sets aside for a request of ``size``."""
    return -(-size // _ALLOCATOR_BLOCK) * _ALLOCATOR_BLOCK


def open_device(device: Any, purpose: str, torch: Any = None) -> CudaDevice:
    """The device that ``device`` names, None for the current one.

    Raises NoCuda, with ``purpose`` in its message, where there is no CUDA, and UsageError for another kind of device or
    an index that does not exist.
    """
    torch = import_torch(torch)
    why = why_no_cuda(torch)
    if why is not None:
        raise NoCuda(say("no CUDA device: cannot {purpose}", purpose=purpose), why=why, fix=tuple(map(say, _FIX)))
    try:
        chosen = torch.device("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)
    except (RuntimeError, TypeError, ValueError) as problem:
        raise UsageError(
            say("{device!r} is not a device", device=device),
            why=str(problem).partition("\n")[0],
            fix=(say("pass device='cuda', 'cuda:1' or an index"),),
        ) from None
    if chosen.type != "cuda":
        raise UsageError(
            say("{device} is not a CUDA device", device=chosen),
            why=say("this function works on GPU memory only"),
            fix=(say("pass device='cuda', 'cuda:1' or an index"),),
        )
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise UsageError(
            say("cuda:{index} does not exist", index=index),
            why=say(
                "torch sees {devices}",
                devices=counted(count, phrase("{count} CUDA device"), phrase("{count} CUDA devices")),
            ),
            fix=(say("pass an index from 0 to {last}", last=count - 1),),
        )
    return CudaDevice(torch, index)


class CudaDevice:
    """One device, by its index in torch."""

    def __init__(self, torch: Any, index: int) -> None:
        self.torch = torch
        self.index = index
        self.name = f"cuda:{index}"

    # Reading.

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, as cudaMemGetInfo reports them."""
        free, total = self.torch.cuda.mem_get_info(self.index)
        return int(free), int(total)

    def total_memory(self) -> int:
        """The size that torch multiplies its per-process fraction by."""
        return int(self.torch.cuda.get_device_properties(self.index).total_memory)

    def stats(self) -> dict[str, int]:
        """torch's allocator counters; empty before the first allocation."""
        return dict(self.torch.cuda.memory_stats(self.index))

    def allocated(self) -> int:
        """Bytes in tensors."""
        return int(self.torch.cuda.memory_allocated(self.index))

    def reserved(self) -> int:
        """Bytes that torch's allocator holds, cached blocks included."""
        return int(self.torch.cuda.memory_reserved(self.index))

    def peaks(self) -> tuple[int, int]:
        """(allocated, reserved) at their highest since ``reset_peaks``."""
        cuda = self.torch.cuda
        return int(cuda.max_memory_allocated(self.index)), int(cuda.max_memory_reserved(self.index))

    def reset_peaks(self) -> None:
        """Start a new measurement of ``peaks``."""
        self.torch.cuda.reset_peak_memory_stats(self.index)

    def retries(self) -> int:
        """How often cudaMalloc failed and the allocator flushed its cache and tried again."""
        return int(self.stats().get("num_alloc_retries", 0))

    def largest_free(self) -> int:
        """Bytes of the largest cached block that is free."""
        blocks = [
            int(block["size"])
            for segment in self.torch.cuda.memory_snapshot()
            if segment.get("device") == self.index
            for block in segment.get("blocks", ())
            if block.get("state") == "inactive"
        ]
        return max(blocks, default=0)

    def shared_maps(self) -> list[tuple[int, int]]:
        """Address and size of copies that this process shares with others: outside torch's allocator."""
        api = sys.modules.get("legroom.gpu.cuda_driver_api")  # not imported: nothing is shared
        return [] if api is None else list(api.shared_maps(self.index))

    def pinned(self) -> int | None:
        """Bytes of host memory in torch's pinned allocator; None: this torch does not count them."""
        stats: dict[str, int] = getattr(self.torch.cuda, "host_memory_stats", dict)()
        held = stats.get("allocated_bytes.current")
        return None if held is None else int(held)

    def backend(self) -> str:
        """The allocator that torch uses: native or cudaMallocAsync."""
        return str(self.torch.cuda.get_allocator_backend())

    def nvml(self) -> Gpu | None:
        """The same device in NVML, matched by UUID: torch's indices follow CUDA_VISIBLE_DEVICES, NVML's do not."""
        uuid = str(getattr(self.torch.cuda.get_device_properties(self.index), "uuid", "")).lower()
        found = [gpu for gpu in gpus(Host()).cards if uuid and uuid in gpu.uuid.lower()]
        return found[0] if len(found) == 1 else None

    def has_context(self) -> bool:
        """Whether this process has a CUDA context on the device."""
        ask = getattr(self.torch._C, "_cuda_hasPrimaryContext", None)
        return bool(ask(self.index)) if ask is not None else bool(self.torch.cuda.is_initialized())

    def fraction(self) -> float | None:
        """torch's active per-process fraction; None: this torch cannot report it, and it was not set here."""
        ask = getattr(self.torch.cuda, "get_per_process_memory_fraction", None)
        return _LAST_FRACTION.get(self.index) if ask is None else float(ask(self.index))

    # Changing.

    def warm_up(self) -> None:
        """Create the context and load what training loads: cuBLAS, cuDNN, common kernels."""
        torch, at = self.torch, {"device": self.name}
        with torch.enable_grad():
            image = torch.ones((2, 4, 16, 16), requires_grad=True, **at)
            weight = torch.ones((4, 4, 3, 3), requires_grad=True, **at)
            square = torch.ones((64, 64), requires_grad=True, **at)
            loss = torch.nn.functional.conv2d(image, weight).mean() + (square @ square).softmax(-1).sum()
            loss.backward()
            half = torch.ones((64, 64), dtype=torch.float16, **at)
            (half @ half).sum()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        self.torch.cuda.synchronize(self.index)

    def empty_cache(self) -> None:
        """Return cached blocks to CUDA."""
        with self.torch.cuda.device(self.index):
            self.torch.cuda.empty_cache()

    def limit_allocator(self, allowed: int) -> float:
        """Limit torch's allocator to ``allowed`` bytes; returns the fraction that was set."""
        fraction = min(1.0, allowed / self.total_memory())
        self.set_fraction(fraction)
        return fraction

    def set_fraction(self, fraction: float) -> None:
        """Set torch's per-process fraction."""
        self.torch.cuda.set_per_process_memory_fraction(fraction, self.index)
        _LAST_FRACTION[self.index] = fraction
