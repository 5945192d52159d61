"""The comparison in the READMEs: a few rows of the results, in each README's language.

Covers: which rows, their words, putting them between two marks. Does not cover: the page with everything (tables.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, REPO = HERE / "results", HERE.parent
BEGIN, END = "<!-- comparison: made by bench/tables.py -->", "<!-- end of comparison -->"
HEADS = {
    "en": ("", "baseline", "Legroom", "improvement (above 1: Legroom is better)"),
    "zh": ("", "基线", "Legroom", "提升（大于 1：Legroom 更好）"),
}
MEASURED = {"en": "Measured on ", "zh": "测量环境："}
GPU_ROW = {"en": " The {gpu} row: ", "zh": "{gpu} 一行："}
OTHER_ROWS = {"en": " What {names} measured: ", "zh": "{names} 的测量环境："}
STOP = {"en": ".", "zh": "。"}
NOTES = {
    "en": "h5py reads the 368 MB file from the page cache, not from disk. The Parquet table takes 2 GB in the file and "
    "2 GB decoded. After decoding, Arrow does not return freed memory to the operating system, so three ranks "
    "with `read_table` use more than 3 × 2 GB. Ratios are computed before rounding.",
    "zh": "h5py 从页缓存而非磁盘读取那个 368 MB 的文件。"
    "Parquet 表在文件里是 2 GB，解码后也是 2 GB。Arrow 解码后释放的内存留在它的内存池里，"
    "因此三个 rank 各自调用 `read_table` 时，占用超过 3 × 2 GB。比值由取整前的数据算出。",
}
READMES = {"en": REPO / "README.md", "zh": REPO / "README.zh-CN.md"}


@dataclass(frozen=True)
class Line:
    """One row: words by language, and three figures."""

    words: dict[str, str]
    usual: str
    ours: str
    ratio: str


def lines() -> list[Line]:
    """All rows whose results are there."""
    found = [make(_load(name)) for name, make in _MAKERS if (RESULTS / f"{name}.json").exists()]
    return [line for line in found if line is not None]


def table(language: str) -> str:
    """The table in that language."""
    head = HEADS[language]
    rows = [f"| {line.words[language]} | {line.usual} | {line.ours} | {line.ratio} |" for line in lines()]
    return "\n".join(["| " + " | ".join(head) + " |", "| --- | --- | --- | --- |", *rows])


def filled(language: str) -> str:
    """That README as it has to read."""
    text = READMES[language].read_text()
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{READMES[language]} has no place for the comparison: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{table(language)}\n\n{NOTES[language]}\n\n{machines(language)}\n\n{END}{after}"


def machines(language: str) -> str:
    """Where it was measured: an absolute figure means nothing without."""
    found: dict[str, list[str]] = {}  # by the machine: what was measured on it
    for name, _ in _MAKERS:
        about = _load(name)["machine"] if name != "cache" else _load(name)["parts"]["attach"]["machine"]
        torch = f", torch {about['packages']['torch']}" if "torch" in about["packages"] else ""
        cpus = f"{about['cpus']} logical CPUs ({about['cpu'].replace('(R)', '')})"
        where = f"{cpus}, {about['system'].split('-')[0]}, Python {about['python']}{torch}"
        row = GPU_ROW[language].format(gpu=about["gpu"]) if "gpu" in about else f"`bench/{name}.py`"
        found.setdefault(where, []).append(row)
    # Of two lines that differ in torch's version alone the longer says both.
    for one in list(found):
        longer = next((other for other in found if other.startswith(one) and other != one), None)
        if longer is not None:
            found[longer] = found.pop(one) + found[longer]
    first, *others = sorted(found, key=lambda where: -len(found[where]))
    rest = ""
    for where in others:
        gpu = not found[where][0].startswith("`")
        label = found[where][0] if gpu else OTHER_ROWS[language].format(names=", ".join(found[where]))
        rest += label + where + STOP[language]
    return MEASURED[language] + first + STOP[language] + rest


def _load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _row(found: dict[str, Any], what: str) -> dict[str, Any]:
    parts = [found, *found.get("parts", {}).values()]
    rows = [row for part in parts for row in part.get("rows", part.get("ratios", ()))]
    return next(row for row in rows if row["what"].strip() == what)


def _attach(found: dict[str, Any]) -> Line:
    ours = _row(found, "first open of a fresh process")["value"]
    usual = _row(found, "h5py preload in a fresh process")["value"]
    words = {
        "en": "second process that uses a 368 MB file: time to the first row, import time not counted (Legroom maps "
        "the copy that the first process has loaded; baseline: h5py reads the whole file into memory)",
        "zh": "第二个使用 368 MB 文件的进程：读到第一行的时间，不计 import（Legroom 映射第一个进程已加载的那份数据；"
        "基线：h5py 把整个文件读入内存）",
    }
    return Line(words, f"{usual:.0f} ms", f"{ours:.2f} ms", f"{usual / ours:.0f} ×")


def _whole(found: dict[str, Any]) -> Line | None:
    try:
        ours = _row(found, "a whole process: start, imports, first row, exit")["value"]
        usual = _row(found, "the same with an h5py preload")["value"]
    except StopIteration:  # results of before it was measured
        return None
    words = {
        "en": "the same, but the wall time of a whole Python process, from interpreter start to exit",
        "zh": "同上，按一个完整 Python 进程的总用时计：从启动解释器到退出",
    }
    return Line(words, f"{usual:.0f} ms", f"{ours:.0f} ms", f"{usual / ours:.2f} ×")


def _copies(found: dict[str, Any]) -> Line:
    peers, count = found["peers"], found["processes"][-1]
    usual, ours = (peers[name]["summary"]["memory"][count]["beyond_bare_mb"] for name in ("h5py", "legroom"))
    size = found["megabytes"]
    words = {
        "en": f"memory of {count} processes that use one {size:.0f} MB dataset "
        "(baseline: h5py, whole file read into memory)",
        "zh": f"{count} 个进程使用同一个 {size:.0f} MB 数据集时的内存（基线：h5py，整个文件读入内存）",
    }
    return Line(words, f"{usual:.0f} MB", f"{ours:.0f} MB", f"{usual / ours:.1f} ×")


def _batches(found: dict[str, Any]) -> Line:
    part = found["parts"]["64"]
    ours = _row(part, "data.batches")["value"]
    ratio = _row(part, "of torch's DataLoader, 2 workers")["value"]
    words = {
        "en": "`data.batches()`, shuffled, 12.6 MB per batch (baseline: torch's DataLoader, 2 workers)",
        "zh": "`data.batches()`，打乱顺序，每批 12.6 MB（基线：torch DataLoader，2 个 worker）",
    }
    return Line(words, f"{ours / ratio:.1f} GB/s", f"{ours:.1f} GB/s", f"{ratio:.1f} ×")


def _transport(found: dict[str, Any]) -> Line:
    row = _row(found, "map, 24 MB")
    usual, _, ours = row["note"].removesuffix(" GB/s").partition(" → ")
    words = {
        "en": "`legroom.DataLoader`, 2 workers, 24 MB per batch (baseline: torch's DataLoader, 2 workers)",
        "zh": "`legroom.DataLoader`，2 个 worker，每批 24 MB（基线：torch DataLoader，2 个 worker）",
    }
    return Line(words, f"{usual} GB/s", f"{ours} GB/s", f"{row['value']:.1f} ×")


def _gpu(found: dict[str, Any]) -> Line:
    row = _row(found, "copy engines, 256 rows : torch's DataLoader")
    ours, _, usual = row["note"].removesuffix(" GB/s").partition(" : ")
    card = found["machine"]["gpu"]
    words = {
        "en": f"`data.batches()` to an {card}, shuffled (baseline: torch's DataLoader, 8 workers, pin_memory)",
        "zh": f"`data.batches()` 送到 {card}，打乱顺序（基线：torch DataLoader，8 个 worker，pin_memory）",
    }
    return Line(words, f"{usual} GB/s", f"{ours} GB/s", f"{row['value']:.1f} ×")


def _parquet(found: dict[str, Any]) -> Line:
    usual = _row(found, "copies held by three ranks, read_table")["value"]
    ours, size = _row(found, "copies held by three ranks, shared")["value"], found["one_copy"] / 1e9
    words = {
        "en": f"memory of three ranks with the same {size:.0f} GB Parquet table "
        "(baseline: `pyarrow.parquet.read_table` in each rank)",
        "zh": f"三个 rank 加载同一张 {size:.0f} GB 的 Parquet 表后占用的内存"
        "（基线：每个 rank 各自调用 `pyarrow.parquet.read_table`）",
    }
    return Line(words, f"{usual * size:.1f} GB", f"{ours * size:.1f} GB", f"{usual / ours:.1f} ×")


_MAKERS: tuple[tuple[str, Callable[[dict[str, Any]], Line | None]], ...] = (
    ("cache", _attach),
    ("cache", _whole),
    ("peers", _copies),
    ("loader_batches", _batches),
    ("loader_transport", _transport),
    ("gpu_loader", _gpu),
    ("parquet_ranks", _parquet),
)
