"""Running out of memory, told from every other error.

Covers: recognising it by type; cleaning up after it. Does not cover: what to do next (finder.py, survive.py).

Most of it has a type. Three kinds are plain RuntimeErrors of torch's own, and those are known by how their text starts,
never by the words "out of memory" somewhere in it: a user's own RuntimeError about memory is the user's.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

from legroom.errors import DoesNotFit, TrialFailed, UsageError
from legroom.gpu.rank_consensus import RankConsensus
from legroom.gpu.training_step import count_samples, split_batch
from legroom.words import say

Kind = Literal["gpu", "host"]

_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_GPU = re.compile(
    r"CUDA error: (?:out of memory|CUBLAS_STATUS_ALLOC_FAILED)|cuDNN error: CUDNN_STATUS_ALLOC_FAILED"
)
_HOST = re.compile(
    r"(?:\[enforce fail at [^\]]*\] .{0,40})?DefaultCPUAllocator: (?:can't allocate|not enough) memory"
)


def is_oom(problem: BaseException) -> Kind | None:
    """``"gpu"`` or ``"host"`` where memory ran out, None where it is something else.

    Args:
        problem: An exception that was caught. It is known by its type; where torch raises a plain RuntimeError, by how
            its text begins. One of your own that speaks of memory is something else.
    """
    if isinstance(problem, MemoryError):
        return "host"
    if not isinstance(problem, RuntimeError):
        return None
    import torch

    if isinstance(
        problem, torch.OutOfMemoryError if hasattr(torch, "OutOfMemoryError") else torch.cuda.OutOfMemoryError
    ):
        return "gpu"
    accelerator: Any = getattr(torch, "AcceleratorError", None)
    if accelerator is not None and isinstance(problem, accelerator):
        return "gpu" if getattr(problem, "error_code", None) == _CUDA_OUT_OF_MEMORY else None
    if type(problem) is not RuntimeError:
        return None
    if _GPU.match(str(problem)):
        return "gpu"
    return "host" if _HOST.match(str(problem)) else None


def release_frames(problem: BaseException) -> None:
    """Drop what the frames of an exception hold: the tensors of a failed step live in its traceback."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [problem]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
        one.__traceback__ = None
    gc.collect()


LossOf = Callable[..., Any]
_BROKE, _RAN_OUT, _FITTED = range(3)  # how an attempt ended; the worst over all ranks counts


class BatchNormWarning(UserWarning):
    """A model that normalises over the batch gives other results in smaller pieces."""


def on_oom(
    model: Any,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    smallest: int = 1,
    cut: Callable[[Any, int], list[Any]] | None = None,
) -> Callable[[LossOf], MicroBatchLoss]:
    """Decorate ``loss_of(batch, …)``, which gives the loss of a batch: calling it then runs forward and backward too.

    Memory that runs out halves the pieces a batch is worked through in, from then on; the gradients are those of the
    whole batch.

    Args:
        model: Whose gradients are put back when a piece fails.
        reduction: How the loss is made of samples: ``"mean"`` or ``"sum"``.
        smallest: Samples below which a piece is not halved.
        cut: ``cut(batch, size)`` splits batches that are not nests of tensors.
    """
    if reduction not in ("mean", "sum"):
        raise UsageError(
            say("{reduction!r} is no way to reduce a loss", reduction=reduction),
            why=say("pieces are weighted by it"),
            fix=(say("give 'mean' where the loss is a mean over samples, 'sum' where it is a sum"),),
        )
    return lambda loss_of: MicroBatchLoss(loss_of, model, reduction, smallest, cut or split_batch)


class MicroBatchLoss:
    """A decorated loss: call it with a batch, get the loss of the whole batch, find the gradients in the model."""

    def __init__(
        self, loss_of: LossOf, model: Any, reduction: str, smallest: int, cut: Callable[[Any, int], list[Any]]
    ) -> None:
        functools.update_wrapper(self, loss_of)
        self._loss_of, self._model, self._cut = loss_of, model, cut
        self._mean, self._smallest = reduction == "mean", smallest
        self.micro_batch: int | None = None  # None: whole batches, so far
        self.halvings = 0

    def __call__(self, batch: Any, *more: Any, **named: Any) -> Any:
        """Forward and backward of the whole batch, in as many pieces as it takes."""
        ranks, count = RankConsensus(), count_samples(batch)
        aside = self._put_aside()
        while True:
            size = min(self.micro_batch or count, count)
            total, problem = None, None
            try:
                total = self._attempt(batch, size, count, ranks, more, named)
            except Exception as raised:
                problem = raised
            ran_out = problem is not None and is_oom(problem) is not None
            (worst,) = ranks.least([_FITTED if problem is None else _RAN_OUT if ran_out else _BROKE])
            if worst == _FITTED:
                break
            self._forget(problem)
            (widest,) = ranks.most([size])
            if worst == _RAN_OUT and widest > self._smallest:
                self._halve(widest)
                continue
            self._restore(aside)
            if worst == _RAN_OUT:
                raise self._too_small(widest) from problem
            raise problem if problem is not None and not ran_out else _elsewhere()
        self._exchange(ranks)
        self._restore(aside)
        return total

    def _attempt(
        self,
        batch: Any,
        size: int,
        count: int,
        ranks: RankConsensus,
        more: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        total = None
        with _apart(self._model, ranks):
            for piece in [batch] if size >= count else self._cut(batch, size):
                loss = self._loss_of(piece, *more, **named)
                if self._mean:
                    loss = loss * (count_samples(piece) / count)
                loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
        return total

    def _put_aside(self) -> list[tuple[Any, Any]]:
        aside = [(one, one.grad) for one in self._model.parameters() if one.grad is not None]
        for one, _ in aside:
            one.grad = None
        return aside

    def _restore(self, aside: list[tuple[Any, Any]]) -> None:
        for one, gradient in aside:
            one.grad = gradient if one.grad is None else gradient.add_(one.grad)

    def _forget(self, problem: BaseException | None) -> None:
        """Everything of a failed attempt: its gradients, its frames, its cached blocks."""
        for one in self._model.parameters():
            one.grad = None
        if problem is not None and is_oom(problem) is not None:
            release_frames(problem)
        else:
            gc.collect()
        import torch

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _halve(self, size: int) -> None:
        self.micro_batch = max(self._smallest, size // 2)
        self.halvings += 1
        import torch

        normalising = [
            name
            for name, module in self._model.named_modules()
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training
        ]
        if normalising and self.halvings == 1:
            warnings.warn(
                say(
                    "pieces of {size} samples: {count} layer(s) normalise over the batch ({first}, …), so "
                    "gradients are not those of the whole batch; group or layer norm does not depend on it",
                    size=self.micro_batch, count=len(normalising), first=normalising[0],
                ),
                BatchNormWarning,
                stacklevel=4,
            )  # fmt: skip

    def _exchange(self, ranks: RankConsensus) -> None:
        """The mean of the gradients over all ranks, as DDP would have made it."""
        if not _is_ddp(self._model, ranks):
            return
        import torch
        import torch.distributed as distributed

        trained = [one for one in self._model.parameters() if one.requires_grad]
        used = ranks.most([int(one.grad is not None) for one in trained])
        for one, anywhere in zip(trained, used, strict=True):
            if anywhere:
                gradient = torch.zeros_like(one) if one.grad is None else one.grad
                distributed.all_reduce(gradient)
                one.grad = gradient.div_(ranks.world)
        if getattr(self._model, "broadcast_buffers", False):
            for buffer in self._model.buffers():
                distributed.broadcast(buffer, 0)

    def _too_small(self, size: int) -> DoesNotFit:
        return DoesNotFit(
            say("memory ran out with {size} sample(s) at a time", size=size),
            why=say("pieces were halved {halvings} time(s) and can get no smaller", halvings=self.halvings),
            fix=(say("legroom.gpu.advise says what smaller inputs and mixed precision free"),),
        )


def _elsewhere() -> TrialFailed:
    return TrialFailed(
        say("another rank's step raised an error"), why=say("ranks go on together or not at all")
    )


def _is_ddp(model: Any, ranks: RankConsensus) -> bool:
    return ranks.world > 1 and hasattr(model, "no_sync") and hasattr(model, "module")


@contextlib.contextmanager
def _apart(model: Any, ranks: RankConsensus) -> Iterator[None]:
    """While it lasts a DDP model does not communicate: its hooks do nothing unless its own forward told them to."""
    if not _is_ddp(model, ranks):
        yield
        return
    model.forward = model.module.forward
    try:
        yield
    finally:
        del model.forward
