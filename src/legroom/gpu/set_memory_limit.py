"""legroom.gpu.limit: keep this process within a share of a GPU, its CUDA context included; LEGROOM_GPU_LIMIT.

torch's own fraction limits its caching allocator alone. The context and loaded kernels come on top, so they are
measured and subtracted first. Kernels are loaded on first use, so some room is left for later ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from numbers import Integral, Real
from typing import Any

from legroom.errors import BadLimit, BadSize, LegroomError
from legroom.gpu.account_gpu_memory import measure_overhead, used_before_context
from legroom.gpu.torch_cuda_device import CudaDevice, import_torch, open_device
from legroom.messages import phrase, say
from legroom.records.gpu_results import Limit, Overhead
from legroom.units import format_size, parse_size

VARIABLE = "LEGROOM_GPU_LIMIT"
Amount = float | int | str

_LATER_KERNELS = 256 << 20  # left for kernels that are loaded after the limit is set,
_LATER_KERNELS_SHARE = 16  # but at most a sixteenth of the limit
_LARGER_THAN_ANY_GPU = 1 << 50
_IMPLAUSIBLE = 1 << 20  # bytes: a bare number below this is meant in another unit
_FIX = (
    phrase("limit(0.8) for 80% of the GPU, limit('20GB') or limit(20 << 30) for bytes"),
    phrase("limit(share=1/6) for six jobs on one GPU"),
)
_HOW = {"bounded": phrase("bounded"), "assumed": phrase("assumed")}


def limit(amount: Amount | None = None, *, share: float | Fraction | None = None, device: Any = None) -> Limit:
    """Limit the GPU memory of this process, its CUDA context included.

    Creates a context if there is none. Raises NoCuda without a GPU, and BadLimit for an amount that is not possible.

    Args:
        amount: A fraction of the GPU, 0.8 or ``"80%"``, or a size, ``"20GB"``.
        share: Instead of ``amount``: ``1 / 6`` for one of six jobs.
        device: The GPU; None is the current one.
    """
    limit_bytes(amount, share, _LARGER_THAN_ANY_GPU)
    purpose = say("limit this process to {amount}", amount=_describe(_parse(amount, share)))
    return limit_device(open_device(device, purpose), amount, share)


def limit_device(device: CudaDevice, amount: Amount | None, share: float | Fraction | None = None) -> Limit:
    """``limit`` for a device that is open."""
    limit_bytes(amount, share, device.total_memory())  # a bad amount is refused before a context is created
    used_before = used_before_context(device)
    device.warm_up()
    _, size = device.memory()
    asked = _asked(device, amount, share, size)
    overhead = measure_overhead(device, used_before)
    margin = min(_LATER_KERNELS, asked // _LATER_KERNELS_SHARE)
    allowed = asked - (overhead.bytes or 0) - margin
    if allowed <= 0:
        raise BadLimit(
            say("{asked} is too small for a CUDA process", asked=format_size(asked)),
            why=say(
                "the CUDA context and library kernels alone take {overhead} ({source})",
                overhead=format_size(overhead.bytes or 0), source=overhead.source,
            ),
            fix=(say("set a limit above {least}", least=format_size((overhead.bytes or 0) + 2 * _LATER_KERNELS)),
                 say("or run fewer jobs on this GPU")),
        )  # fmt: skip
    return _apply(device, partial(_asked, device, amount, share, size), size, overhead, margin, allowed)


def _asked(device: CudaDevice, amount: Amount | None, share: float | Fraction | None, size: int) -> int:
    """Bytes. A fraction is one of what copies that processes share leave: they count once, for no process."""
    parsed = _parse(amount, share)
    if isinstance(parsed, int):
        return limit_bytes(amount, share, size)
    return int((size - _shared(device)) * parsed)


def _shared(device: CudaDevice) -> int:
    return sum(length for _, length in device.shared_maps())


def _apply(
    device: CudaDevice, asking: Callable[[], int], size: int, overhead: Overhead, margin: int, allowed: int
) -> Limit:
    asked, shared = asking(), _shared(device)
    if device.reserved() > allowed:
        device.empty_cache()
    fraction = device.limit_allocator(allowed)
    free, _ = device.memory()
    reserved = device.reserved()
    others = max(0, size - free - reserved - shared - (overhead.bytes or 0))
    made = Limit(
        device=device.name,
        asked=asked,
        size=size,
        overhead=overhead,
        margin=margin,
        allowed=allowed,
        fraction=fraction,
        read_back=device.fraction(),
        reserved=reserved,
        others=others,
        bounded=_bounded(device),
        not_bounded=_not_bounded(margin),
        notes=tuple(_notes(asked, size, reserved, allowed, others, overhead, shared)),
        shared=shared,
        again=lambda: _recheck(device, made, asking),
    )
    return made


def _recheck(device: CudaDevice, old: Limit, asking: Callable[[], int]) -> Limit:
    overhead = measure_overhead(device)
    if overhead.how != "measured" and old.overhead.how != "assumed":
        overhead = old.overhead  # the first figure was the better one
    # Part of the room for later kernels is in use by now; a quarter of it stays.
    allowed = min(old.allowed, asking() - (overhead.bytes or 0) - old.margin // 4)
    return _apply(device, asking, old.size, overhead, old.margin, max(1, allowed))


def _bounded(device: CudaDevice) -> tuple[str, ...]:
    if device.backend() == "native":
        return (say("torch's caching allocator: tensors, cached blocks, cuBLAS and cuDNN workspaces, CUDA graphs"),)
    return (
        say("tensors in use; the {backend} allocator may keep freed blocks beyond the limit", backend=device.backend()),
    )


def _not_bounded(margin: int) -> tuple[str, ...]:
    return (
        say("NCCL buffers, and other libraries and allocators that call cudaMalloc themselves"),
        say(
            "kernels loaded from now on: {margin} is left for them, and recheck() measures again",
            margin=format_size(margin),
        ),
        say("other processes, child processes included: each needs its own limit"),
    )


def _notes(
    asked: int, size: int, reserved: int, allowed: int, others: int, overhead: Overhead, shared: int
) -> list[str]:
    notes = []
    if others > size - asked - shared:
        notes.append(
            say(
                "other processes use {others} of {size}: only {left} of the {asked} limit is available",
                others=format_size(others), size=format_size(size),
                left=format_size(max(0, size - others - shared)), asked=format_size(asked),
            )
        )  # fmt: skip
    if reserved > allowed:
        notes.append(
            say(
                "torch has already reserved {reserved}, the limit is {allowed}: new allocations fail "
                "until tensors are freed",
                reserved=format_size(reserved), allowed=format_size(allowed),
            )
        )  # fmt: skip
    if overhead.how != "measured":
        notes.append(
            say(
                "the CUDA context's size is not measured but {how}: {source}",
                how=say(_HOW[overhead.how]),
                source=overhead.source,
            )
        )
    return notes


# The environment variable, for scripts that cannot be edited. The limit is applied when the script itself starts CUDA:
# at import it would create a context in every DataLoader worker, and forked children could not use CUDA any more.


def with_limit(environment: Mapping[str, str], amount: str) -> dict[str, str]:
    """The environment with LEGROOM_GPU_LIMIT set; BadLimit for an amount that no GPU could have."""
    size = limit_bytes(amount, None, _LARGER_THAN_ANY_GPU)
    if size < _IMPLAUSIBLE and amount.strip().replace(".", "").isdigit():
        why = say("a number without a unit is bytes; did you mean {amount}% or {amount}GB?", amount=amount.strip())
        raise BadLimit(say("{amount} is not a valid limit", amount=amount), why=why)
    return {**environment, VARIABLE: amount}


def apply_from_environment(torch: Any = None, environment: Mapping[str, str] | None = None) -> bool:
    """Apply LEGROOM_GPU_LIMIT as soon as torch starts CUDA in this process; False if it is not set.

    Call it once torch is imported. Failures are printed to standard error and never stop the script. Only one device is
    limited: that of LOCAL_RANK, or else the current one.
    """
    env = os.environ if environment is None else environment
    amount = env.get(VARIABLE, "").strip()
    if not amount:
        return False
    torch = import_torch(torch)
    # torch queues these calls and makes them when CUDA starts; it sets random seeds in the same way.
    when_cuda_starts = getattr(torch.cuda, "_lazy_call", None)
    if when_cuda_starts is None:
        _print(say("GPU limit not set: torch {version} cannot run code when CUDA starts", version=torch.__version__))
        return False
    when_cuda_starts(lambda: _limit_started(torch, amount, env))
    return True


def _limit_started(torch: Any, amount: str, environment: Mapping[str, str]) -> None:
    try:
        index = local_device(environment, torch.cuda.device_count(), torch.cuda.current_device())
        made = limit_device(CudaDevice(torch, index), amount)
    except LegroomError as problem:
        _print(say("GPU limit not set: {problem}", problem=problem))
    except Exception as problem:  # anything that CUDA may raise while it starts
        _print(say("GPU limit not set: {kind}: {problem}", kind=type(problem).__name__, problem=problem))
    else:
        _print(
            say(
                "{device} is limited to {asked} of {size}, context included ({allowed} for torch)",
                device=made.device, asked=format_size(made.asked), size=format_size(made.size),
                allowed=format_size(made.allowed),
            )
        )  # fmt: skip
        for note in made.notes:
            _print(note)


def local_device(environment: Mapping[str, str], count: int, current: int) -> int:
    """The index in LOCAL_RANK, which launchers of one process per GPU set; else the current device."""
    try:
        local = int(environment.get("LOCAL_RANK", ""))
    except ValueError:
        return current
    return local if 0 <= local < count else current


def _print(line: str) -> None:
    sys.stderr.write(f"legroom: {line}\n")


# Amounts.


def limit_bytes(amount: Amount | None, share: float | Fraction | None, size: int) -> int:
    """An amount or a share as bytes of a GPU of ``size``; BadLimit if it is invalid or larger."""
    parsed = _parse(amount, share)
    if not isinstance(parsed, int):
        return int(size * parsed)
    if not 0 < parsed <= size:
        why = say("the GPU has {size}", size=format_size(size)) if parsed > 0 else say("it must be larger than 0")
        raise _invalid(format_size(parsed), why)
    return parsed


def _describe(parsed: int | float | Fraction) -> str:
    if isinstance(parsed, int):
        return say("{size} of GPU memory", size=format_size(parsed))
    return say("{percent}% of GPU memory", percent=f"{float(100 * parsed):.3g}")


def _parse(amount: Amount | None, share: float | Fraction | None) -> int | float | Fraction:
    """Bytes as an int, or a fraction of the GPU as another number."""
    if (amount is None) == (share is None):
        raise BadLimit(
            say("no limit was given") if amount is None else say("both an amount and a share were given"),
            why=say("limit() takes exactly one of them"),
            fix=tuple(map(say, _FIX)),
        )
    if share is not None:
        return _fraction(share)
    if isinstance(amount, str):
        amount = _parse_text(amount)
    if isinstance(amount, bool) or not isinstance(amount, Real):
        raise _invalid(amount, say("it is neither a fraction nor a number of bytes"))
    if not isinstance(amount, Integral) or amount == 1:
        return _fraction(amount)
    return int(amount)


def _parse_text(text: str) -> float | int:
    """``0.8``, ``1/6``, ``80%`` or a size, as the environment variable and the command line give it."""
    plain = text.strip()
    try:
        if plain.endswith("%"):
            return float(Fraction(plain[:-1].strip()) / 100)
        number = Fraction(plain)
    except (ValueError, ZeroDivisionError):
        try:
            return parse_size(plain)
        except BadSize as problem:
            raise _invalid(text, problem.why) from problem
    return int(number) if number.denominator == 1 and number != 1 else float(number)


def _fraction(value: Any) -> float | Fraction:
    try:
        valid = 0 < value <= 1
    except TypeError:
        valid = False
    if not valid:
        raise _invalid(value, say("a fraction must be above 0 and at most 1"))
    return value if isinstance(value, Fraction) else float(value)


def _invalid(amount: object, why: str) -> BadLimit:
    return BadLimit(say("{amount} is not a valid limit", amount=amount), why=why, fix=tuple(map(say, _FIX)))
