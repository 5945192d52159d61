"""Every error Legroom raises: what happened, why (with numbers), what to do, under a stable code.

An error's code is its class's name with hyphens. UsageError and SourceError end a command with status 2, the others
with 1; two of them have the status of a shell. Codes are stable, so programs may match them; the sentences may change.
docs/reference/errors.md lists all. Findings of `legroom doctor` are not errors: see records/finding_and_alarm.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from legroom.messages import say, step_indent, step_label

try:  # the same class; importing all of pickle takes 3 ms
    from _pickle import PicklingError
except ImportError:
    from pickle import PicklingError

EXIT_REFUSED = 1
EXIT_USAGE = 2


class LegroomError(Exception):
    """Base of all errors; ``str()`` gives what happened, why, and what to do, on a few lines."""

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = EXIT_REFUSED

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "code" not in vars(cls) and cls.__module__ == __name__:  # a class of another package inherits its code
            cls.code = re.sub("(?<!^)(?=[A-Z])", "-", cls.__name__).lower()

    def __init__(self, what: str, *, why: str = "", fix: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = tuple(fix)

    def __str__(self) -> str:
        code = f"[{self.code}]"
        # torch makes the error of a worker again from the text of its traceback, which has all of this.
        if "\n" in self.what and code in self.what and not self.why:
            return self.what.rstrip("\n")
        lines = [f"{self.what} {code}"]
        if self.why:
            lines.append(_hung(say("  why: "), self.why))
        lines.extend(_hung(step_label(step), step) for step in self.fix)
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are pickled between processes; without this, keyword-only arguments and attributes would be lost.
        return (_rebuild, (type(self), self.what, self.why, self.fix), self.__dict__)

    def as_dict(self) -> dict[str, object]:
        """The error for JSON."""
        return {"code": self.code, "message": self.what, "why": self.why, "fix": list(self.fix)}


def _hung(label: str, text: str) -> str:
    """The text after its label; further lines are indented to the first."""
    return label + text.replace("\n", "\n" + step_indent())


def _rebuild(kind: type[LegroomError], what: str, why: str, fix: tuple[str, ...]) -> LegroomError:
    return kind(what, why=why, fix=fix)


class UsageError(LegroomError):
    """Invalid arguments or options."""

    code = "bad-usage"
    exit_status = EXIT_USAGE


class BadSize(UsageError, ValueError):
    """A size that cannot be read."""


class BadDuration(UsageError, ValueError):
    """A duration that cannot be read."""


class NoSuchProcess(UsageError):
    """A process id that does not exist or is not visible."""


class UnreadableProcess(NoSuchProcess):
    """A process that exists, but whose memory may not be read: another user's."""


class NothingMatches(UsageError):
    """A pattern that matches no process."""


class NoSuchRoot(UsageError):
    """A --root that does not exist or is not a directory."""


class CannotListen(UsageError):
    """An address that cannot be listened on: in use, not local, or not permitted."""


class CannotWrite(UsageError):
    """A standard stream that cannot be written: closed, or on a full disk."""


class CommandNotFound(UsageError):
    """The command does not exist; the exit status is that of a shell."""

    exit_status = 127


class CommandNotRunnable(UsageError):
    """The command exists but cannot be executed; the exit status is that of a shell."""

    exit_status = 126


class MissingKey(UsageError, KeyError):
    """A name that is not in the data; the message lists the names and the closest one."""

    __str__ = LegroomError.__str__  # KeyError prints the repr of the message


class NoLength(UsageError, TypeError):
    """A length that is unknown before everything is read; a TypeError, as Python expects of len()."""


class MissingPackage(UsageError, ImportError):
    """A required optional package is not installed."""


class Unpicklable(UsageError, PicklingError):
    """An object for worker processes that cannot be pickled."""


class BadArgument(UsageError, ValueError):
    """An invalid argument or combination of arguments; a ValueError, as in torch."""


class BadArgumentType(UsageError, TypeError):
    """An argument of a wrong type; a TypeError, as in torch."""


class BatchSizeNeeded(UsageError):
    """The batch size is neither given nor a setting of a DataLoader."""


class BadLimit(UsageError, ValueError):
    """An invalid GPU limit: zero, above the GPU's memory, or below what a CUDA context takes."""


class ShareMismatch(UsageError, ValueError):
    """A trainer whose arguments differ from those of the group it wants to share batches with."""


class ShareUnsupported(UsageError, ValueError):
    """A loader whose batches cannot be shared; the message says why."""


class SourceError(LegroomError):
    """Something is wrong with the data file."""

    exit_status = EXIT_USAGE


class UnreadableSource(SourceError, OSError):
    """The file does not exist, is not a file, or may not be read."""

    __str__ = LegroomError.__str__


class RemoteError(UnreadableSource):
    """An object in remote storage could not be read. ``status`` is the server's HTTP status, where it gave one."""

    status: int | None = None

    def __init__(self, what: str, *, why: str = "", fix: Sequence[str] = (), status: int | None = None) -> None:
        super().__init__(what, why=why, fix=fix)
        self.status = status


class NoCredentials(RemoteError):
    """No credentials for the storage service were found."""


class AccessDenied(RemoteError):
    """The storage service refused access."""


class NoSuchObject(RemoteError):
    """The storage service has no such object or bucket."""


class RemoteTimeout(RemoteError):
    """The storage service sent nothing for too long."""


class RemoteUnreachable(RemoteError):
    """There is no connection to the storage service."""


class ShortRead(RemoteError):
    """The storage service sent less than was asked for, again and again."""


class TransferDamaged(SourceError):
    """What arrived does not have the hash that the storage service states; ``digest`` is what it has."""

    def __init__(self, what: str, *, why: str = "", fix: Sequence[str] = (), path: str = "", digest: str = "") -> None:
        super().__init__(what, why=why, fix=fix)
        self.path, self.digest = path, digest


class UnknownFormat(SourceError):
    """The file's format is not supported; ``converts`` if the advice is to convert it to any format that is."""

    def __init__(self, what: str, *, why: str = "", fix: Sequence[str] = (), converts: bool = False) -> None:
        super().__init__(what, why=why, fix=fix)
        self.converts = converts


class FormatPluginFailed(SourceError):
    """A package that adds a data format failed, or described a file wrongly."""


class DamagedSource(SourceError):
    """The file violates its own format: truncated, empty or corrupt."""


class UnsupportedData(SourceError):
    """Data that cannot be shared as arrays without guessing."""


class SourceBeingWritten(SourceError):
    """The file is open for writing, so its content may still change."""


class SourceChanged(SourceError):
    """The file changed while it was being read."""


class DatasetFailed(SourceError):
    """A dataset that raises, hangs, crashes or is killed while a sample is loaded."""


class DatasetOutOfMemory(DatasetFailed):
    """A dataset that used up a memory pool before it returned a sample."""

    pool: str = "ram"
    taken: int = 0  # bytes
    found: bool = False  # the dataset could be imported
    loader: Mapping[str, object] | None = None  # settings of the DataLoader that it was given as


class StoreError(LegroomError):
    """Something is wrong with the shared cache."""


class NoRoom(StoreError):
    """The data do not fit; the message gives the missing bytes and where."""


class NoStore(StoreError):
    """No directory is usable as a store; the message lists each candidate with the reason."""


class EntryInUse(StoreError):
    """An entry cannot be dropped while a process uses it."""


class NotLoaded(StoreError):
    """The cache has no entry for that file or key."""


class EntryDamaged(StoreError):
    """An entry's bytes do not match its manifest."""


class EntryUnreadable(StoreError):
    """An entry that could not be read, without proof of damage: descriptors, memory, permissions, disk errors."""


class LoaderError(LegroomError):
    """A batch could not be made or delivered."""


class RaggedBatch(LoaderError, RuntimeError):
    """Samples of different shapes cannot be stacked into a batch."""


class BudgetTooSmall(LoaderError):
    """A memory budget below one batch per worker."""


class WorkerDied(LoaderError, RuntimeError):
    """A worker process died; the message gives the signal, the kernel's OOM counters and what to do."""


class BatchLost(LoaderError, RuntimeError):
    """A batch was sent but its memory cannot be opened."""


class LoaderClosed(LoaderError):
    """The loader was closed while a worker waited for it."""


class ProducerFailed(LoaderError, RuntimeError):
    """The process that makes the batches of a group cannot make them."""


class GpuError(LegroomError):
    """An error about GPU memory."""


class NoCuda(GpuError, RuntimeError):
    """There is no CUDA device; the message names the operation that needs one."""


class DoesNotFit(GpuError, RuntimeError):
    """Not even one sample fits."""


class TrialFailed(GpuError, RuntimeError):
    """A trial in a child process that failed for another reason than memory."""


class RanksDisagree(GpuError, RuntimeError):
    """Ranks of one job were given different arguments."""


class ClusterUnreachable(LegroomError):
    """There is no connection to the cluster, or it has stopped in the middle."""


class DemoFailed(LegroomError):
    """The demo cannot run here, or a part of it failed."""
