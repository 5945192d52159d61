"""Trials of Ray Tune on one copy of the data for each node, and batches that are prepared once for all trials there.

    python tune_trials.py --data s3://bucket/rows.npy [--address auto] [--trials 8] [--epochs 3]
    python tune_trials.py --make rows.npy        write data for it: upload it, or give every node the file

The driver loads the object on every node. In a trial, ``legroom.open`` attaches to the copy of its node.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

import ray
import rows
import torch
from ray import tune
from torch.nn import functional as F  # noqa: N812

import legroom
from legroom.integrations.ray import warm
from legroom.loader.dataloader.sharing.group_folder import groups

SHARE = "tune"
RATES = (0.003, 0.001, 0.01, 0.0003, 0.03, 0.1)


@ray.remote(num_cpus=0)
class Start:
    """Lets trials begin together. Those that share batches should."""

    def __init__(self, trials: int) -> None:
        self._left, self._all = trials, asyncio.Event()

    async def wait(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._all.set()
        await self._all.wait()


def trial(config: dict, data_url: str, start: ray.actor.ActorHandle) -> None:
    torch.manual_seed(0)  # the order of the batches is part of what trials have in common
    torch.set_num_threads(1)
    begun = time.perf_counter()
    data = legroom.open(data_url)
    opened = time.perf_counter() - begun
    loader = legroom.DataLoader(rows.Rows(data), batch_size=64, shuffle=True, num_workers=1, share=SHARE)
    model = rows.model()
    ray.get(start.wait.remote())
    optimizer, right, seen = None, 0, 0
    for epoch in range(config["epochs"]):
        right = seen = 0
        for images, labels in loader:
            logits = model(images)
            optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=config["lr"])
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right, seen = right + int((logits.argmax(1) == labels).sum()), seen + len(labels)
        if epoch < config["epochs"] - 1:
            continue
        own = [one for group in groups() for one in group["trainers"] if one["pid"] == os.getpid()]
        tune.report({
            "accuracy": right / seen, "samples": seen, "opened": opened, "key": data.info.key,
            "node": ray.util.get_node_ip_address(), "shared": sum(one["shared"] for one in own),
        })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="URL of the object")
    parser.add_argument("--make", type=Path, metavar="FILE", help="write data and end")
    parser.add_argument("--rows", type=int, default=20_000, help="of the data that --make writes")
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--results", help="folder that all nodes see; default: one that is removed at the end")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.make is not None:
        rows.write(options.make, options.rows)
        return
    if options.data is None:
        parser.error("--data or --make is needed")
    here = Path(__file__).parent
    ray.init(options.address, runtime_env={"working_dir": str(here)}, log_to_driver=False, logging_level="ERROR")
    loaded = warm(options.data)
    for one in loaded:
        if one.error is not None:
            raise SystemExit(f"{one.address}: {one.error.message}")
    # Not in param_space, which Tune writes to its files: a URL may have a signature.
    together = min(options.trials, int(ray.cluster_resources()["CPU"]))
    trainable = tune.with_parameters(trial, data_url=options.data, start=Start.remote(together))
    with tempfile.TemporaryDirectory(prefix="legroom-tune-", dir=here) as scratch:
        rates = [RATES[number % len(RATES)] for number in range(options.trials)]
        found = tune.Tuner(
            tune.with_resources(trainable, {"cpu": 1}),
            param_space={"lr": tune.grid_search(rates), "epochs": options.epochs},
            run_config=tune.RunConfig(storage_path=options.results or scratch, verbose=0),
        ).fit()  # fmt: skip
    if found.errors:
        raise SystemExit(str(found.errors[0]))
    table = [one.metrics for one in found]
    if options.json:
        nodes = [{"node": one.address, "read": one.read, "received": one.received} for one in loaded]
        print(json.dumps({"nodes": nodes, "trials": table}, default=str))
        return
    for one in loaded:
        print(f"{one.address}: {one.state}, {one.read:,} bytes read, {one.received:,} from other nodes")
    for one in sorted(table, key=lambda one: (one["node"], one["config"]["lr"])):
        print(f"{one['node']}  lr {one['config']['lr']:<7} data after {one['opened'] * 1000:.1f} ms"
              f"  batches shared {one['shared']}  accuracy {one['accuracy']:.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
