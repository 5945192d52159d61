"""Rules about GPU memory.

Covers: cards nearly full, cards nobody can talk to, memory spilled into the host's RAM (Windows).
Does not cover: what a training will need of a card.
"""

from __future__ import annotations

from collections.abc import Iterator

from legroom.budget.remedy import stop_spilling
from legroom.model import Box, Finding, Gpu
from legroom.units import format_size
from legroom.words import joined, listed, say

NEARLY_FULL = 0.90
FULL = 0.97
SPILLS_FROM = 0.85
SPILL_FLOOR = 256 << 20


def nearly_full(box: Box) -> Iterator[Finding]:
    """Little left on a card."""
    for card in box.gpus.cards:
        if card.size is None or card.used is None or card.free is None or card.used < NEARLY_FULL * card.size:
            continue
        yield Finding(
            "gpu-nearly-full",
            "critical" if card.used >= FULL * card.size else "warning",
            say(
                "gpu{index} has {free} of {size} left",
                index=card.index, free=format_size(card.free), size=format_size(card.size),
            ),
            _in_use(card, format_size(card.used)),
            (
                say("smaller batches with more accumulation keep the effective batch; mixed precision needs less"),
                say("end what should not run there, by the pids above"),
                say("check:\nnvidia-smi"),
            ),
        )  # fmt: skip


def _in_use(card: Gpu, used: str) -> str:
    if card.processes is None:
        return say("{used} in use; by whom is unknown ({reason})", used=used, reason=card.reason or "")
    known = sorted((p for p in card.processes if p.used is not None), key=lambda p: -(p.used or 0))
    if not known:
        return say("{used} in use", used=used)
    hidden = sum(1 for p in card.processes if p.command is None)
    text = listed(f"{p.pid} {format_size(p.used or 0)}" for p in known[:3])
    told = say("{used} in use (largest: {text})", used=used, text=text)
    if not hidden:
        return told
    unseen = say("{count} of the pids belong to processes that cannot be seen from here", count=hidden)
    return joined((told, unseen))


def unseen(box: Box) -> Iterator[Finding]:
    """A card on the bus, or a driver, that does not answer."""
    gpus = box.gpus
    dead = [card for card in gpus.cards if card.size is None]
    if dead:
        yield Finding(
            "gpu-unseen",
            "warning",
            say("gpu{index} gives no memory figures", index=dead[0].index),
            dead[0].reason or say("the driver gave no reason"),
            (
                say("see the kernel's log for Xid errors:\ndmesg | grep -i xid"),
                say("check:\nnvidia-smi -q -d MEMORY"),
            ),
        )
    if gpus.cards or not gpus.on_bus:
        return
    yield Finding(
        "gpu-unseen",
        "warning",
        say("{count} NVIDIA card(s) on the bus, none can be used", count=gpus.on_bus),
        gpus.reason or say("the driver did not answer"),
        (
            say("in a container, with the NVIDIA container toolkit on the host:\ndocker run --gpus all …")
            if box.place.kind in ("docker", "podman", "container")
            else say("in kubernetes: ask for nvidia.com/gpu in resources.limits")
            if box.place.kind == "kubernetes"
            else say(
                "install or reload the NVIDIA driver; after an upgrade a reboot joins library and module again"
            ),
            say("check:\nnvidia-smi"),
        ),
    )


def spilling(box: Box) -> Iterator[Finding]:
    """Windows moves GPU memory into the host's RAM when a card is full."""
    for card in box.gpus.cards:
        # Pinned buffers and the desktop keep some there on a healthy machine; on a full card it is a spill.
        full = card.size is None or card.used is None or card.used >= SPILLS_FROM * card.size
        if not card.spilled or card.spilled < SPILL_FLOOR or not full:
            continue
        yield Finding(
            "gpu-spilling",
            "critical",
            say("{spilled} of GPU memory lies in the host's RAM", spilled=format_size(card.spilled)),
            say(
                "gpu{index} holds {used} of {size}, and Windows keeps the rest across the PCIe bus: training slows "
                "down and no error says so",
                index=card.index,
                used=say("an unknown amount") if card.used is None else format_size(card.used),
                size=say("an unknown size") if card.size is None else format_size(card.size),
            ),
            stop_spilling(),
        )


RULES = (nearly_full, unseen, spilling)
