"""A demand whose dataset is only stated, with what its processes take before they hold any data.

Covers: the training's process and its workers, measured on ones that have imported torch and nothing else. Does not
cover: what a dataset or a model adds to them (``--dataset`` measures the first, ``--process-ram`` states the second).
"""

from __future__ import annotations

import sys
from dataclasses import replace

from legroom.advice.memory_need import SPARE
from legroom.advice.plan_inputs import Demand
from legroom.loader.measure.bare import Bare, bare
from legroom.loader.measure.private import idle_worker, start_method
from legroom.units import format_size
from legroom.words import say


def with_bare_processes(demand: Demand, timeout: float) -> Demand:
    """The demand with what was measured; as it is where nothing could be."""
    method = demand.start_method or start_method()
    if "torch" in sys.modules:  # this process is the training, and counted in what is used already
        worker = idle_worker() if method == "fork" else bare(timeout).worker(method)
        source = say("measured: a worker that this process started by {method}", method=method)
        return demand if worker is None else replace(demand, worker_ram=worker, worker_ram_source=source)
    return _with(demand, bare(timeout), method)


def _with(demand: Demand, found: Bare, method: str) -> Demand:
    worker = found.worker(method)
    if worker is not None:
        source = say(
            "measured: a worker started by {method} from a process that has only imported torch",
            method=method,
        )
        demand = replace(demand, worker_ram=worker, worker_ram_source=source)
    if demand.process_ram is not None or found.process is None:
        return demand
    source = say("measured: a process that has only imported torch")
    process = found.process
    if found.stopped:  # it takes more than there is, and how much more nobody knows
        process += SPARE
        source = say(
            "measured: a process that imports torch was stopped when it had taken {taken}; {spare} must stay free",
            taken=format_size(found.process), spare=format_size(SPARE),
        )  # fmt: skip
    return replace(demand, process_ram=process, process_ram_source=source)
