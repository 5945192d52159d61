"""Which settings `legroom check` judges: those that are given, else those of the DataLoader, else torch's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legroom.advice.job_settings_to_workload import Demand
from legroom.errors import UsageError
from legroom.loader.measure.import_dataset import name_of
from legroom.messages import say

# The settings of a DataLoader that are not functions or samplers, with torch's defaults.
_DEFAULTS = {
    "num_workers": 0, "prefetch_factor": 2, "persistent_workers": False, "pin_memory": False, "loader": "torch",
    "start_method": None,
}  # fmt: skip
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "start_method")
ANY_LOADER = {**_DEFAULTS, "num_workers": 1}  # with workers, for which any setting may be given


def settings_to_check(
    given: Mapping[str, Any], own: Mapping[str, Any] | None, val_workers: int | None
) -> dict[str, Any]:
    """The settings to check: those that are given, else those of the DataLoader, else torch's defaults."""
    found = {}
    for name, default in _DEFAULTS.items():
        value = given[name] if given[name] is not None else (own or {}).get(name)
        found[name] = default if value is None else value
    if found["num_workers"]:
        return found
    if not val_workers:
        for name in ("prefetch_factor", "persistent_workers"):
            if given[name]:
                raise UsageError(
                    say("{name}= needs num_workers=1 or more", name=name),
                    why=say("torch refuses to make such a DataLoader"),
                    fix=(say("leave {name}= out", name=name),),
                )
    # Those of the DataLoader are of the workers that it would have had.
    return {**found, **{name: given[name] or _DEFAULTS[name] for name in _OF_WORKERS}}


def taken_from_dataloader(
    given: Mapping[str, Any], own: Mapping[str, Any] | None, demand: Demand
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was taken from the DataLoader, and what it has that was given otherwise."""
    if own is None:
        return {}, {}
    shown = {name: value for name, value in own.items() if name in ("batch_size", "num_workers") or value}
    if own["loader"] == "torch":
        del shown["loader"]
    if not demand.num_workers:
        for name in (*_OF_WORKERS, "worker_init_fn"):
            shown.pop(name, None)
    if given["batch_size"] not in (None, own["batch_size"]) and (sampler := shown.pop("batch_sampler", None)):
        shown["batch_size"] = f"batch_sampler={sampler}"  # which is not used
    replaced = {
        name: (name_of(given[name]), value) for name, value in shown.items()
        if given.get(name) is not None and name_of(given[name]) != value
    }  # fmt: skip
    return {name: value for name, value in shown.items() if given.get(name) is None}, replaced
