"""Rules about RAM, its cgroups, swap and pressure.

Covers: how near the limit is, what the kernel's own counters say, what psutil would have said.
Does not cover: /dev/shm (rules_shm), GPU memory (rules_gpu).
"""

from __future__ import annotations

from collections.abc import Iterator

from legroom.advice.remedies import ask_above, raise_ram_limit, settle_swap
from legroom.records import Box, Finding, Pressure
from legroom.records.findings import scope_name
from legroom.units import format_size
from legroom.words import say

NEAR = 0.10  # share of RAM that is free
AT_THE_EDGE = 0.03
MOVING = 64 << 10  # bytes a second: less is a stray page, not a working set that does not fit
STALL = 10.0  # per cent of time in which some task waited for memory
HARD_STALL = 10.0  # per cent of time in which every task did


def _bounded(box: Box) -> bool:
    """Whether a cgroup leaves less than the machine has: only then is there a limit to raise."""
    ram, total = box.pool("ram"), box.memory.total
    return ram is not None and ram.size is not None and (total is None or ram.size < total)


def near_limit(box: Box) -> Iterator[Finding]:
    """Little RAM left before the limit that binds."""
    ram = box.pool("ram")
    if ram is None or ram.size is None or ram.free is None or ram.free >= NEAR * ram.size:
        return
    bounded = _bounded(box)
    yield Finding(
        "ram-near-limit",
        "critical" if ram.free < AT_THE_EDGE * ram.size else "warning",
        say(
            "{free} of {size} RAM left before the limit",
            free=format_size(ram.free),
            size=format_size(ram.size),
        ),
        say(
            "{used} cannot be reclaimed ({source}); past the limit the OOM killer ends a process",
            used=say("an unknown amount") if ram.used is None else format_size(ram.used),
            source=ram.source,
        ),
        raise_ram_limit(box.place, ram.size if bounded else None, box.memory.total),
    )


def throttled(box: Box) -> Iterator[Finding]:
    """memory.high: not a kill, a brake."""
    for level in box.memory.levels:
        if level.high is None or level.usage is None or level.usage < level.high:
            continue
        yield Finding(
            "ram-throttled",
            "warning",
            say("the kernel slows this cgroup down to hold it at {high}", high=format_size(level.high)),
            say(
                "memory.high of {path} is {high}, in use {usage}; throttled {count} times so far",
                path=level.path,
                high=format_size(level.high),
                usage=format_size(level.usage),
                count=say("an unknown number of")
                if box.memory.events.throttled is None
                else box.memory.events.throttled,
            ),
            (
                *raise_ram_limit(box.place, level.high, box.memory.total)[:-1],
                say("or have memory.high raised by whoever set it (systemd: MemoryHigh=)"),
                say("check:\ncat {path}", path=f"{level.path}/memory.events"),
            ),
        )
        return


def oom_kills(box: Box) -> Iterator[Finding]:
    """The kernel counts what it killed; no dmesg needed."""
    events = box.memory.events
    if not events.oom_kills:
        return
    ours = events.scope == "cgroup"
    ram = box.pool("ram")
    yield Finding(
        "oom-kills-seen",
        "warning" if ours else "info",
        say(
            "the OOM killer has ended {count} process(es) {where}",
            count=events.oom_kills,
            where=say("in this cgroup") if ours else say("on this machine since it started"),
        ),
        say(
            "counted by the kernel in {source}; the limit was hit {count} times"
            if events.at_limit
            else "counted by the kernel in {source}",
            source=events.source,
            count=events.at_limit,
        ),
        raise_ram_limit(box.place, ram.size if ram and ours and _bounded(box) else None, box.memory.total),
    )


def swap_in_use(box: Box) -> Iterator[Finding]:
    """Pages in swap cost nothing while they lie there; moving pages cost everything."""
    swap = box.swap
    if not swap.used:
        return
    in_rate, out_rate = swap.in_rate, swap.out_rate
    rates_known = in_rate is not None and out_rate is not None
    moving = rates_known and (in_rate or 0) + (out_rate or 0) >= MOVING
    if not rates_known:
        state = say("whether it moves now is unknown ({reason})", reason=swap.reason or swap.source)
    elif moving:
        state = say(
            "it is moving now: {inn}/s in, {out}/s out",
            inn=format_size(int(in_rate or 0)), out=format_size(int(out_rate or 0)),
        )  # fmt: skip
    else:
        state = say("it is not moving now")
    used = format_size(swap.used)
    yield Finding(
        "swap-in-use",
        "critical" if moving else "info",
        say("{used} in swap, {state}", used=used, state=state),
        say(
            "{used} of {total} swap is used; a page in swap costs nothing until it is needed, then it comes from disk",
            used=used,
            total=say("an unknown amount of") if swap.total is None else format_size(swap.total),
        ),
        settle_swap(box.place, moving, used=swap.used, free=box.memory.available),
    )


def pressure(box: Box) -> Iterator[Finding]:
    """PSI: the share of time in which tasks waited for memory."""
    worst: Pressure | None = max(box.pressure, key=lambda p: (p.full_avg10, p.some_avg10), default=None)
    if worst is None or (worst.full_avg10 < HARD_STALL and worst.some_avg10 < STALL):
        return
    yield Finding(
        "memory-pressure",
        "critical" if worst.full_avg10 >= HARD_STALL else "warning",
        say(
            "tasks of this {scope} wait for memory {some:.0f} % of the time",
            scope=scope_name(worst.scope),
            some=worst.some_avg10,
        ),
        say(
            "over the last 10 s some task stalled {some:.1f} % and all of them {full:.1f} % of the time ({source})",
            some=worst.some_avg10, full=worst.full_avg10, source=worst.source,
        ),
        (
            say("shrink the working set: fewer workers, smaller prefetch, one shared copy of the data"),
            say("check:\ncat {path}", path=worst.source),
        ),
    )  # fmt: skip


def below_host(box: Box) -> Iterator[Finding]:
    """What free, psutil and most scripts would have told."""
    ram, total = box.pool("ram"), box.memory.total
    if ram is None or ram.size is None or total is None or ram.size >= total:
        return
    yield Finding(
        "cgroup-below-host",
        "info",
        say(
            "{size} RAM may be used here, though the machine has {total}",
            size=format_size(ram.size),
            total=format_size(total),
        ),
        say(
            "the limit is the cgroup's ({source}); free and psutil show the machine's {total} and know nothing of it",
            source=ram.source,
            total=format_size(total),
        ),
        (say("size batches and workers by {size}, not by what free prints", size=format_size(ram.size)),),
    )


def above_unknown(box: Box) -> Iterator[Finding]:
    """A limit further up cannot be seen from inside a cgroup namespace."""
    if not box.memory.above_hidden:
        return
    yield Finding(
        "above-cgroup-root-unknown",
        "info",
        say("limits above this container's own cgroup cannot be seen from inside"),
        say(
            "the topmost cgroup visible here is not the machine's root; a pod's or a slice's limit above it would "
            "kill without showing in any number here"
        ),
        ask_above(box.place),
    )


RAM_RULES = (near_limit, throttled, oom_kills, swap_in_use, pressure, below_host, above_unknown)
