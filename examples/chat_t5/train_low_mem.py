"""Trains a small chat T5 on Parquet files in little memory.

    python train_low_mem.py train
    accelerate launch --multi_gpu --num_processes 2 train_low_mem.py train --is_keep_training=True
    python train_low_mem.py ask "what is the capital of Peru?"

Covers: the command line. Does not cover: the training (training.py), which is imported when the flags are right.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import legroom
from legroom.units import parse_size


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    train = verbs.add_parser("train", allow_abbrev=False, help="train, or go on training")
    yes = {"type": switch, "nargs": "?", "const": True, "metavar": "True|False"}
    train.add_argument("--is_keep_training", **yes, default=False, help="go on from the checkpoint")
    train.add_argument(
        "--batch_size_per_gpu", type=positive, default=32, help="rows a rank holds at a time (default 32)"
    )
    train.add_argument(
        "--gradient_accumulation_steps", type=positive, default=2, help="batches to a step (default 2)"
    )
    train.add_argument(
        "--max_seq_len", type=positive, default=256, help="tokens of a text at most (default 256)"
    )
    chosen = train.add_argument_group("chosen from memory at every epoch, unless given")
    chosen.add_argument("--ultra_low_mem", **yes, help="stream the rows instead of sharing a copy of them")
    chosen.add_argument("--num_workers", type=int, help="loader processes of a rank; none for a stream")
    chosen.add_argument("--pin_memory", **yes, help="pin batches on their way to a card")
    train.add_argument("--train_file", type=Path, default="data/train.parquet")
    train.add_argument("--validation_file", type=Path, default="data/valid.parquet")
    train.add_argument(
        "--stream_memory", type=size, default="64MB", help="the bound of a stream (default 64MB)"
    )
    train.add_argument("--epochs", type=positive, default=8, help="in all (default 8)")
    train.add_argument("--learn_rate", type=float, default=3e-3, help="at its highest (default 0.003)")
    train.add_argument(
        "--warmup_steps", type=int, default=20, help="until then; a cosine follows (default 20)"
    )
    train.add_argument(
        "--eval_rows", type=positive, default=256, help="to be answered after an epoch (default 256)"
    )
    train.add_argument(
        "--width", type=positive, default=64, help="of the model, a multiple of 4 (default 64)"
    )
    train.add_argument("--layers", type=positive, default=2, help="of encoder and of decoder (default 2)")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--save_steps", type=positive, default=50, help="steps from save to save (default 50)")
    train.add_argument("--logging_steps", type=positive, default=20, help="from line to line (default 20)")
    train.add_argument("--ckpt_dir", type=Path, default="checkpoints", help="(default checkpoints)")
    train.add_argument("--log_dir", type=Path, default="logs", help="(default logs)")
    train.add_argument(
        "--deepspeed", type=Path, metavar="FILE", help="train by ZeRO, as ds_config_zero2.json says"
    )
    ask = verbs.add_parser("ask", allow_abbrev=False, help="ask the model that was trained")
    ask.add_argument("prompt", nargs="+")
    for verb in (train, ask):
        verb.add_argument("--model_dir", type=Path, default="chat_t5_model", help="(default chat_t5_model)")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = parser_of()
    flags = parser.parse_args(argv)
    if flags.verb == "train":
        check(flags, parser)
    try:
        if flags.verb == "train":
            from training import train as act
        else:
            from chat import ask as act
        act(flags)
    except legroom.LegroomError as problem:
        parser.exit(problem.exit_status, f"{parser.prog}: {problem}\n")


def check(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """What can be told from the flags alone, before anything heavy is imported."""
    if min(flags.num_workers or 0, flags.warmup_steps, flags.seed) < 0:
        parser.error("--num_workers, --warmup_steps and --seed must be at least 0")
    if flags.seed >= 2**23:  # with a step's number behind it, it must fit what torch takes
        parser.error("--seed must be below 2**23")
    if not flags.learn_rate > 0:
        parser.error("--learn_rate must be above 0")
    if flags.width % 4:
        parser.error("--width must be a multiple of 4: there are 4 heads")
    for path in (flags.train_file, flags.validation_file, flags.deepspeed):
        if path is not None and not path.is_file():
            parser.error(
                f"there is no file {path}" + " (make_data.py makes the data)" * (path != flags.deepspeed)
            )
    for folder in (flags.ckpt_dir, flags.log_dir, flags.model_dir):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            parser.error(f"cannot write to {folder}: {problem}")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def size(text: str) -> int:
    try:
        return parse_size(text)
    except legroom.LegroomError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def switch(text: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return known[text.lower()]


if __name__ == "__main__":
    main()
