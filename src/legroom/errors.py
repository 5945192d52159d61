"""Every error Legroom raises: what happened, why (with numbers), what to do, under a stable code.

    LegroomError
    ├── UsageError            exit 2   invalid arguments or options
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
    │   ├── BadArgumentType            bad-argument-type
    │   ├── BatchSizeNeeded            batch-size-needed
    │   ├── BadLimit                   bad-limit
    │   ├── ShareMismatch              share-mismatch
    │   └── ShareUnsupported           share-unsupported
    ├── SourceError           exit 2   the data file
    │   ├── UnreadableSource           unreadable-source
    │   │   └── RemoteError            remote-error: an object in remote storage
    │   │       ├── NoCredentials      no-credentials
    │   │       ├── AccessDenied       access-denied
    │   │       ├── NoSuchObject       no-such-object
    │   │       ├── RemoteTimeout      remote-timeout
    │   │       ├── RemoteUnreachable  remote-unreachable
    │   │       └── ShortRead          short-read
    │   ├── TransferDamaged            transfer-damaged
    │   ├── UnknownFormat              unknown-format
    │   ├── FormatPluginFailed         format-plugin-failed
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
    ├── LoaderError           exit 1   making and sending batches
    │   ├── RaggedBatch                ragged-batch
    │   ├── BudgetTooSmall             budget-too-small
    │   ├── WorkerDied                 worker-died
    │   ├── BatchLost                  batch-lost
    │   ├── LoaderClosed               loader-closed
    │   └── ProducerFailed             producer-failed
    ├── GpuError              exit 1   GPU memory
    │   ├── NoCuda                     no-cuda
    │   ├── DoesNotFit                 does-not-fit
    │   ├── TrialFailed                trial-failed
    │   └── RanksDisagree              ranks-disagree
    ├── ClusterUnreachable    exit 1   cluster-unreachable
    └── DemoFailed            exit 1   demo-failed

Codes are stable, so programs may match them; the sentences may change. Findings of `legroom doctor` are not errors:
see records/findings.py.
"""

from __future__ import annotations

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

    code = "bad-size"


class BadDuration(UsageError, ValueError):
    """A duration that cannot be read."""

    code = "bad-duration"


class NoSuchProcess(UsageError):
    """A process id that does not exist or is not visible."""

    code = "no-such-process"


class NothingMatches(UsageError):
    """A pattern that matches no process."""

    code = "nothing-matches"


class NoSuchRoot(UsageError):
    """A --root that does not exist or is not a directory."""

    code = "no-such-root"


class CannotListen(UsageError):
    """An address that cannot be listened on: in use, not local, or not permitted."""

    code = "cannot-listen"


class CannotWrite(UsageError):
    """A standard stream that cannot be written: closed, or on a full disk."""

    code = "cannot-write"


class CommandNotFound(UsageError):
    """The command does not exist; the exit status is that of a shell."""

    code = "command-not-found"
    exit_status = 127


class CommandNotRunnable(UsageError):
    """The command exists but cannot be executed; the exit status is that of a shell."""

    code = "command-not-runnable"
    exit_status = 126


class MissingKey(UsageError, KeyError):
    """A name that is not in the data; the message lists the names and the closest one."""

    code = "missing-key"
    __str__ = LegroomError.__str__  # KeyError prints the repr of the message


class NoLength(UsageError, TypeError):
    """A length that is unknown before everything is read; a TypeError, as Python expects of len()."""

    code = "no-length"


class MissingPackage(UsageError, ImportError):
    """A required optional package is not installed."""

    code = "missing-package"


class Unpicklable(UsageError, PicklingError):
    """An object for worker processes that cannot be pickled."""

    code = "unpicklable"


class BadArgument(UsageError, ValueError):
    """An invalid argument or combination of arguments; a ValueError, as in torch."""

    code = "bad-argument"


class BadArgumentType(UsageError, TypeError):
    """An argument of a wrong type; a TypeError, as in torch."""

    code = "bad-argument-type"


class BatchSizeNeeded(UsageError):
    """The batch size is neither given nor a setting of a DataLoader."""

    code = "batch-size-needed"


class BadLimit(UsageError, ValueError):
    """An invalid GPU limit: zero, above the GPU's memory, or below what a CUDA context takes."""

    code = "bad-limit"


class ShareMismatch(UsageError, ValueError):
    """A trainer whose arguments differ from those of the group it wants to share batches with."""

    code = "share-mismatch"


class ShareUnsupported(UsageError, ValueError):
    """A loader whose batches cannot be shared; the message says why."""

    code = "share-unsupported"


class SourceError(LegroomError):
    """Something is wrong with the data file."""

    code = "source-error"
    exit_status = EXIT_USAGE


class UnreadableSource(SourceError, OSError):
    """The file does not exist, is not a file, or may not be read."""

    code = "unreadable-source"
    __str__ = LegroomError.__str__


class RemoteError(UnreadableSource):
    """An object in remote storage could not be read. ``status`` is the server's HTTP status, where it gave one."""

    code = "remote-error"
    status: int | None = None

    def __init__(self, what: str, *, why: str = "", fix: Sequence[str] = (), status: int | None = None) -> None:
        super().__init__(what, why=why, fix=fix)
        self.status = status


class NoCredentials(RemoteError):
    """No credentials for the storage service were found."""

    code = "no-credentials"


class AccessDenied(RemoteError):
    """The storage service refused access."""

    code = "access-denied"


class NoSuchObject(RemoteError):
    """The storage service has no such object or bucket."""

    code = "no-such-object"


class RemoteTimeout(RemoteError):
    """The storage service sent nothing for too long."""

    code = "remote-timeout"


class RemoteUnreachable(RemoteError):
    """There is no connection to the storage service."""

    code = "remote-unreachable"


class ShortRead(RemoteError):
    """The storage service sent less than was asked for, again and again."""

    code = "short-read"


class TransferDamaged(SourceError):
    """What arrived does not have the hash that the storage service states; ``digest`` is what it has."""

    code = "transfer-damaged"

    def __init__(self, what: str, *, why: str = "", fix: Sequence[str] = (), path: str = "", digest: str = "") -> None:
        super().__init__(what, why=why, fix=fix)
        self.path, self.digest = path, digest


class UnknownFormat(SourceError):
    """The file's format is not supported; ``converts`` if the advice is to convert it to any format that is."""

    code = "unknown-format"

    def __init__(self, what: str, *, why: str = "", fix: Sequence[str] = (), converts: bool = False) -> None:
        super().__init__(what, why=why, fix=fix)
        self.converts = converts


class FormatPluginFailed(SourceError):
    """A package that adds a data format failed, or described a file wrongly."""

    code = "format-plugin-failed"


class DamagedSource(SourceError):
    """The file violates its own format: truncated, empty or corrupt."""

    code = "damaged-source"


class UnsupportedData(SourceError):
    """Data that cannot be shared as arrays without guessing."""

    code = "unsupported-data"


class SourceBeingWritten(SourceError):
    """The file is open for writing, so its content may still change."""

    code = "source-being-written"


class SourceChanged(SourceError):
    """The file changed while it was being read."""

    code = "source-changed"


class DatasetFailed(SourceError):
    """A dataset that raises, hangs, crashes or is killed while a sample is loaded."""

    code = "dataset-failed"


class DatasetOutOfMemory(DatasetFailed):
    """A dataset that used up a memory pool before it returned a sample."""

    code = "dataset-out-of-memory"
    pool: str = "ram"
    taken: int = 0  # bytes
    found: bool = False  # the dataset could be imported
    loader: Mapping[str, object] | None = None  # settings of the DataLoader that it was given as


class StoreError(LegroomError):
    """Something is wrong with the shared cache."""

    code = "store-error"


class NoRoom(StoreError):
    """The data do not fit; the message gives the missing bytes and where."""

    code = "no-room"


class NoStore(StoreError):
    """No directory is usable as a store; the message lists each candidate with the reason."""

    code = "no-store"


class EntryInUse(StoreError):
    """An entry cannot be dropped while a process uses it."""

    code = "entry-in-use"


class NotLoaded(StoreError):
    """The cache has no entry for that file or key."""

    code = "not-loaded"


class EntryDamaged(StoreError):
    """An entry's bytes do not match its manifest."""

    code = "entry-damaged"


class EntryUnreadable(StoreError):
    """An entry that could not be read, without proof of damage: descriptors, memory, permissions, disk errors."""

    code = "entry-unreadable"


class LoaderError(LegroomError):
    """A batch could not be made or delivered."""

    code = "loader-error"


class RaggedBatch(LoaderError, RuntimeError):
    """Samples of different shapes cannot be stacked into a batch."""

    code = "ragged-batch"


class BudgetTooSmall(LoaderError):
    """A memory budget below one batch per worker."""

    code = "budget-too-small"


class WorkerDied(LoaderError, RuntimeError):
    """A worker process died; the message gives the signal, the kernel's OOM counters and what to do."""

    code = "worker-died"


class BatchLost(LoaderError, RuntimeError):
    """A batch was sent but its memory cannot be opened."""

    code = "batch-lost"


class LoaderClosed(LoaderError):
    """The loader was closed while a worker waited for it."""

    code = "loader-closed"


class ProducerFailed(LoaderError, RuntimeError):
    """The process that makes the batches of a group cannot make them."""

    code = "producer-failed"


class GpuError(LegroomError):
    """An error about GPU memory."""

    code = "gpu-error"


class NoCuda(GpuError, RuntimeError):
    """There is no CUDA device; the message names the operation that needs one."""

    code = "no-cuda"


class DoesNotFit(GpuError, RuntimeError):
    """Not even one sample fits."""

    code = "does-not-fit"


class TrialFailed(GpuError, RuntimeError):
    """A trial in a child process that failed for another reason than memory."""

    code = "trial-failed"


class RanksDisagree(GpuError, RuntimeError):
    """Ranks of one job were given different arguments."""

    code = "ranks-disagree"


class ClusterUnreachable(LegroomError):
    """There is no connection to the cluster, or it has stopped in the middle."""

    code = "cluster-unreachable"


class DemoFailed(LegroomError):
    """The demo cannot run here, or a part of it failed."""

    code = "demo-failed"
