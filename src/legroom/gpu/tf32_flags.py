"""legroom.gpu.tf32: TF32 for matrix products and convolutions, on or off.

Covers: choosing one family of torch's flags, setting and reading it back, saying when the card has no TF32.
Does not cover: bf16 and fp16, which are autocast's.

torch has two families. The older (allow_tf32, set_float32_matmul_precision) leaves everything readable; once the newer
(fp32_precision) is set, reading the older raises, in whatever library does so. So the older is used where it still
answers, and the newer where it is gone or somebody has set the newer already. Never both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legroom.gpu.cuda_device import import_torch
from legroom.model.gpu import Tf32
from legroom.words import say

_SINCE = 8  # the compute capability that brought TF32 (Ampere)


def tf32(on: bool = True, *, device: Any = None) -> Tf32:
    """Let float32 products and convolutions use TF32, or not; gives what was set, as torch reads it back.

    Args:
        on: Whether they may.
        device: The card that is asked whether it has TF32; None is the current one.
    """
    return set_tf32(import_torch(), on, device)


def set_tf32(torch: Any, on: bool, device: Any = None) -> Tf32:
    """The same for a torch that is handed in."""
    flags = _older(torch, on)
    family = "allow_tf32" if flags is not None else "fp32_precision"
    if flags is None:
        flags = _newer(torch, on)
    capable, note = _card(torch, device)
    return Tf32(on, family, flags, capable, note)  # type: ignore[arg-type]


def _older(torch: Any, on: bool) -> Mapping[str, object] | None:
    """The older family set; None where it does not answer, and then nothing was changed."""
    if not hasattr(torch, "set_float32_matmul_precision"):
        return None
    try:
        torch.get_float32_matmul_precision()
        _ = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except (RuntimeError, AttributeError):  # mixed with the newer family, or gone
        return None
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
    }


def _newer(torch: Any, on: bool) -> Mapping[str, object]:
    places = {
        "cuda.matmul.fp32_precision": torch.backends.cuda.matmul,
        "cudnn.conv.fp32_precision": torch.backends.cudnn.conv,
        "cudnn.rnn.fp32_precision": torch.backends.cudnn.rnn,
    }
    for place in places.values():
        place.fp32_precision = "tf32" if on else "ieee"
    return {name: place.fp32_precision for name, place in places.items()}


def _card(torch: Any, device: Any) -> tuple[bool | None, str | None]:
    if not torch.cuda.is_available():
        return None, say("there is no CUDA device: the flags are set and change nothing on the CPU")
    major, minor = torch.cuda.get_device_capability(device)
    if major >= _SINCE:
        return True, None
    note = say(
        "this card (compute capability {major}.{minor}) has no TF32, which came with 8.0: nothing changes",
        major=major, minor=minor,
    )  # fmt: skip
    return False, note
