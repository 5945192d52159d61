"""A training for test_real_dataloader_room.py: ``python room_player.py JSON``; prints one JSON object.

First `legroom.check` is asked, then the loader is tried with what was asked for, and where it refuses, with each
setting that its error says would fit.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from typing import Any

import torch
from loader_player import Images

import legroom
from legroom.errors import BudgetTooSmall

warnings.filterwarnings("ignore", "This DataLoader will create")
MEGABYTES, BATCH = 24, 4
images = Images(MEGABYTES, 48, BATCH)  # for `legroom check --dataset room_player:images`


def own(samples: list[Any]) -> Any:
    """A collate that makes the batch beside its samples."""
    return torch.stack([row for row, _ in samples]), torch.tensor([index for _, index in samples])


def passed(batch_size: int, **options: Any) -> dict[str, Any]:
    """One pass; whether every row is what it should be."""
    seen, good = 0, True
    try:
        for rows, indices in legroom.DataLoader(images, batch_size, **options):
            expected = torch.arange(seen, seen + len(indices))
            good = good and torch.equal(indices, expected) and torch.equal(rows[:, 0], expected.float())
            good = good and torch.equal(rows[:, -1], expected.float())
            seen += len(indices)
    except BudgetTooSmall as problem:
        return {"refused": problem.as_dict(), "seen": seen}
    return {"good": good and seen == len(images)}


def main(custom: bool, **options: Any) -> dict[str, Any]:
    collate = own if custom else None
    said = legroom.check(images, batch_size=BATCH, loader="legroom", collate_fn=collate, **options)
    found = passed(BATCH, collate_fn=collate, **options)
    smaller = {}
    for step in found.get("refused", {}).get("fix", ()):
        if setting := re.match(r"(num_workers|batch_size)=(\d+) fits", step):
            name, value = setting[1], int(setting[2])
            changed = {"batch_size": BATCH, **options, name: value}
            smaller[setting[0]] = passed(collate_fn=collate, **_without_prefetch(changed))
    plan = None if said.settings is None else (said.settings.num_workers, said.settings.batch_size)
    return {"check": said.verdict, "plan": plan, "need": said.need.ram, "found": found, "smaller": smaller}


def _without_prefetch(options: dict[str, Any]) -> dict[str, Any]:
    return options if options["num_workers"] else {**options, "prefetch_factor": None}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
