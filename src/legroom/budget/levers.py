"""What the person may still do, and the bytes it would save.

Covers: levers on the loader, whose saving follows from the need; levers on the samples, whose saving in batches in
flight is in proportion; levers on the model, whose saving nobody has measured here (None). Does not cover: pulling
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from legroom.budget.choose import Ask, Choice, Rung, workload
from legroom.budget.predict import need
from legroom.model import Lever, Measured, Need
from legroom.words import say

_QUARTER = 4


def levers(measured: Measured, ask: Ask, choice: Choice) -> tuple[Lever, ...]:
    """Every lever that is left at these settings."""
    return (*_loader(measured, ask, choice), *_samples(measured, ask, choice), *_model())


def _need(measured: Measured, ask: Ask, rung: Rung) -> Need:
    return need(workload(measured, ask, rung))


def _loader(measured: Measured, ask: Ask, choice: Choice) -> Iterator[Lever]:
    rung = choice.rung
    now = _need(measured, ask, rung)
    if rung.workers:
        saved = now.ram - _need(measured, ask, replace(rung, workers=0)).ram
        yield Lever("num_workers", "ram", saved, say("no workers: the training waits for every batch"))
    if rung.workers and rung.prefetch > 1:
        saved = now.ram - _need(measured, ask, replace(rung, prefetch=1)).ram
        yield Lever("prefetch_factor", "ram", saved, say("prefetch 1: nothing evens out a slow sample"))
    if rung.pin:
        saved = now.ram - _need(measured, ask, replace(rung, pin=False)).ram
        yield Lever("pin_memory", "ram", saved, say("pin_memory off: copies to the GPU wait for the host"))
    if rung.batch % 2 == 0:
        saved = now.ram - _need(measured, ask, replace(rung, batch=rung.batch // 2)).ram
        yield Lever(
            "batch_size",
            "ram",
            saved,
            say("half the batch, twice the accumulation: on the GPU it saves more"),
        )


def _samples(measured: Measured, ask: Ask, choice: Choice) -> Iterator[Lever]:
    """A quarter off a sample's length is a quarter of its bytes, of an image's side nearly half."""
    largest = max(measured.tensors, default=0)
    if not largest:
        return
    rest = tuple(size for size in measured.tensors if size != largest)
    for name, kept, what in (
        (
            "sequence_length",
            1 - 1 / _QUARTER,
            say("a quarter shorter, where the largest tensor grows with it"),
        ),
        (
            "image_size",
            (1 - 1 / _QUARTER) ** 2,
            say("a quarter off each side, where the largest tensor is the image"),
        ),
    ):
        smaller = replace(measured, tensors=(int(largest * kept), *rest))
        saved = _need(measured, ask, choice.rung).ram - _need(smaller, ask, choice.rung).ram
        yield Lever(name, "ram", max(0, saved), what)


def _model() -> Iterator[Lever]:
    yield Lever(
        "mixed_precision",
        "gpu",
        None,
        say("bfloat16 activations: about half of theirs, which were not measured"),
    )
    yield Lever(
        "activation_checkpointing",
        "gpu",
        None,
        say("activations computed again: their bytes were not measured"),
    )
