"""Every error Legroom raises: what happened, why (with numbers), what to do, under a stable code.

    LegroomError
    ├── UsageError            exit 2   the request makes no sense as asked
    │   ├── BadSize                    bad-size
    │   ├── BadDuration                bad-duration
    │   ├── NoSuchProcess              no-such-process
    │   ├── NothingMatches             nothing-matches
    │   ├── NoSuchRoot                 no-such-root
    │   ├── CannotListen               cannot-listen
    │   ├── CannotWrite                cannot-write
    │   ├── CommandNotFound            command-not-found (exit 127)
    │   ├── CommandNotRunnable         command-not-runnable (exit 126)
    │   ├── MissingKey                 missing-key
    │   ├── NoLength                   no-length
    │   ├── MissingPackage             missing-package
    │   ├── Unpicklable                unpicklable
    │   ├── BadArgument                bad-argument
    │   └── BadLimit                   bad-limit
    ├── SourceError           exit 2   the data file
    │   ├── UnreadableSource           unreadable-source
    │   ├── UnknownFormat              unknown-format
    │   ├── DamagedSource              damaged-source
    │   ├── UnsupportedData            unsupported-data
    │   ├── SourceBeingWritten         source-being-written
    │   ├── SourceChanged              source-changed
    │   └── DatasetFailed              dataset-failed
    │       └── DatasetOutOfMemory     dataset-out-of-memory
    ├── StoreError            exit 1   the shared cache
    │   ├── NoRoom                     no-room
    │   ├── NoStore                    no-store
    │   ├── EntryInUse                 entry-in-use
    │   ├── NotLoaded                  not-loaded
    │   ├── EntryDamaged               entry-damaged
    │   └── EntryUnreadable            entry-unreadable
    ├── LoaderError           exit 1   batches on their way
    │   ├── RaggedBatch                ragged-batch
    │   ├── BudgetTooSmall             budget-too-small
    │   ├── WorkerDied                 worker-died
    │   ├── BatchLost                  batch-lost
    │   └── LoaderClosed               loader-closed
    ├── GpuError              exit 1   memory on the card
    │   ├── NoCuda                     no-cuda
    │   ├── DoesNotFit                 does-not-fit
    │   ├── TrialFailed                trial-failed
    │   └── RanksDisagree              ranks-disagree
    └── DemoFailed            exit 1   demo-failed

Covers: the tree and how an error reads as text and as JSON. Does not cover: findings, which are
states of a box and not failures (model.Finding).

Codes are stable: programs may match them. The sentences are for people and may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from legroom.columns import cells
from legroom.words import say

try:  # the same class; the module around it takes three milliseconds of every start
    from _pickle import PicklingError
except ImportError:
    from pickle import PicklingError

EXIT_REFUSED = 1
EXIT_USAGE = 2


class LegroomError(Exception):
    """Something Legroom will not or cannot do; ``str()`` is the whole story on a few lines."""

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = EXIT_REFUSED

    def __init__(self, what: str, *, why: str = "", fix: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = tuple(fix)

    def __str__(self) -> str:
        lines = [f"{self.what} [{self.code}]"]
        if self.why:
            lines.append(_hung(say("  why: "), self.why))
        lines.extend(_hung(say("  do:  "), step) for step in self.fix)
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (workers, builders): keyword-only arguments need help.
        return (_rebuild, (type(self), self.what, self.why, self.fix))

    def as_dict(self) -> dict[str, object]:
        """The error as JSON carries it."""
        return {"code": self.code, "message": self.what, "why": self.why, "fix": list(self.fix)}


def _hung(label: str, text: str) -> str:
    """The text after its label, its further lines below its first."""
    return label + text.replace("\n", "\n" + " " * cells(label))


def _rebuild(kind: type[LegroomError], what: str, why: str, fix: tuple[str, ...]) -> LegroomError:
    return kind(what, why=why, fix=fix)


class UsageError(LegroomError):
    """The request makes no sense as asked."""

    code = "bad-usage"
    exit_status = EXIT_USAGE


class BadSize(UsageError, ValueError):
    """A size that cannot be read."""

    code = "bad-size"


class BadDuration(UsageError, ValueError):
    """A duration that cannot be read."""

    code = "bad-duration"


class NoSuchProcess(UsageError):
    """A process id that is not there, or not ours to see."""

    code = "no-such-process"


class NothingMatches(UsageError):
    """A pattern that matches no process."""

    code = "nothing-matches"


class NoSuchRoot(UsageError):
    """A root directory to read below that does not exist or is no directory."""

    code = "no-such-root"


class CannotListen(UsageError):
    """An address that cannot be served from: in use, not ours, or not allowed."""

    code = "cannot-listen"


class CannotWrite(UsageError):
    """A standard stream that takes nothing: closed, or on a disk that is full."""

    code = "cannot-write"


class CommandNotFound(UsageError):
    """A command to run that is nowhere; the status is a shell's for that."""

    code = "command-not-found"
    exit_status = 127


class CommandNotRunnable(UsageError):
    """A command to run that is there and may not be executed; the status is a shell's for that."""

    code = "command-not-runnable"
    exit_status = 126


class MissingKey(UsageError, KeyError):
    """A name that the data do not have; the message lists what there is and the nearest name."""

    code = "missing-key"
    __str__ = LegroomError.__str__  # KeyError would print the repr of the message


class NoLength(UsageError, TypeError):
    """The length of something that is only known once it has been read; a TypeError, as Python expects of len()."""

    code = "no-length"


class MissingPackage(UsageError, ImportError):
    """An optional package that this needs is not installed."""

    code = "missing-package"


class Unpicklable(UsageError, PicklingError):
    """An object that has to reach worker processes and cannot be pickled."""

    code = "unpicklable"


class BadArgument(UsageError, ValueError):
    """An argument that cannot be meant, alone or beside another; a ValueError, as torch's are."""

    code = "bad-argument"


class BadLimit(UsageError, ValueError):
    """A share of a card that cannot be kept: none, more than all, or less than a CUDA process takes by itself."""

    code = "bad-limit"


class SourceError(LegroomError):
    """Something is wrong with the data file."""

    code = "source-error"
    exit_status = EXIT_USAGE


class UnreadableSource(SourceError, OSError):
    """The file is not there, not a file, or not ours to read."""

    code = "unreadable-source"
    __str__ = LegroomError.__str__


class UnknownFormat(SourceError):
    """The file's content is none of the formats that can be read."""

    code = "unknown-format"


class DamagedSource(SourceError):
    """The file says it is of a format and breaks its rules: truncated, empty, corrupt."""

    code = "damaged-source"


class UnsupportedData(SourceError):
    """Data that cannot be shared as arrays without guessing."""

    code = "unsupported-data"


class SourceBeingWritten(SourceError):
    """The file is open for writing; what would be read is not what will be there."""

    code = "source-being-written"


class SourceChanged(SourceError):
    """The file changed while it was being read."""

    code = "source-changed"


class DatasetFailed(SourceError):
    """A dataset that raises, hangs, crashes or is killed when a sample is drawn from it."""

    code = "dataset-failed"


class DatasetOutOfMemory(DatasetFailed):
    """A dataset that took all that was left of a pool before it gave a sample."""

    code = "dataset-out-of-memory"
    pool: str = "ram"
    taken: int = 0  # bytes


class StoreError(LegroomError):
    """Something is wrong with the shared cache."""

    code = "store-error"


class NoRoom(StoreError):
    """The data do not fit: says how many bytes are missing, and where."""

    code = "no-room"


class NoStore(StoreError):
    """No place for a store could be used; each candidate with the reason it was passed over."""

    code = "no-store"


class EntryInUse(StoreError):
    """An entry cannot be dropped while somebody uses it."""

    code = "entry-in-use"


class NotLoaded(StoreError):
    """The cache holds nothing for that file or key."""

    code = "not-loaded"


class EntryDamaged(StoreError):
    """An entry's bytes are not what its manifest promises."""

    code = "entry-damaged"


class EntryUnreadable(StoreError):
    """An entry that could not be read for a reason that proves no damage: descriptors, memory, permission, the disk."""

    code = "entry-unreadable"


class LoaderError(LegroomError):
    """A batch could not be made or delivered."""

    code = "loader-error"


class RaggedBatch(LoaderError, RuntimeError):
    """Samples of different shapes that were to be stacked."""

    code = "ragged-batch"


class BudgetTooSmall(LoaderError):
    """A memory budget that does not hold one batch a worker."""

    code = "budget-too-small"


class WorkerDied(LoaderError, RuntimeError):
    """A worker process is gone: which signal, what the counters say, what to do."""

    code = "worker-died"


class BatchLost(LoaderError, RuntimeError):
    """A batch was announced and its memory cannot be reached."""

    code = "batch-lost"


class LoaderClosed(LoaderError):
    """A worker gave up waiting because its loader is gone."""

    code = "loader-closed"


class GpuError(LegroomError):
    """Something about memory on the card."""

    code = "gpu-error"


class NoCuda(GpuError, RuntimeError):
    """There is no CUDA device to act on; says what would have been done."""

    code = "no-cuda"


class DoesNotFit(GpuError, RuntimeError):
    """Not even one sample fits."""

    code = "does-not-fit"


class TrialFailed(GpuError, RuntimeError):
    """A trial in a child process that ended for another reason than memory."""

    code = "trial-failed"


class RanksDisagree(GpuError, RuntimeError):
    """Ranks of one training were asked for different things."""

    code = "ranks-disagree"


class DemoFailed(LegroomError):
    """The demo cannot run here, or a part of it did not do what it should."""

    code = "demo-failed"
