"""legroom.gpu.tf32: switch TF32 for matrix products and convolutions on or off.

torch has two sets of flags. Once the newer one (fp32_precision) is set, reading the older one (allow_tf32,
set_float32_matmul_precision) raises, in any library that does. So the older set is used while it can be read, and the
newer one where the older is gone or the program has already set the newer. Never both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legroom.gpu.torch_cuda_device import import_torch
from legroom.messages import say
from legroom.records.gpu_results import Tf32
from legroom.system.argument_checks import check_arguments

_FIRST_CAPABILITY = 8  # TF32 came with compute capability 8.0 (Ampere)


def tf32(on: bool = True, *, device: Any = None) -> Tf32:
    """Allow or forbid TF32 in float32 matrix products and convolutions; returns the flags as torch reads them back.

    Args:
        on: Whether TF32 is allowed.
        device: The GPU to check for TF32 support; None is the current one.
    """
    check_arguments(tf32, locals())
    return set_tf32(import_torch(), bool(on), device)


def set_tf32(torch: Any, on: bool, device: Any = None) -> Tf32:
    """``tf32`` with the torch module as an argument."""
    capable, note = _support(torch, device)  # first: it refuses a device that is not a GPU
    flags = _set_older(torch, on)
    family = "allow_tf32" if flags is not None else "fp32_precision"
    if flags is None:
        flags = _set_newer(torch, on)
    return Tf32(on, family, flags, capable, note)  # type: ignore[arg-type]


def _set_older(torch: Any, on: bool) -> Mapping[str, object] | None:
    """Set the older flags; None, with nothing changed, where they cannot be read."""
    if not hasattr(torch, "set_float32_matmul_precision"):
        return None
    try:
        torch.get_float32_matmul_precision()
        _ = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except (RuntimeError, AttributeError):  # the newer flags are set, or the older ones are gone
        return None
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
    }


def _set_newer(torch: Any, on: bool) -> Mapping[str, object]:
    backends = {
        "cuda.matmul.fp32_precision": torch.backends.cuda.matmul,
        "cudnn.conv.fp32_precision": torch.backends.cudnn.conv,
        "cudnn.rnn.fp32_precision": torch.backends.cudnn.rnn,
    }
    for backend in backends.values():
        backend.fp32_precision = "tf32" if on else "ieee"
    return {name: backend.fp32_precision for name, backend in backends.items()}


def _support(torch: Any, device: Any) -> tuple[bool | None, str | None]:
    """Whether the GPU has TF32, and a note where the flags have no effect."""
    if not torch.cuda.is_available():
        return None, say("no CUDA device: the flags are set, but have no effect on the CPU")
    major, minor = torch.cuda.get_device_capability(device)
    if major >= _FIRST_CAPABILITY:
        return True, None
    note = say(
        "this GPU (compute capability {major}.{minor}) does not support TF32, which needs 8.0: the flags have no "
        "effect",
        major=major, minor=minor,
    )  # fmt: skip
    return False, note
