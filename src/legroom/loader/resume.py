"""Going on in the middle of an epoch: what a loader's state holds, and drawing the order again.

Covers: the state, torch's generators, which states can be honoured by which loaders. Does not cover: counting
(progress.py), what is left of an order (rest.py), datasets in workers (rejoin.py), the loader (dataloader.py).

The order of a map-style dataset is drawn at the start of an epoch from torch's generators. So their states at that
moment, and which batches have been given out since, are all there is to remember: the order is drawn again and what was
given out is left out, without reading a sample of it. Of an IterableDataset only its own ``state_dict`` can tell;
without one, the batches given out are produced again and dropped.

Before the order torch draws a number for the seeds of the workers, from the same generator, whenever workers start.
Workers that last are started once; where they are started again only because a run was interrupted, that number must
not be taken, or every order after it is another.

Random numbers that samples draw in workers go on from the seeds of the epoch's start, not from where the interrupted
run's workers stood.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from legroom.errors import UsageError
from legroom.loader.progress import STOP, Note, Progress, position_of
from legroom.words import say

if TYPE_CHECKING:
    import torch

VERSION = 2
_DEFAULT = "default"  # torch's own generator, which the program uses too
_FIELDS = {
    "begun", "yielded", "beyond", "batch_size", "num_workers", "generators", "seeded", "lasting", "turn", "workers",
}  # fmt: skip


def generators(loader: Any) -> dict[str, torch.Generator]:
    """Every generator an epoch's order may be drawn from, each once."""
    import torch

    inner = getattr(loader.batch_sampler, "sampler", None)
    found = {
        "loader": loader.generator,
        "sampler": getattr(loader.sampler, "generator", None),
        "inner": getattr(inner, "generator", None),
    }
    named = {name: one for name, one in found.items() if isinstance(one, torch.Generator)}
    once = {id(one): name for name, one in reversed(named.items())}
    kept = {name: one for name, one in named.items() if once[id(one)] == name}
    kept[_DEFAULT] = torch.default_generator  # a sampler may draw from it though the loader has its own
    return kept


def remember(loader: Any) -> dict[str, Any]:
    """The states of all of them now."""
    return {name: one.get_state() for name, one in generators(loader).items()}


def apart(loader: Any) -> torch.Generator | None:
    """A generator to draw the workers' seeds from that takes nothing from the one the order is drawn from."""
    import torch

    if loader.generator is None and torch.get_default_device().type != "cpu":
        return None  # torch draws from the device's own, and no order on this side is
    source = torch.default_generator if loader.generator is None else loader.generator
    copy = torch.Generator(device=source.device)
    copy.set_state(source.get_state())
    return copy


def state_of(loader: Any, progress: Progress | None, iterable: bool, seeded: bool) -> dict[str, Any]:
    """The loader's state, of plain values and tensors. ``seeded``: no later pass takes a number for seeds."""
    begun = progress is not None and not progress.over
    state: dict[str, Any] = {
        "version": VERSION,
        "begun": begun,
        "yielded": 0,
        "beyond": [],
        "batch_size": loader.batch_size,
        "num_workers": loader.num_workers,
        "generators": {name: one for name, one in remember(loader).items() if name != _DEFAULT},
        "seeded": seeded,
        "lasting": seeded,
        "turn": 0,
        "workers": {},
    }
    if progress is not None and begun:
        _check_known(loader, progress, iterable)
        state |= {
            "yielded": progress.yielded,
            "beyond": sorted(progress.beyond),
            "generators": dict(progress.generators),
            "seeded": progress.seeded,
            "turn": progress.turn if ordered(loader) else 0,
        }
    if iterable and loader.num_workers == 0:
        if (position := position_of(loader.dataset)) is not None:
            then = [STOP] if progress is not None and begun and progress.ended else []
            state["workers"] = {0: {"state": position(), "then": then}}
    elif progress is not None and not progress.silent and (begun or loader.persistent_workers):
        notes = progress.workers if begun else later(progress)
        state["workers"] = {
            worker: {"state": pickle.loads(note.state), "then": list(note.then)}
            for worker, note in notes.items()
        }
    return state


def later(progress: Progress | None) -> dict[int, Note]:
    """What is known of the same workers when they begin another pass."""
    if progress is None or progress.silent:
        return {}
    return {worker: note.a_pass_later(progress.over) for worker, note in progress.workers.items()}


def ordered(loader: Any) -> bool:
    """Whether batches are given out in the order of the sampler."""
    return loader.num_workers == 0 or getattr(loader, "in_order", True)


def _check_known(loader: Any, progress: Progress, iterable: bool) -> None:
    """Refuse to save what could not be gone on from."""
    if ordered(loader) or progress.yielded == 0:
        return
    if iterable and (progress.silent or not progress.workers):
        why = say(
            "with in_order=False batches are given out as they come, and the dataset has no state_dict to tell which"
        )
    elif not iterable and progress.unnumbered:
        why = say(
            "with in_order=False batches are given out as they come, and this torch does not tell which"
        )
    else:
        return
    raise UsageError(
        say("this pass has no state that can be gone on from"),
        why=why,
        fix=(say("use in_order=True"), say("or take the state between two epochs")),
    )


def checked(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state, or an error where it is none of ours."""
    try:
        if state["version"] != VERSION:
            why = say("version {found!r} where {known} is known", found=state["version"], known=VERSION)
        elif _FIELDS - state.keys():
            why = say("it has no {names}", names=", ".join(sorted(_FIELDS - state.keys())))
        elif int(state["yielded"]) >= 0 and isinstance(state["generators"], Mapping):
            return dict(state)
        else:
            why = say("its numbers make no sense")
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        why = say("{problem!r}", problem=problem)
    raise UsageError(
        say("this is not the state of a legroom.DataLoader"),
        why=why,
        fix=(say("give what its state_dict() returned"),),
    )


def fitting(loader: Any, state: dict[str, Any], iterable: bool) -> dict[str, Any]:
    """The state as this loader can go on from it, or an error where it cannot."""
    if not iterable:
        return _in_batches_of(loader, state)
    then, now = int(state["num_workers"]), loader.num_workers
    known = bool(state["workers"])
    begun = state["begun"] and state["yielded"] > 0
    if (begun or known) and max(1, then) != max(1, now):  # a single worker reads what no worker does
        raise UsageError(
            say("cannot go on with {now} workers where there were {then}", now=now, then=then),
            why=say(
                "each worker reads a part of an IterableDataset, and the state is that of {then} parts",
                then=then,
            ),
            fix=(
                say("use num_workers={then} until the epoch is over", then=then),
                say("or begin the epoch anew: leave load_state_dict out"),
                say("map-style datasets and data.batches go on with any number of workers"),
            ),
        )
    if begun and not known:
        if state["batch_size"] != loader.batch_size:
            raise _other_batches(
                loader, state, say("use batch_size={then} until the epoch is over", then=state["batch_size"])
            )
        if not ordered(loader):
            raise UsageError(
                say("cannot go on with in_order=False"),
                why=say("the dataset has no state_dict: the first batches have to be made again and dropped"),
                fix=(say("use in_order=True until the epoch is over"),),
            )
    return state


def _in_batches_of(loader: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The state counted in this loader's batches: a training that died may go on with smaller ones."""
    then, now = state["batch_size"], loader.batch_size
    if then == now or not state["yielded"]:
        return state
    beyond = list(state["beyond"])
    first = int(state["yielded"]) - len(beyond)
    if then is None or now is None:
        raise _other_batches(loader, state, say("use batch_size={then} until the epoch is over", then=then))
    if first * then % now or (beyond and then % now):
        raise _other_batches(loader, state, say("use a batch size that divides {then}", then=then))
    parts = then // now
    beyond = [number * parts + part for number in beyond for part in range(parts)]
    return {**state, "yielded": first * then // now + len(beyond), "beyond": beyond, "batch_size": now}


def _other_batches(loader: Any, state: Mapping[str, Any], fix: str) -> UsageError:
    then, now, yielded = state["batch_size"], loader.batch_size, int(state["yielded"])
    if then is None or now is None:
        return UsageError(
            say("cannot go on with batch_size={now}", now=now),
            why=say("{count} batches were given out, with batch_size={then}", count=yielded, then=then),
            fix=(fix,),
        )
    return UsageError(
        say("cannot go on with batches of {now}", now=now),
        why=say("{samples} samples were given out, in batches of {then}", samples=yielded * then, then=then),
        fix=(fix,),
    )


def restore(loader: Any, states: Mapping[str, Any]) -> None:
    """Set the generators; torch's own is the program's and left alone."""
    for name, one in generators(loader).items():
        if name in states and name != _DEFAULT:
            one.set_state(states[name])


@contextmanager
def replayed(loader: Any, states: Mapping[str, Any]) -> Iterator[None]:
    """Draw again what was drawn when the epoch began; what the program draws itself goes on as if nothing was."""
    import torch

    restore(loader, states)
    now = torch.default_generator.get_state()
    if _DEFAULT in states:
        torch.default_generator.set_state(states[_DEFAULT])
    try:
        yield
    finally:
        torch.default_generator.set_state(now)
