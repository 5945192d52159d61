"""Refuse a DeepSpeed configuration that this script cannot train with, before torch is imported.

Reads what `--deepspeed FILE` or `accelerate launch` asks for. Starting DeepSpeed is in zero.py.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from legroom.advice.zero_and_deepspeed import Shape, zero_rows
from legroom.errors import MissingPackage, UsageError
from legroom.messages import either
from legroom.units import format_size

PREFIX = "ACCELERATE_DEEPSPEED_"


def parameters(width: int, layers: int) -> int:
    """How many parameters chat.new_model has, from its two sizes alone."""
    encoder, decoder = 8 * width**2 + 2 * width, 12 * width**2 + 3 * width
    embedding, positions, norms = 259 * width, 2 * 32 * 4, 2 * width
    return embedding + positions + norms + layers * (encoder + decoder)


def check_zero(flags: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> None:
    """Raise for what the flags and the launcher's variables ask for and cannot have."""
    accumulation = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    if accumulation and accumulation != str(flags.gradient_accumulation_steps):
        raise UsageError(
            either("the launcher and the script accumulate differently", "启动器与脚本的梯度累积步数不同"),
            why=either(
                f"{accumulation} and {flags.gradient_accumulation_steps} batches per step",
                f"每步分别为 {accumulation} 和 {flags.gradient_accumulation_steps} 个批次",
            ),
            fix=(
                either(
                    f"pass --gradient_accumulation_steps={accumulation} to the script too",
                    f"给脚本也加上 --gradient_accumulation_steps={accumulation}",
                ),
            ),
        )
    asked = _requested(flags, environment)
    if asked is None:
        return
    source, config = asked
    ranks = int(environment.get("WORLD_SIZE") or 1)
    _check_stage(source, config, environment)
    _check_offload(source, config, flags, ranks, environment)
    if find_spec("deepspeed") is None:
        raise MissingPackage(
            either("ZeRO needs DeepSpeed", "ZeRO 需要 DeepSpeed"),
            why=either("the package deepspeed is not installed", "没有安装 deepspeed"),
            fix=(
                "pip install deepspeed",
                either(
                    "or train without it: Adafactor's states are small without ZeRO",
                    "或不用它：Adafactor 的优化器状态本来就很小",
                ),
            ),
        )
    _check_batch(source, config, flags, ranks)


def _requested(flags: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, dict[str, Any]] | None:
    """Where the configuration comes from, and what it is; None where ZeRO is not asked for."""
    if not flags.deepspeed and environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() != "true":
        return None
    named = str(flags.deepspeed or environment.get(f"{PREFIX}CONFIG_FILE", "none"))
    if named == "none":
        source = either("the configuration of accelerate", "accelerate 的配置")
        return source, {"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}}
    try:
        config = _read(named)
    except (OSError, ValueError) as problem:  # ValueError: neither JSON nor base64 nor UTF-8
        raise _unusable(named, str(problem)) from problem
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        raise _unusable(named, either('it has no object "zero_optimization"', '其中没有 "zero_optimization" 对象'))
    return named, config


def _read(named: str) -> Any:
    """A file, or what accelerate takes in its place: JSON, or JSON in base64."""
    if os.path.exists(named):
        with open(named, encoding="utf-8") as file:
            return json.load(file)
    try:
        return json.loads(named)
    except ValueError:
        return json.loads(base64.urlsafe_b64decode(named))


def _unusable(named: str, why: str) -> UsageError:
    return UsageError(
        either(f"{named} is not a DeepSpeed configuration", f"{named} 不是 DeepSpeed 配置"), why=why, fix=(_rewrite(),)
    )


def _rewrite() -> str:
    return either(
        "write the file with `legroom tune … --zero 2 --emit deepspeed` (README.md has the whole command)",
        "用 `legroom tune … --zero 2 --emit deepspeed` 生成该文件（完整命令见 README.zh-CN.md）",
    )


def _check_stage(source: str, config: dict[str, Any], environment: Mapping[str, str]) -> None:
    stage = config["zero_optimization"].get("stage", 0)
    if stage == "auto":
        stage = environment.get(f"{PREFIX}ZERO_STAGE", "2")
    if str(stage) not in ("0", "1", "2"):
        raise UsageError(
            either(f"{source} asks for ZeRO stage {stage}", f"{source} 要求 ZeRO 第 {stage} 阶段"),
            why=either(
                "this script saves and evaluates whole weights on each rank, which stages 0 to 2 keep",
                "本脚本在每个 rank 上保存和评估完整权重，只有 0 到 2 阶段保留完整权重",
            ),
            fix=(either("set the stage to 2", "把 stage 设为 2"),),
        )


def _check_offload(
    source: str, config: dict[str, Any], flags: argparse.Namespace, ranks: int, environment: Mapping[str, str]
) -> None:
    zero = config["zero_optimization"]
    section = zero.get("offload_optimizer")
    device = section.get("device", "none") if isinstance(section, dict) else "none"
    if device == "auto":
        device = environment.get(f"{PREFIX}OFFLOAD_OPTIMIZER_DEVICE", "none")
    if zero.get("cpu_offload") is True:  # the older spelling
        device = "cpu"
    if device in (None, "none") or not config.get("zero_force_ds_cpu_optimizer", True):
        return
    count = parameters(flags.width, flags.layers)
    rows = zero_rows(Shape(count, ranks))
    host = next(row.host for row in rows if (row.stage, row.offload) == (2, "optimizer"))
    raise UsageError(
        either(
            f"{source} offloads the optimizer to {device}, which would replace Adafactor with Adam",
            f"{source} 把优化器卸载到 {device}，Adafactor 会被换成 Adam",
        ),
        why=either(
            f"accelerate offloads only DeepSpeed's CPU Adam. For {count:,} parameters and "
            f"{ranks} {'rank' if ranks == 1 else 'ranks'} that takes about {format_size(host)} of host memory. "
            "Adafactor's states without ZeRO are about 3 % of the weights",
            f"accelerate 卸载时只用 DeepSpeed 的 CPU Adam：{count:,} 个参数、{ranks} 个 rank，约占 {format_size(host)} "
            "内存。不用 ZeRO 时，Adafactor 的状态约为权重的 3 %",
        ),
        fix=(
            either(
                "remove offload_optimizer (JSON), or set offload_optimizer_device: none (YAML)",
                "删除 offload_optimizer（JSON），或设置 offload_optimizer_device: none（YAML）",
            ),
            _rewrite(),
            either(
                'or keep Adafactor and step it on the CPU: add "zero_force_ds_cpu_optimizer": false to the JSON file',
                '或保留 Adafactor，在 CPU 上更新：在 JSON 文件中加入 "zero_force_ds_cpu_optimizer": false',
            ),
        ),
    )


def _check_batch(source: str, config: dict[str, Any], flags: argparse.Namespace, ranks: int) -> None:
    batch, accumulation = flags.batch_size_per_gpu, flags.gradient_accumulation_steps
    ours = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": batch * accumulation * ranks,
    }
    for name, value in ours.items():
        if config.get(name, "auto") not in ("auto", value):
            raise UsageError(
                either(
                    f"{source} is for another batch: its {name} is {config[name]}, and here it is {value}",
                    f"{source} 的批大小不同：其中 {name} 为 {config[name]}，这里为 {value}",
                ),
                why=either(
                    f"batch {batch} × accumulation {accumulation} × ranks {ranks} = {batch * accumulation * ranks}",
                    f"批大小 {batch} × 梯度累积 {accumulation} × {ranks} 个 rank = {batch * accumulation * ranks}",
                ),
                fix=(_rewrite(), either("or pass the flags that the file is for", "或使用与该文件一致的选项")),
            )
