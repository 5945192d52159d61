"""DeepSpeed and accelerate themselves read what Legroom writes for them, and train by it.

    deepspeed_judge.py < CASES      [{"name", "kind": "deepspeed"|"accelerate", "text", "ranks", "train": bool}, …]

Prints {name: what each rank found}, in which a refusal is its text. One process imports both packages, which takes
seconds, and forks a group of ranks for each size that a case asks for. No card and no compiler are needed: what DeepSpeed
would compile is left out, which is its own shared-memory collective (gloo has one) and, for offload, its Adam.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

import accelerate
import deepspeed
import torch
from accelerate.commands import launch
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import launch as environments
from deepspeed.runtime.config import DeepSpeedConfig

Case = dict[str, Any]
GLOO = InitProcessGroupKwargs(backend="gloo")


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    cases: list[Case] = json.load(sys.stdin)
    fork = multiprocessing.get_context("fork")
    found: dict[str, list[Any]] = {}
    for size in sorted({case["ranks"] for case in cases}):
        told = fork.SimpleQueue()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        some = [case for case in cases if case["ranks"] == size]
        group = [fork.Process(target=rank_of, args=(rank, size, port, some, told)) for rank in range(size)]
        for one in group:
            one.start()
        for one in group:
            one.join()
            if one.exitcode:
                sys.exit(f"a rank of {size} ended with {one.exitcode}")
        for _ in group:
            for name, what in told.get().items():
                found.setdefault(name, []).append(what)
    json.dump(found, sys.__stdout__)


def rank_of(rank: int, size: int, port: int, cases: list[Case], told: Any) -> None:
    sys.stdout = sys.stderr  # DeepSpeed prints
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    os.environ |= {name: str(value) for name, value in place.items()}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    found = {}
    for case in cases:
        try:
            found[case["name"]] = {"deepspeed": by_deepspeed, "accelerate": by_accelerate}[case["kind"]](case)
        except Exception as problem:  # a refusal, in the words of whoever refused
            found[case["name"]] = f"{type(problem).__name__}: {problem}"
    told.put(found)
    torch.distributed.destroy_process_group()


def by_deepspeed(case: Case) -> Case:
    config = json.loads(case["text"])
    read = DeepSpeedConfig(dict(config))
    if case["train"]:
        # Its own Adam would have to be compiled where the states are offloaded; torch's takes its place.
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters()),
            config=config | {"zero_force_ds_cpu_optimizer": False},
        )  # fmt: skip
        for _ in range(read.gradient_accumulation_steps):
            engine.backward(
                engine(torch.ones(read.train_micro_batch_size_per_gpu, 8, dtype=precision_of(engine))).sum()
            )
            engine.step()
        engine.destroy()
        return told_of(read) | {"steps": engine.global_steps}
    return told_of(read)


def by_accelerate(case: Case) -> Case:
    """The launcher reads the file and sets an environment, which the script's Accelerator goes by."""
    chosen: list[tuple[str, Any]] = []
    for kind in ("deepspeed", "multi_gpu", "simple"):
        setattr(launch, f"{kind}_launcher", lambda asked, kind=kind: chosen.append((kind, asked)))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(case["text"])
        file.flush()
        launch.launch_command(launch.launch_command_parser().parse_args(["--config_file", file.name, "train.py"]))
    ((kind, asked),) = chosen
    if kind == "multi_gpu":
        made = environments.prepare_multi_gpu_env(asked)
    elif kind == "simple":
        made = environments.prepare_simple_launcher_cmd_env(asked)[1]
    else:
        made = environments.prepare_deepspeed_cmd_env(asked)[1]
    read = {"launcher": kind, "processes": asked.num_processes, "precision": made["ACCELERATE_MIXED_PRECISION"]}
    if kind != "deepspeed":
        return read
    before = dict(os.environ)
    os.environ |= {name: value for name, value in made.items() if name.startswith("ACCELERATE")}
    try:
        return read | with_plugin(case)
    finally:
        os.environ.clear()
        os.environ |= before
        AcceleratorState._reset_state(reset_partial_state=True)


def with_plugin(case: Case) -> Case:
    plugin = DeepSpeedPlugin()
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[GLOO])
    config = plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = case["batch"]
    if not case["train"]:  # accelerate would have DeepSpeed's Adam compiled
        config |= {"train_batch_size": case["batch"] * config["gradient_accumulation_steps"] * case["ranks"]}
        return told_of(DeepSpeedConfig(config))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(config["gradient_accumulation_steps"]):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(case["batch"], 8, dtype=precision_of(model))).sum())
    model.destroy()
    return told_of(model._config) | {"steps": model.global_steps}


def precision_of(engine: Any) -> torch.dtype:
    return torch.bfloat16 if engine.bfloat16_enabled() else torch.float32


def told_of(config: DeepSpeedConfig) -> Case:
    """What DeepSpeed understood."""
    zero = config.zero_config
    return {
        "batch": config.train_micro_batch_size_per_gpu,
        "accumulation": config.gradient_accumulation_steps,
        "effective": config.train_batch_size,
        "clipping": config.gradient_clipping,
        "stage": int(zero.stage),
        "optimizer": str(zero.offload_optimizer.device) if zero.offload_optimizer else "none",
        "weights": str(zero.offload_param.device) if zero.offload_param else "none",
        "precision": "bf16" if config.bfloat16_config.enabled else "fp16" if config.float16_config.enabled else "no",
    }


if __name__ == "__main__":
    main()
