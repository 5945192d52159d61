"""legroom.gpu.is_oom and on_oom: recognise out-of-memory errors, and retry a training step in smaller micro-batches.

A backward pass that fails half way has added to some gradients and not to others. So on_oom sets existing gradients
aside, drops those of a failed attempt, repeats the whole batch in smaller micro-batches, and adds the old gradients at
the end. The optimizer's step stays with the caller.

A DDP model runs as the module inside it: DDP communicates in forward too (buffers, and its buckets once), even under
no_sync(), and a rank that failed earlier would leave the others waiting. First the ranks agree that all succeeded; then
gradients are averaged and buffers broadcast here. FSDP and ZeRO-3 communicate in every layer and are refused.
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
from legroom.gpu.model_call_loss_and_batch_split import check_model, count_samples, split_batch
from legroom.gpu.rank_consensus import RankConsensus
from legroom.messages import counted, phrase, say
from legroom.system.argument_checks import check_arguments, check_integer

Kind = Literal["gpu", "host"]

_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
# Out-of-memory errors without a type of their own are recognised by how torch's text starts, never by "out of memory"
# somewhere in it: a user's own RuntimeError about memory is the user's.
_GPU = re.compile(r"CUDA error: (?:out of memory|CUBLAS_STATUS_ALLOC_FAILED)|cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
_HOST = re.compile(r"(?:\[enforce fail at [^\]]*\] .{0,40})?DefaultCPUAllocator: (?:can't allocate|not enough) memory")
_ERROR, _OUT_OF_MEMORY, _FITTED = range(3)  # how an attempt ended; the lowest over all ranks counts


def is_oom(problem: BaseException) -> Kind | None:
    """``"gpu"`` or ``"host"`` if the exception means that this memory ran out, None for any other error.

    Args:
        problem: A caught exception. It is recognised by type or, where torch raises a plain RuntimeError, by how its
            text begins. Your own RuntimeError that mentions memory is not recognised.
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
    """Clear the frames of an exception and its causes: they keep the failed step's tensors alive."""
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


LossFunction = Callable[..., Any]


class BatchNormWarning(UserWarning):
    """The model normalises over the batch, so micro-batches change its results."""


def on_oom(
    model: Any,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    smallest: int = 1,
    cut: Callable[[Any, int], list[Any]] | None = None,
) -> Callable[[LossFunction], MicroBatchLoss]:
    """Decorate ``loss_of(batch, …)``, which returns the loss of a batch: a call then runs forward and backward.

    If memory runs out, the batch is repeated in micro-batches of half the size, which later calls keep. The gradients
    are those of the whole batch.

    Args:
        model: The model whose gradients are restored when an attempt fails.
        reduction: How the loss combines samples: ``"mean"`` or ``"sum"``.
        smallest: The smallest micro-batch, in samples.
        cut: ``cut(batch, size)`` splits batches that are not nested tensors.
    """
    check_arguments(on_oom, locals())
    check_model(model, None)
    if not _is_ddp(model) and any(hasattr(model, name) for name in ("no_sync", "set_requires_gradient_sync")):
        raise UsageError(
            say("on_oom cannot repeat a step of {kind}", kind=type(model).__name__),
            why=say("it communicates in every layer (FSDP, ZeRO): a rank that runs out of memory leaves the others "
                    "waiting"),
            fix=(say("use DistributedDataParallel, or set the micro-batch by hand"),),
        )  # fmt: skip
    smallest = check_integer("smallest", smallest, 1)
    return lambda loss_of: MicroBatchLoss(loss_of, model, reduction, smallest, cut or split_batch)


class MicroBatchLoss:
    """A decorated loss: call it with a batch for the whole batch's loss; the gradients are in the model."""

    def __init__(
        self, loss_of: LossFunction, model: Any, reduction: str, smallest: int, cut: Callable[[Any, int], list[Any]]
    ) -> None:
        check_arguments(MicroBatchLoss.__init__, locals())
        functools.update_wrapper(self, loss_of)
        self._loss_of, self._model, self._cut = loss_of, model, cut
        self._mean, self._smallest = reduction == "mean", smallest
        self.micro_batch: int | None = None  # None: whole batches so far
        self.halvings = 0

    def __call__(self, batch: Any, *more: Any, **named: Any) -> Any:
        """Forward and backward of the whole batch, in as many micro-batches as needed."""
        ranks, count = RankConsensus(), count_samples(batch)
        previous = self._take_gradients()
        while True:
            size = min(self.micro_batch or count, count)
            total, problem = None, None
            try:
                total = self._attempt(batch, size, count, ranks, more, named)
            except Exception as raised:
                problem = raised
            ran_out = problem is not None and is_oom(problem) is not None
            (worst,) = ranks.minimum([_FITTED if problem is None else _OUT_OF_MEMORY if ran_out else _ERROR])
            if worst == _FITTED:
                break
            self._drop_attempt(problem)
            (largest,) = ranks.maximum([size])
            if worst == _OUT_OF_MEMORY and largest > self._smallest:
                self._halve(largest)
                continue
            self._add_gradients(previous)
            if worst == _OUT_OF_MEMORY:
                raise self._does_not_fit(largest) from problem
            raise problem if problem is not None and not ran_out else _failed_on_another_rank()
        self._average_gradients(ranks)
        self._add_gradients(previous)
        return total

    def _attempt(
        self, batch: Any, size: int, count: int, ranks: RankConsensus, more: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        total = None
        with _without_ddp(self._model, ranks):
            for part in [batch] if size >= count else self._cut(batch, size):
                loss = self._loss_of(part, *more, **named)
                if self._mean:
                    loss = loss * (count_samples(part) / count)
                loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
        return total

    def _take_gradients(self) -> list[tuple[Any, Any]]:
        taken = [(one, one.grad) for one in self._model.parameters() if one.grad is not None]
        for one, _ in taken:
            one.grad = None
        return taken

    def _add_gradients(self, previous: list[tuple[Any, Any]]) -> None:
        for one, gradient in previous:
            one.grad = gradient if one.grad is None else gradient.add_(one.grad)

    def _drop_attempt(self, problem: BaseException | None) -> None:
        """Free what a failed attempt holds: gradients, frames, cached blocks."""
        for one in self._model.parameters():
            one.grad = None
        if problem is not None and is_oom(problem) is not None:
            release_frames(problem)
        else:
            gc.collect()
        import torch

        if torch.cuda.is_initialized():
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
                    "with micro-batches of {size}, gradients differ from those of the whole batch: {layers} over the "
                    "batch ({first}, …); group norm and layer norm do not depend on the batch size",
                    size=self.micro_batch, first=normalising[0],
                    layers=counted(
                        len(normalising), phrase("{count} layer normalises"), phrase("{count} layers normalise")
                    ),
                ),
                BatchNormWarning,
                stacklevel=4,
            )  # fmt: skip

    def _average_gradients(self, ranks: RankConsensus) -> None:
        """Average gradients over all ranks, as DDP would."""
        if ranks.world_size == 1 or not _is_ddp(self._model):
            return
        import torch
        import torch.distributed as distributed

        trained = [one for one in self._model.parameters() if one.requires_grad]
        used = ranks.maximum([int(one.grad is not None) for one in trained])
        for one, on_any_rank in zip(trained, used, strict=True):
            if on_any_rank:
                gradient = torch.zeros_like(one) if one.grad is None else one.grad
                distributed.all_reduce(gradient)
                one.grad = gradient.div_(ranks.world_size)
        if getattr(self._model, "broadcast_buffers", False):
            for buffer in self._model.buffers():
                distributed.broadcast(buffer, 0)

    def _does_not_fit(self, size: int) -> DoesNotFit:
        return DoesNotFit(
            say(
                "memory ran out with {samples} at a time",
                samples=counted(size, phrase("{count} sample"), phrase("{count} samples")),
            ),
            why=say("the micro-batch cannot be halved further (halvings so far: {halvings})", halvings=self.halvings),
            fix=(say("legroom.gpu.advise estimates what smaller inputs and mixed precision free"),),
        )


def _failed_on_another_rank() -> TrialFailed:
    return TrialFailed(
        say("the step raised an error on another rank"), why=say("all ranks stop together; see the log of that rank")
    )


def _is_ddp(model: Any) -> bool:
    import torch

    return isinstance(model, torch.nn.parallel.DistributedDataParallel)


@contextlib.contextmanager
def _without_ddp(model: Any, ranks: RankConsensus) -> Iterator[None]:
    """Run a DDP model without communication: its backward hooks do nothing unless its own forward prepared them."""
    if ranks.world_size == 1 or not _is_ddp(model):
        yield
        return
    model.forward = model.module.forward
    try:
        yield
    finally:
        del model.forward
