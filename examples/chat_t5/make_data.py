"""Make the data: questions and answers, as Parquet files with the columns `prompt` and `response`.

    python make_data.py --out data [--rows 4096]

About two dozen facts, each with 144 ways to ask for it. The ways in valid.parquet do not occur in train.parquet: a
model cannot score there by remembering whole lines.
"""

from __future__ import annotations

import argparse
import random
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from legroom.messages import either

HELD_OUT = 0.1  # of the ways to ask, for valid.parquet
GREETINGS = ("", "Hello! ", "Hi, ", "Excuse me: ", "Good morning. ", "A question: ", "Please, ", "Dear model, ")
ENDINGS = ("?", " ?", "? Thank you.", "? I forgot.", "? Be brief.", "? In one sentence.")
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "Kenya": "Nairobi",
    "Norway": "Oslo", "Cuba": "Havana", "China": "Beijing", "India": "Delhi",
}  # fmt: skip
COLOURS = {
    "snow": "white", "coal": "black", "grass": "green", "a lemon": "yellow", "blood": "red", "the sky": "blue",
    "a carrot": "orange", "a plum": "purple",
}  # fmt: skip
NEXT = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def facts() -> list[tuple[list[str], str]]:
    """For every fact the questions that ask for it, without greeting and ending, and the answer."""
    found = []
    for country, city in CAPITALS.items():
        asked = [
            f"what is the capital of {country}",
            f"which city is {country}'s capital",
            f"where is the government of {country}",
        ]
        found.append((asked, f"{city} is the capital of {country}."))
    for thing, colour in COLOURS.items():
        asked = [f"what colour is {thing}", f"which colour has {thing}", f"what does {thing} look like"]
        found.append((asked, f"It is {colour}."))
    for number, after in pairwise(NEXT):
        asked = [f"what comes after {number}", f"which number follows {number}", f"what is {number} plus one"]
        found.append((asked, f"After {number} comes {after}."))
    return found


def rows(count: int, seed: int) -> dict[str, list[dict[str, str]]]:
    """Rows to learn from, under ``train``, and rows to test with, under ``valid``."""
    rng = random.Random(seed)
    known: list[dict[str, str]] = []
    unseen: list[dict[str, str]] = []
    for asked, answer in facts():
        ways = [f"{hello}{question}{end}" for hello in GREETINGS for question in asked for end in ENDINGS]
        rng.shuffle(ways)
        cut = round(HELD_OUT * len(ways))
        unseen += [{"prompt": way, "response": answer} for way in ways[:cut]]
        known += [{"prompt": way, "response": answer} for way in ways[cut:]]
    rng.shuffle(unseen)
    return {"train": rng.choices(known, k=count), "valid": unseen}


def make(folder: Path, count: int, seed: int) -> list[Path]:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, some in rows(count, seed).items():
        paths.append(folder / f"{name}.parquet")
        pq.write_table(pa.Table.from_pylist(some), paths[-1], row_group_size=1024)
    return paths


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=either("Make questions and answers as Parquet files.", "生成问答数据，写成 Parquet 文件。")
    )
    parser.add_argument(
        "--out", type=Path, default="data", help=either("folder to write to (default data)", "输出目录（默认 data）")
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=4096,
        help=either("rows of train.parquet (default 4096)", "train.parquet 的行数（默认 4096）"),
    )
    parser.add_argument("--seed", type=int, default=0, help=either("random seed (default 0)", "随机种子（默认 0）"))
    args = parser.parse_args(argv)
    if args.rows < 1:
        parser.error(either("--rows must be at least 1", "--rows 不能小于 1"))
    try:
        paths = make(args.out, args.rows, args.seed)
    except OSError as problem:
        parser.error(either(f"cannot write to {args.out}: {problem}", f"无法写入 {args.out}：{problem}"))
    for path in paths:
        count, kilobytes = pq.read_metadata(path).num_rows, path.stat().st_size / 1e3
        print(either(f"{path}: {count} rows, {kilobytes:.0f} kB", f"{path}：{count} 行，{kilobytes:.0f} kB"))


if __name__ == "__main__":
    main()
