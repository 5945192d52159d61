"""Name the line that makes memory grow: `legroom leak`, `legroom run --leak`, `legroom.leak.watch`.

In the training process:

    memory_recorder                  takes samples at steps within a share of the time, writes one file per process
    torch_step_hooks                 what counts as a step: optimizer.step, batches of a DataLoader and of its workers
    process_counters                 memory of this process, and what malloc has given out
    containers_held_by_variables     walks from the user's variables to the containers, tensors and texts that they keep
    object_size                      bytes that an object keeps alive, by memory pool
    autograd_graphs                  how far back an autograd graph reaches
    creation_sites                   windows of tracemalloc: which line made what stays alive
    shm_files_by_line                files in /dev/shm by the line that made them
    dataset_pages_copied_by_workers  pages of a dataset that a forked worker has copied
    user_source_files                which source files are the user's own
    leak_watch                       legroom.leak.watch, for a script or notebook

After it, or meanwhile:

    record_files                the files that processes write, and reading them back
    leak_or_plateau             leak, plateau, jump or too short: the shape of one series
    lines_that_fill_containers  which lines of the source fill a container or a sum, and how much each adds
    find_leaking_lines          from records to the lines that make memory grow, and how sure that is
    leak_report                 the report as text, JSON and page, and what grows so far for `legroom watch`

``legroom.leak.watch`` is imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legroom.leak.leak_watch import LeakWatch, watch

__all__ = ["LeakWatch", "watch"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'legroom.leak' has no attribute {name!r}")
    from legroom.system.lazy_and_optional_imports import lazy_import

    value = globals()[name] = getattr(lazy_import("legroom.leak.leak_watch"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
