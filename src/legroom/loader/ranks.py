"""Finds the rank of this process and the world size: from arguments, torch.distributed or the launcher's environment.

torch is asked only where the program has imported torch.distributed itself. In a Slurm batch script SLURM_PROCID=0 and
SLURM_NTASKS are set although one process runs; only SLURM_STEP_NUM_TASKS describes this process.
Ranks that share their data (tensor or pipeline parallelism) must pass rank and world_size.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from legroom.errors import UsageError
from legroom.words import say

LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, accelerate, DeepSpeed
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun
)


def rank_and_world(
    rank: int | None, world_size: int | None, env: Mapping[str, str], group: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Rank and world size: the arguments, else the process group's, else the launcher's, else 0 of 1."""
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise UsageError(
                say(
                    "pass both rank and world_size (got rank={rank}, world_size={world})",
                    rank=rank,
                    world=world_size,
                ),
                why=say("the rows of a rank depend on both"),
                fix=(
                    say("pass both"),
                    say("or pass neither: torch.distributed or the launcher's environment is used"),
                ),
            )
        return _checked(rank, world_size, say("the arguments rank and world_size"))
    if group is not None:
        return _checked(*group, "torch.distributed")
    for rank_name, world_name in LAUNCHERS:
        if rank_name in env and world_name in env:
            where = say("the environment variables {rank} and {world}", rank=rank_name, world=world_name)
            return _checked(_number(env[rank_name], rank_name), _number(env[world_name], world_name), where)
    return 0, 1


def process_group() -> tuple[int, int] | None:
    """Rank and world size of torch's default process group, if it is initialized."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            say("{name} must be an integer (got {text!r})", name=name, text=text),
            why=say("rank and world_size are read from the launcher's environment"),
            fix=(say("unset {name}", name=name), say("or pass rank and world_size")),
        ) from None


def _checked(rank: int, world_size: int, where: str) -> tuple[int, int]:
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            say(
                "rank must be from 0 to world_size - 1 (got rank={rank}, world_size={world})",
                rank=rank,
                world=world_size,
            ),
            why=say("the values come from {where}", where=where),
            fix=(say("pass a matching rank and world_size"),),
        )
    return rank, world_size
