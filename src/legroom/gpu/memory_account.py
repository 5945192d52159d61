"""legroom.gpu.account: a card's memory, split into what holds it.

Covers: weights, gradients, optimizer, other tensors, cached, context, other processes, what nobody can name;
fragmentation, retries, spilled and pinned memory. Does not cover: the future (finder.py, estimating.py).

Without a model and an optimizer named, those alive in this process are found through the garbage collector.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from legroom.gpu.cuda_device import CudaDevice, open_device
from legroom.model.box import Gpu
from legroom.model.gpu import Account, Overhead
from legroom.units import format_size
from legroom.words import say


def account(device: Any = None, model: Any = None, optimizer: Any = None) -> Account:
    """Who holds the card's memory now: weights, gradients, optimizer, other tensors, cache, context, other processes.

    Raises NoCuda without a card. What cannot be told is None, and ``reasons`` says why.

    Args:
        device: The card; None is the current one.
        model: Whose weights and gradients to name; None looks for the models alive in this process.
        optimizer: Whose state to name; None looks for those alive.
    """
    return account_device(
        open_device(device, say("its memory would be split by what holds it")), model, optimizer
    )


def account_device(card: CudaDevice, model: Any = None, optimizer: Any = None) -> Account:
    """The same for a device that is open."""
    reasons: dict[str, str] = {}
    parameters, states = _holders(card.torch, model, optimizer)
    held: set[int] = set()
    weights = _bytes(card, parameters, held)
    gradients = _bytes(card, (one.grad for one in parameters if getattr(one, "grad", None) is not None), held)
    state = _bytes(card, states, held)
    card.synchronize()
    stats = card.stats()
    allocated, reserved = card.allocated(), card.reserved()
    free, size = card.room()
    used = size - free
    shown = card.nvml()
    outside, others = _outside(card, shown, used - reserved, reasons)
    unknown = used - reserved - (outside.bytes or 0) - (others or 0)
    pinned, spilled = card.pinned(), None if shown is None else shown.spilled
    if pinned is None:
        reasons["pinned"] = say("torch has pinned nothing yet, or is too old to count it")
    if spilled is None:
        reasons["spilled"] = say("only Windows moves GPU memory into RAM by itself")
    return Account(
        device=card.name,
        size=size,
        used=used,
        free=free,
        weights=weights,
        gradients=gradients,
        optimizer=state,
        activations=max(0, allocated - weights - gradients - state),
        cached=reserved - allocated,
        overhead=outside,
        others=others,
        unknown=max(0, unknown),
        stuck=int(stats.get("inactive_split_bytes.all.current", 0)),
        largest_free=card.largest_free(),
        retries=int(stats.get("num_alloc_retries", 0)),
        ooms=int(stats.get("num_ooms", 0)),
        spilled=spilled,
        pinned=pinned,
        reasons=reasons,
    )


def _outside(card: CudaDevice, shown: Any, rest: int, reasons: dict[str, str]) -> tuple[Overhead, int | None]:
    """The context's part of what torch does not hold, and the others'."""
    found = measure_overhead(card, nudge=False)  # looking must not empty the allocator's cache
    if found.how == "assumed":
        found = Overhead(None, "assumed", found.source)
        reasons["overhead"] = found.source
    own = own_bytes(shown, os.getpid())
    listed = None if shown is None else shown.processes
    if own is not None and listed is not None and all(process.used is not None for process in listed):
        return found, sum(process.used for process in listed if process.pid != os.getpid())
    if found.how == "measured":
        return found, max(0, rest - (found.bytes or 0))
    reasons["others"] = say("NVML does not tell this process from others: {source}", source=found.source)
    return found, None


def _holders(torch: Any, model: Any, optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Parameters and buffers; the tensors of optimizers' states."""
    models = [] if model is None else [model]
    optimizers = [] if optimizer is None else [optimizer]
    if model is None or optimizer is None:
        for thing in gc.get_objects():
            kind = type(thing)
            if model is None and issubclass(kind, torch.nn.Module):
                models.append(thing)
            elif optimizer is None and issubclass(kind, torch.optim.Optimizer):
                optimizers.append(thing)
    parameters = {
        id(one): one
        for owner in models
        for one in (*owner.parameters(recurse=model is not None), *owner.buffers(recurse=model is not None))
    }
    for owner in optimizers:
        parameters |= {id(one): one for group in owner.param_groups for one in group["params"]}
    states = [
        leaf
        for owner in optimizers
        for state in owner.state.values()
        for leaf in state.values()
        if torch.is_tensor(leaf)
    ]
    return list(parameters.values()), states


def _bytes(card: CudaDevice, tensors: Iterable[Any], held: set[int]) -> int:
    """What these take of the card, each storage once."""
    total = 0
    for one in tensors:
        if (
            one.device.type != "cuda"
            or (one.device.index or 0) != card.index
            or one.layout != card.torch.strided
        ):
            continue
        storage = one.untyped_storage()
        if storage.data_ptr() not in held:
            held.add(storage.data_ptr())
            total += -(-storage.nbytes() // 512) * 512  # as the allocator rounds
    return total


# No context with cuBLAS and cuDNN loaded is smaller or, without memory of the libraries' own, larger: a difference
# outside says that somebody else came or went meanwhile.
_LEAST, _MOST = 100 << 20, 2 << 30
_ASSUMED = 1 << 30
_NUDGE = 46 << 20  # torch asks CUDA for a block of this size as it is: a multiple of 2 MB, above 20
_NEAR = 2 << 20


@dataclass(frozen=True, slots=True)
class Before:
    """The card before this process had a context there."""

    used: int


def used_before_context(card: CudaDevice) -> Before | None:
    """What NVML says of the card, where this process is not on it yet."""
    if card.has_context():
        return None
    shown = card.nvml()
    return None if shown is None or shown.used is None else Before(shown.used)


def measure_overhead(card: CudaDevice, before: Before | None = None, *, nudge: bool = True) -> Overhead:
    """The best figure there is, and how it came about; the context exists by now."""
    card.synchronize()
    shown = card.nvml()
    reserved = card.reserved()
    own = own_bytes(shown, os.getpid())
    if own is not None and own >= reserved:
        return Overhead(
            own - reserved, "measured", say("NVML's figure for this process less torch's reserve")
        )
    if nudge and shown is not None and (own := _by_nudge(card, shown)) is not None and own >= reserved:
        source = say("NVML's figure for the process that grew when this one did (its pids are the host's)")
        return Overhead(own - reserved, "measured", source)
    if before is not None and shown is not None and shown.used is not None:
        grown = shown.used - before.used - reserved
        if _LEAST <= grown <= _MOST:
            source = say(
                "what the card lost while this process made its context; others may have moved meanwhile"
            )
            return Overhead(grown, "bounded", source)
    free, size = card.room()
    rest = size - free - reserved
    if rest <= _MOST:
        return Overhead(
            max(0, rest), "bounded", say("all of the card that is neither free nor torch's reserve")
        )
    source = say(
        "NVML does not show this process and others are on the card: {assumed} are assumed",
        assumed=format_size(_ASSUMED),
    )
    return Overhead(_ASSUMED, "assumed", source)


def own_bytes(shown: Gpu | None, pid: int) -> int | None:
    """What NVML says this process holds; None where it is not listed, not told, or a stranger bears its number."""
    for process in () if shown is None else shown.processes or ():
        if process.pid == pid and process.command is not None:
            return process.used
    return None


def _by_nudge(card: CudaDevice, shown: Gpu) -> int | None:
    """Which entry is ours, where none bears our pid."""
    before = _amounts(shown)
    if not before:
        return None
    reserved = card.reserved()
    try:
        block = card.torch.empty(_NUDGE, dtype=card.torch.uint8, device=card.name)
    except RuntimeError:  # no room for it: a limit in force, or a full card
        return None
    if card.reserved() - reserved != _NUDGE:  # served from the cache: nothing to be seen outside
        return None
    card.synchronize()
    after = card.nvml()
    del block
    card.empty_cache()
    return grown_by(before, _amounts(after), _NUDGE)


def grown_by(before: Mapping[int, int], after: Mapping[int, int], amount: int) -> int | None:
    """What the one process that grew by ``amount`` held before; None where it was none or more than one."""
    grew = [pid for pid, held in before.items() if abs(after.get(pid, 0) - held - amount) <= _NEAR]
    return before[grew[0]] if len(grew) == 1 else None


def _amounts(shown: Gpu | None) -> dict[int, int]:
    processes = () if shown is None else shown.processes or ()
    return {process.pid: process.used for process in processes if process.used is not None}
