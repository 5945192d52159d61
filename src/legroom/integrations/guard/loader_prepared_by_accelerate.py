"""What accelerate makes of a DataLoader: a wrapper around a new one of torch's own class, without ``share=``."""

from __future__ import annotations

from typing import Any

from legroom.system.lazy_and_optional_imports import lazy_import


def unwrap_loader(loader: Any) -> Any:
    """The DataLoader inside accelerate's wrapper."""
    return getattr(loader, "base_dataloader", loader)


def keep_share(prepared: Any) -> None:
    """Give a loader that accelerate has rebuilt with torch's class its ``share=`` again."""
    base = getattr(prepared, "base_dataloader", None)
    share = getattr(getattr(base, "collate_fn", None), "share", None)
    if base is None or share is None or getattr(base, "share", None) is not None:
        return
    what: dict[str, Any] = {"batch_sampler": base.batch_sampler}
    if base.batch_sampler is None:
        what = {"batch_size": None, "sampler": base.sampler}
    elif isinstance(base.dataset, lazy_import("torch.utils.data").IterableDataset):
        what = {"batch_size": base.batch_size, "drop_last": base.drop_last}
    prepared.base_dataloader = lazy_import("legroom").DataLoader(
        base.dataset, **what, num_workers=base.num_workers, collate_fn=base.collate_fn, pin_memory=base.pin_memory,
        timeout=base.timeout, worker_init_fn=base.worker_init_fn, generator=base.generator,
        multiprocessing_context=base.multiprocessing_context, prefetch_factor=base.prefetch_factor,
        persistent_workers=base.persistent_workers, share=share[0], on_slow=share[1],
    )  # fmt: skip
