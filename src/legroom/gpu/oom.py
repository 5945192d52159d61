"""Running out of memory, told from every other error.

Covers: recognising it by type; cleaning up after it. Does not cover: what to do next (finder.py, survive.py).

Most of it has a type. Three kinds are plain RuntimeErrors of torch's own, and those are known by how their text starts,
never by the words "out of memory" somewhere in it: a user's own RuntimeError about memory is the user's.
"""

from __future__ import annotations

import gc
import re
import traceback
from typing import Any, Literal

Kind = Literal["gpu", "host"]

_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_GPU = re.compile(
    r"CUDA error: (?:out of memory|CUBLAS_STATUS_ALLOC_FAILED)|cuDNN error: CUDNN_STATUS_ALLOC_FAILED"
)
_HOST = re.compile(
    r"(?:\[enforce fail at [^\]]*\] .{0,40})?DefaultCPUAllocator: (?:can't allocate|not enough) memory"
)


def is_oom(problem: BaseException) -> Kind | None:
    """``"gpu"`` or ``"host"`` where memory ran out, None where it is something else.

    Args:
        problem: An exception that was caught. It is known by its type; where torch raises a plain RuntimeError, by how
            its text begins. One of your own that speaks of memory is something else.
    """
    if isinstance(problem, MemoryError):
        return "host"
    if not isinstance(problem, RuntimeError):
        return None
    import torch

    if isinstance(
        problem, torch.OutOfMemoryError if hasattr(torch, "OutOfMemoryError") else torch.cuda.OutOfMemoryError
    ):
        return "gpu"
    accelerator: Any = getattr(torch, "AcceleratorError", None)
    if accelerator is not None and isinstance(problem, accelerator):
        return "gpu" if getattr(problem, "error_code", None) == _CUDA_OUT_OF_MEMORY else None
    if type(problem) is not RuntimeError:
        return None
    if _GPU.match(str(problem)):
        return "gpu"
    return "host" if _HOST.match(str(problem)) else None


def let_go(problem: BaseException) -> None:
    """Drop what the frames of an exception hold: the tensors of a failed step live in its traceback."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [problem]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
        one.__traceback__ = None
    gc.collect()
