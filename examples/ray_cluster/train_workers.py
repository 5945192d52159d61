"""Ray Train: one model on all nodes, each worker reads the copy of its node.

    python train_workers.py --data s3://bucket/rows.npy [--address auto] [--workers 2] [--epochs 3]

The driver loads the object on every node. Each worker attaches, takes its part of the rows, and is guarded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import ray
import ray.train
import rows
import torch
from ray.train.torch import TorchTrainer, prepare_model
from torch.nn import functional as F  # noqa: N812
from torch.utils.data.distributed import DistributedSampler

import legroom
from legroom.integrations.ray import guarded, warm


def worker(config: dict) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = legroom.open(config["data"])
    dataset = rows.Rows(data)
    context = ray.train.get_context()
    sampler = DistributedSampler(dataset, context.get_world_size(), context.get_world_rank())
    loader = legroom.DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=1)
    inner = rows.model()
    inner(torch.zeros(1, 1, 28, 28))  # its last layer learns its size
    model = prepare_model(inner)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    with guarded() as guard:
        for epoch in range(config["epochs"]):
            sampler.set_epoch(epoch)
            guard.epoch(epoch, loader)
            right = seen = 0
            for images, labels in loader:
                logits = model(images)
                optimizer.zero_grad()
                F.cross_entropy(logits, labels).backward()
                optimizer.step()
                guard.step()
                right, seen = right + int((logits.argmax(1) == labels).sum()), seen + len(labels)
            metrics = {"accuracy": right / seen, "samples": seen, "node": ray.util.get_node_ip_address()}
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if context.get_world_rank() == 0:
                    torch.save(inner.state_dict(), Path(folder, "model.pt"))
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
                guard.report(metrics, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="URL of the object")
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--results", help="folder that all nodes see; default: one that is removed at the end")
    options = parser.parse_args()
    here = Path(__file__).parent
    ray.init(options.address, runtime_env={"working_dir": str(here)}, log_to_driver=False, logging_level="ERROR")
    for one in warm(options.data):
        if one.error is not None:
            raise SystemExit(f"{one.address}: {one.error.message}")
    with tempfile.TemporaryDirectory(prefix="legroom-train-", dir=here) as scratch:
        result = TorchTrainer(
            worker,
            train_loop_config={"data": options.data, "epochs": options.epochs},
            scaling_config=ray.train.ScalingConfig(num_workers=options.workers, placement_strategy="STRICT_SPREAD"),
            run_config=ray.train.RunConfig(storage_path=options.results or scratch),
        ).fit()
    print(json.dumps({name: result.metrics[name] for name in ("accuracy", "samples", "node")}))


if __name__ == "__main__":
    main()
