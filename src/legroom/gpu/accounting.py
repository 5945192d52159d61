"""legroom.gpu.account: a card's memory, split into what holds it.

Covers: weights, gradients, optimizer, other tensors, cached, context, other processes, what nobody can name;
fragmentation, retries, spilled and pinned memory. Does not cover: the future (finder.py, estimating.py).

Without a model and an optimizer named, those alive in this process are found through the garbage collector.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from typing import Any

from legroom.gpu.card import Card, open_card
from legroom.gpu.overhead import overhead, own_bytes
from legroom.model.gpu import Account, Overhead
from legroom.words import say


def account(device: Any = None, model: Any = None, optimizer: Any = None) -> Account:
    """Who holds the card's memory now: weights, gradients, optimizer, other tensors, cache, context, other processes.

    Raises NoCuda without a card. What cannot be told is None, and ``reasons`` says why.

    Args:
        device: The card; None is the current one.
        model: Whose weights and gradients to name; None looks for the models alive in this process.
        optimizer: Whose state to name; None looks for those alive.
    """
    return account_card(
        open_card(device, say("its memory would be split by what holds it")), model, optimizer
    )


def account_card(card: Card, model: Any = None, optimizer: Any = None) -> Account:
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


def _outside(card: Card, shown: Any, rest: int, reasons: dict[str, str]) -> tuple[Overhead, int | None]:
    """The context's part of what torch does not hold, and the others'."""
    found = overhead(card, nudge=False)  # looking must not empty the allocator's cache
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


def _bytes(card: Card, tensors: Iterable[Any], held: set[int]) -> int:
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
