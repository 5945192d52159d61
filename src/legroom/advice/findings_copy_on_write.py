"""When forked workers copy the dataset: is what they copy a dataset or only their start, and what to do about it.

Only pages count that a worker has copied and not written to (probe/copy_on_write.py). The first full garbage collection
in a worker copies every container object so, once; for torch alone these are 40 MB. A worker that reads Python objects
copies page after page, for as long as it meets new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from legroom.messages import WORKERS, counted, listed, say
from legroom.records.finding_and_alarm import Finding
from legroom.records.workload import CopiedAttribute
from legroom.units import format_size

CODE = "workers-copy-dataset"
_STEPS = 3  # readings in a row that must show growth
_STEP = 1 << 19  # bytes that count as growth between two readings
_ATTRIBUTE_BYTES = 4 << 20  # that reading an attribute can copy, for it to matter
_SEEN_BYTES, _SEEN_SHARE = 1 << 17, 0.5  # copied in a trial run, at least: in bytes, and of what its samples hold

Point = tuple[float, int]  # clock, bytes copied


def copy_rate(points: Sequence[Point], *, least: int = 0) -> float | None:
    """Bytes per second that a worker copies now; None if it has copied less than ``least`` or stopped.

    The last readings must all show growth: one burst is a garbage collection, or memory that is used again.
    """
    recent = list(points)[-(_STEPS + 1) :]
    if len(recent) <= _STEPS or points[-1][1] < least:
        return None
    if any(after[1] - before[1] < _STEP for before, after in pairwise(recent)):
        return None
    seconds = recent[-1][0] - recent[0][0]
    return (recent[-1][1] - recent[0][1]) / seconds if seconds > 0 else None


def copied_attributes(found: Sequence[CopiedAttribute]) -> tuple[CopiedAttribute, ...]:
    """Those of which a trial run shows that workers copy them, largest first.

    What a worker has copied is compared with what it has read by then: a busy machine reads little in a trial.
    """
    shown = [
        one for one in found if one.bytes >= _ATTRIBUTE_BYTES and one.copied >= max(_SEEN_BYTES, _SEEN_SHARE * one.read)
    ]
    return tuple(sorted(shown, key=lambda one: -one.copied))


def finding_of_readings(
    parent: int, workers: int, points: Mapping[int, Sequence[Point]], unread: str | None = None
) -> Finding | None:
    """The finding for a running job from a few readings of its workers; None if none of these copies all the time.

    ``unread``: why it is not known whether they copied by reading.
    """
    rates = {pid: rate for pid, row in points.items() if (rate := copy_rate(row)) is not None}
    if not rates:
        return None
    copied = max(points[pid][-1][1] for pid in rates)
    return finding_of_job(parent, list(rates.values()), workers, copied, unread)


def finding_of_job(
    parent: int, rates: Sequence[float], workers: int, copied: int, unread: str | None = None
) -> Finding:
    """The finding for a running job, whose dataset is not at hand."""
    who = {
        "workers": counted(workers, *WORKERS), "pid": parent,
        "rate": format_size(int(sum(rates) / len(rates) * 60)),
    }  # fmt: skip
    attribute = say("find the attribute:\nlegroom check --dataset MODULE:OBJECT --batch N --workers M")
    if unread is None:
        return Finding(
            CODE,
            "warning",
            say("{workers} of process {pid} copy memory that they share with it: {rate}/min each", **who),
            say("{why} Each has copied {copied} since it was first read.", why=cause(), copied=format_size(copied)),
            (cure(), attribute),
        )
    return Finding(
        CODE,
        "info",
        say(
            "{workers} of process {pid} copy memory that they share with it, perhaps the dataset: {rate}/min each",
            **who,
        ),
        say(
            "Each has copied {copied} since it was first read. Reading Python objects does that, and so does writing "
            "to memory that was free at the fork. Only the contents of the pages tell which, and {why}.",
            copied=format_size(copied), why=unread,
        ),
        (say("be sure: the same as root:\nsudo legroom doctor --pid {pid}", pid=parent), attribute),
    )  # fmt: skip


def finding_of_dataset(attributes: Sequence[CopiedAttribute], workers: int) -> Finding:
    """The finding for a dataset in a trial run: with the names of its attributes."""
    names = listed(
        say("{name} ({type}, {size})", name=one.name, type=one.type, size=format_size(one.bytes)) for one in attributes
    )
    first = attributes[0]
    total = sum(one.bytes for one in attributes)
    return Finding(
        CODE,
        "warning",
        say("every forked worker copies {names} while it reads it", names=names),
        say(
            "{why} In the trial run one worker copied {copied} of {name}. {workers} copy up to {total} in an epoch.",
            why=cause(), copied=format_size(first.copied), name=first.name, workers=counted(workers, *WORKERS),
            total=format_size(total * workers),
        ),
        (cure(),),
    )  # fmt: skip


def cause() -> str:
    """Why reading copies, in one sentence."""
    return say("Reading a Python object writes its reference count, so the kernel copies the page for each worker.")


def cure() -> str:
    """What to do about it."""
    return say(
        "freeze the lists and dicts of the dataset before the DataLoader is made:\nlegroom.freeze_dataset(dataset)"
    )
