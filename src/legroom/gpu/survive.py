"""legroom.gpu.on_oom: training steps that go on in smaller pieces when memory runs out.

Covers: halving the micro-batch, gradients that add up to those of the whole batch, all ranks together.
Does not cover: the optimizer's step, which stays the caller's (its state is made there, once), and finding a batch
beforehand (finder.py).

A backward pass that dies half way has added to some gradients and not to others. So gradients that were there are put
aside, a failed attempt's are thrown away, the whole batch starts again in smaller pieces, and what was put aside is
added at the end. A DDP model runs as the module inside it: DDP communicates in forward too (buffers, once its buckets),
no_sync() or not, and a rank that died before would leave the others waiting. Ranks first agree that all got through;
then gradients are averaged and buffers sent round here. FSDP and ZeRO-3 cannot be taken apart like this.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

from legroom.errors import DoesNotFit, TrialFailed, UsageError
from legroom.gpu.oom import is_oom, let_go
from legroom.gpu.pieces import pieces, samples
from legroom.gpu.ranks import Ranks
from legroom.words import say

LossOf = Callable[..., Any]
_BROKE, _RAN_OUT, _FITTED = range(3)  # how an attempt ended; the worst over all ranks counts


class BatchStatistics(UserWarning):
    """A model that normalises over the batch gives other results in smaller pieces."""


def on_oom(
    model: Any,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    smallest: int = 1,
    cut: Callable[[Any, int], list[Any]] | None = None,
) -> Callable[[LossOf], Survivor]:
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
    return lambda loss_of: Survivor(loss_of, model, reduction, smallest, cut or pieces)


class Survivor:
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
        ranks, count = Ranks(), samples(batch)
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
        self, batch: Any, size: int, count: int, ranks: Ranks, more: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        total = None
        with _apart(self._model, ranks):
            for piece in [batch] if size >= count else self._cut(batch, size):
                loss = self._loss_of(piece, *more, **named)
                if self._mean:
                    loss = loss * (samples(piece) / count)
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
            let_go(problem)
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
                BatchStatistics,
                stacklevel=4,
            )  # fmt: skip

    def _exchange(self, ranks: Ranks) -> None:
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


def _is_ddp(model: Any, ranks: Ranks) -> bool:
    return ranks.world > 1 and hasattr(model, "no_sync") and hasattr(model, "module")


@contextlib.contextmanager
def _apart(model: Any, ranks: Ranks) -> Iterator[None]:
    """While it lasts a DDP model does not communicate: its hooks do nothing unless its own forward told them to."""
    if not _is_ddp(model, ranks):
        yield
        return
    model.forward = model.module.forward
    try:
        yield
    finally:
        del model.forward
