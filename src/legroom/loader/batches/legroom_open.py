"""``legroom.open``: the data of a file, one copy for every process, and the loops over them.

The cache does not depend on the loaders, so the Data that has ``batches`` is a subclass of the cache's own. See
docs/decisions/0009-open-is-in-the-loader.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from legroom.cache.cached_arrays_and_tables import CachedData
from legroom.cache.find_or_build_entry import OpenRequest, Where, open_as, source_paths
from legroom.errors import MissingKey
from legroom.formats.base_reader import Selection
from legroom.messages import say
from legroom.system.argument_checks import check_arguments
from legroom.system.lazy_and_optional_imports import import_lock, lazy_import

if TYPE_CHECKING:
    from legroom.loader.batches.batch_iterator import Batches
    from legroom.loader.batches.cpu_gather import HostGatherer
    from legroom.loader.rank_sampler import Uneven


class Data(CachedData):
    """A read-mostly mapping of names to arrays on the shared copy, and batches of them."""

    next_epoch: int = 0  # for the next shuffled loop without an epoch argument

    @cached_property
    def gatherers(self) -> dict[object, HostGatherer]:
        """Gatherers of the latest loops; the next loop like them reuses their buffers without page faults."""
        return {}

    def close(self) -> None:
        """Release everything; arrays still in use stay valid. A second call does nothing."""
        self.gatherers.clear()
        super().close()

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int | None = None,
        device: Any = None,
        format: str = "torch",
        keys: str | Iterable[str] | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven = "pad",
        transform: Callable[[dict[str, Any]], Any] | None = None,
        resident: bool = False,
        path: str | None = None,
        sequence_length: int | None = None,
        stride: int | None = None,
        rows: slice | Iterable[int] | None = None,
    ) -> Batches:
        """Iterate over batches of rows: dicts of names to tensors, gathered from the shared copy without workers.

        Args:
            batch_size: Rows per batch, on every rank.
            shuffle: Use a random order that depends on ``seed`` and ``epoch`` only.
            seed: Seed of that order.
            epoch: Epoch number; None: each new shuffled loop over these data uses the next one.
            device: ``"cuda"`` returns batches on the GPU; None, in RAM.
            format: ``"torch"``, or ``"numpy"``, which returns arrays and needs no torch.
            keys: The columns, or groups of them; None takes all.
            drop_last: Drop batches smaller than ``batch_size``. With fewer rows than that, an epoch has no batches, as
                in torch: ``len`` is 0 and a loop ends at once. A warning is logged.
            rank: Rank of this process; None: torch.distributed's, or the launcher's.
            world_size: Number of ranks; None: likewise.
            uneven: Rows that do not divide evenly among the ranks: ``"pad"`` repeats some, ``"drop"`` leaves some
                out, ``"all"`` returns each once, and ranks may differ by one batch.
            transform: Called with every batch in the consumer's thread; its result is returned instead.
            resident: With a device, keep the arrays in GPU memory.
            path: With a device, use this path instead of the one that is chosen: cuda-copy-engine, cuda-kernel,
                cuda-registered or cuda-pinned. ``batches.path`` and ``batches.why`` show the choice.
            sequence_length: Of a token file: make batches of windows. ``batch["tokens"]`` has the shape
                (batch_size, sequence_length + 1): the inputs are ``[:, :-1]``, the targets ``[:, 1:]``.
            stride: Tokens from the start of one window to that of the next; None: sequence_length. A smaller one makes
                windows overlap; a larger one leaves out ``stride - sequence_length`` tokens after each window.
            rows: Use only these rows, in this order unless ``shuffle`` is set: a slice, a range, row numbers or a mask
                with one bool for each row. With ``sequence_length``, windows. None uses all.
        """
        given = dict(locals())
        del given["self"]
        with import_lock:
            from legroom.loader.batches.batch_iterator import Batches
            from legroom.loader.batches.batch_settings import BatchSettings
            from legroom.loader.rank_sampler import warn_of_no_batches

        batches = Batches(self, BatchSettings(**{**given, "keys": Selection(keys).keys}))
        sampler = batches.sampler
        if sampler.rows and not len(sampler):
            warn_of_no_batches(sampler.rows, sampler.batch_size, sampler.world_size, sampler.uneven)
        return batches


def open(
    path: Where | Iterable[Where],
    keys: str | Iterable[str] | None = None,
    *,
    backing: str = "auto",
    hash: str = "md5",
    wait: bool = True,
    progress: Callable[[int, int], None] | None = None,
    evict: bool = True,
    revalidate: bool = False,
    dtype: Any = None,
) -> Data:
    """The arrays of a file (or of several, joined along the first axis), shared by every process of this user.

    The first process loads it, later ones attach. HDF5, npy, npz, Parquet, Arrow, Zarr, safetensors, LMDB, token files
    (Megatron's, llm.c's and flat ones) and directories of Hugging Face datasets can be read; WebDataset tar, MosaicML
    MDS and folders of images by class as raw bytes; and formats that other packages have registered.

    Args:
        path: A file, a directory (Zarr, LMDB, Hugging Face, MDS, images), a URL (``"s3://bucket/key"``,
            ``"https://…"``, any protocol of fsspec), a pattern (``"shards/*.h5"``, its matches sorted), a range
            (``"train-{000..127}.tar"``), or several of them: shards of one dataset, in the order given.
        keys: The arrays, groups, or columns of a table to take, by name; None takes all.
        backing: ``"shm"``, ``"disk"``, or ``"auto"`` for the first of them with room; ``"inplace"`` maps an
            uncompressed file in place, without a copy.
        hash: The hash that identifies the file: ``"md5"``, or ``"blake3"`` or ``"xxh3"`` with the
            package blake3 or xxhash.
        wait: Wait for another process that is loading the file; False raises NotLoaded then.
        progress: Called with (done, total) bytes while it loads.
        evict: Remove unused entries when space is needed; False raises NoRoom instead.
        revalidate: Ask the server of a URL whether the object has changed, even if that was done less than
            ``LEGROOM_REMOTE_FRESH`` seconds (60) ago.
        dtype: The type of the numbers in a flat token file, such as ``"uint16"``; little-endian unless it says
            otherwise. Other formats state their types themselves.
    """
    check_arguments(open, locals(), ("path", "keys", "backing", "hash"))
    kind = None if dtype is None else lazy_import("legroom.formats.token_reader").token_dtype(dtype)
    request = OpenRequest(source_paths(path), Selection(keys).keys, backing, hash, evict, revalidate, kind)
    try:
        return open_as(Data, request, wait=wait, progress=progress)
    except MissingKey as problem:
        if isinstance(path, str | os.PathLike) and isinstance(keys, str) and os.path.isfile(keys):  # a second path
            problem.fix = (
                say("for several files pass a list: legroom.open([{first!r}, {second!r}])",
                    first=str(path), second=keys),
                *problem.fix,
            )  # fmt: skip
        raise
