"""Train a small chat T5 on Parquet files in little memory.

    python train_low_mem.py train
    accelerate launch --multi_gpu --num_processes 2 train_low_mem.py train --is_keep_training=True
    python train_low_mem.py ask "what is the capital of Peru?"

This file reads and checks the command line. training.py, and torch with it, is imported once the flags are right.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zero_check import check_zero

import legroom
from legroom.messages import either
from legroom.units import parse_size


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=either(
            "Train a small chat T5 on Parquet files in little memory.",
            "用很少的内存在 Parquet 文件上训练一个小型对话 T5。",
        )
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train", allow_abbrev=False, help=either("train, or resume training", "训练，或断点续训")
    )
    _training_flags(train)
    _choice_flags(train)
    _model_flags(train)
    _file_flags(train)
    ask = commands.add_parser("ask", allow_abbrev=False, help=either("ask the trained model", "向训练好的模型提问"))
    ask.add_argument("prompt", nargs="+", help=either("a question", "问题"))
    for command in (train, ask):
        command.add_argument(
            "--model_dir",
            type=Path,
            default="chat_t5_model",
            help=either("folder of the trained model (default chat_t5_model)", "模型目录（默认 chat_t5_model）"),
        )
    return parser


def _training_flags(train: argparse.ArgumentParser) -> None:
    add = train.add_argument
    add("--is_keep_training", **SWITCH, default=False, help=either("resume from the checkpoint", "从检查点断点续训"))
    add(
        "--batch_size_per_gpu",
        type=positive,
        default=32,
        help=either("rows per batch and rank (default 32)", "每个 rank 的批大小（默认 32）"),
    )
    add(
        "--gradient_accumulation_steps",
        type=positive,
        default=2,
        help=either("batches per optimizer step (default 2)", "梯度累积的批次数（默认 2）"),
    )
    add("--epochs", type=positive, default=8, help=either("epochs in all (default 8)", "总轮数（默认 8）"))
    add(
        "--learn_rate",
        type=float,
        default=3e-3,
        help=either("highest learning rate (default 0.003)", "最高学习率（默认 0.003）"),
    )
    add(
        "--warmup_steps",
        type=int,
        default=20,
        help=either("steps of warm-up; a cosine decay follows (default 20)", "预热步数，之后余弦衰减（默认 20）"),
    )
    add("--seed", type=int, default=0, help=either("random seed (default 0)", "随机种子（默认 0）"))
    add(
        "--deepspeed",
        type=Path,
        metavar="FILE",
        help=either("train with ZeRO as in this DeepSpeed configuration", "按该 DeepSpeed 配置文件使用 ZeRO 训练"),
    )


def _choice_flags(train: argparse.ArgumentParser) -> None:
    chosen = train.add_argument_group(
        either("chosen from free memory at every epoch, unless given", "不指定时，每轮按剩余内存选择")
    )
    chosen.add_argument(
        "--ultra_low_mem",
        **SWITCH,
        help=either("stream the rows instead of sharing one copy", "流式读取数据，不共享整份副本"),
    )
    chosen.add_argument(
        "--num_workers",
        type=int,
        help=either("worker processes per rank; a stream has none", "每个 rank 的 worker 数，流式读取时没有"),
    )
    chosen.add_argument(
        "--pin_memory", **SWITCH, help=either("copy batches to pinned memory first", "批次先放入锁页内存")
    )


def _model_flags(train: argparse.ArgumentParser) -> None:
    add = train.add_argument
    add(
        "--max_seq_len",
        type=positive,
        default=256,
        help=either("longest text in tokens (default 256)", "文本最多的 token 数（默认 256）"),
    )
    add(
        "--width",
        type=positive,
        default=64,
        help=either("width of the model, a multiple of 4 (default 64)", "模型宽度，4 的倍数（默认 64）"),
    )
    add(
        "--layers",
        type=positive,
        default=2,
        help=either("layers of encoder and of decoder (default 2)", "编码器和解码器各自的层数（默认 2）"),
    )
    add(
        "--eval_rows",
        type=positive,
        default=256,
        help=either("rows to evaluate after each epoch (default 256)", "每轮之后评估的行数（默认 256）"),
    )


def _file_flags(train: argparse.ArgumentParser) -> None:
    add = train.add_argument
    parquet = either("Parquet with the columns prompt and response", "Parquet 文件，含 prompt 和 response 列")
    add("--train_file", type=Path, default="data/train.parquet", help=parquet)
    add("--validation_file", type=Path, default="data/valid.parquet", help=parquet)
    add(
        "--stream_memory",
        type=size,
        default="64MB",
        help=either("memory limit of a stream (default 64MB)", "流式读取的内存上限（默认 64MB）"),
    )
    add(
        "--save_steps",
        type=positive,
        default=50,
        help=either("steps between two checkpoints (default 50)", "两次保存检查点之间的步数（默认 50）"),
    )
    add(
        "--logging_steps",
        type=positive,
        default=20,
        help=either("steps between two log lines (default 20)", "两行日志之间的步数（默认 20）"),
    )
    add(
        "--ckpt_dir",
        type=Path,
        default="checkpoints",
        help=either("folder of the checkpoint (default checkpoints)", "检查点目录（默认 checkpoints）"),
    )
    add(
        "--log_dir", type=Path, default="logs", help=either("folder of the log (default logs)", "日志目录（默认 logs）")
    )


def main(argv: list[str] | None = None) -> None:
    parser = parser_of()
    flags = parser.parse_args(argv)
    try:
        if flags.command == "train":
            check(flags, parser)
            from training import train as act
        else:
            from chat import ask as act
        act(flags)
    except legroom.LegroomError as problem:
        parser.exit(problem.exit_status, f"{parser.prog}: {problem}\n")


def check(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse what the flags and their files alone show to be wrong, before torch is imported."""
    if min(flags.num_workers or 0, flags.warmup_steps, flags.seed) < 0:
        parser.error(
            either(
                "--num_workers, --warmup_steps and --seed must be at least 0",
                "--num_workers、--warmup_steps 和 --seed 不能小于 0",
            )
        )
    if flags.seed >= 2**23:  # with a step's number behind it, it must fit what torch takes
        parser.error(either("--seed must be below 2**23", "--seed 必须小于 2**23"))
    if not flags.learn_rate > 0:
        parser.error(either("--learn_rate must be above 0", "--learn_rate 必须大于 0"))
    if flags.width % 4:
        parser.error(
            either("--width must be a multiple of 4: there are 4 heads", "--width 必须是 4 的倍数：共 4 个注意力头")
        )
    for path in (flags.train_file, flags.validation_file, flags.deepspeed):
        if path is not None and not path.is_file():
            made = either(" (make_data.py makes the data)", "（数据由 make_data.py 生成）")
            missing = either(f"there is no file {path}", f"文件 {path} 不存在")
            parser.error(missing + made * (path != flags.deepspeed))
    check_zero(flags)
    for folder in (flags.ckpt_dir, flags.log_dir, flags.model_dir):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            parser.error(either(f"cannot write to {folder}: {problem}", f"无法写入 {folder}：{problem}"))


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(either(f"{number} is not at least 1", f"{number} 小于 1"))
    return number


def size(text: str) -> int:
    try:
        return parse_size(text)
    except legroom.LegroomError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def switch(text: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(
            either(f"{text!r} is neither True nor False", f"{text!r} 既不是 True 也不是 False")
        )
    return known[text.lower()]


SWITCH = {"type": switch, "nargs": "?", "const": True, "metavar": "True|False"}

if __name__ == "__main__":
    main()
