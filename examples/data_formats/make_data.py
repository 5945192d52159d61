"""Writes small data in every format that the training scripts read: tokens, images and reviews.

    python make_data.py --out data [--samples 2000]

The formats are written by hand where that takes a few lines; Pillow, lmdb and pyarrow are needed for the others.
"""

from __future__ import annotations

import argparse
import io
import json
import struct
import tarfile
from pathlib import Path

import numpy as np

from legroom.messages import either

SIDE, CLASSES = 64, 4  # of the images: pixels of a side, and directions of stripes
WORDS = {
    "who": ("the film", "the music", "this actor", "the last scene", "the story"),
    "verb": ("was", "seemed", "felt"),
    "good": ("wonderful", "clever", "warm", "moving"),
    "bad": ("boring", "clumsy", "cold", "noisy"),
    "rest": ("from the start", "in the end", "to all of us", "on every screen"),
}


def review(label: int, random: np.random.Generator) -> str:
    """Two to five sentences; most of them are kind where the label is 1."""
    sentences = []
    for _ in range(random.integers(2, 6)):
        kind = "good" if (random.random() < 0.8) == bool(label) else "bad"
        sentences.append(" ".join(str(random.choice(WORDS[part])) for part in ("who", "verb", kind, "rest")))
    return ". ".join(sentences) + "."


def image(label: int, random: np.random.Generator) -> bytes:
    """A JPEG of stripes in one of four directions, in noise."""
    from PIL import Image

    angle, (y, x) = label * np.pi / CLASSES, np.mgrid[:SIDE, :SIDE]
    wave = np.sin((x * np.cos(angle) + y * np.sin(angle)) * random.uniform(0.4, 0.8) + random.uniform(0, 6))
    pixels = 128 + 50 * wave[..., None] + random.normal(0, 40, (SIDE, SIDE, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "jpeg")
    return file.getvalue()


# Token files: a token is a byte, and 0 ends a document.


def write_tokens(out: Path, split: str, documents: list[str]) -> None:
    sequences = [np.frombuffer(text.encode() + b"\0", np.uint8).astype("<u2") for text in documents]
    for folder in ("nanogpt", "llm_c", "megatron"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    np.concatenate(sequences).tofile(out / "nanogpt" / f"{split}.bin")
    half = len(sequences) // 2
    for number, shard in enumerate((sequences[:half], sequences[half:])):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, sum(map(len, shard))
        (out / "llm_c" / f"{split}_{number:06}.bin").write_bytes(header.tobytes() + np.concatenate(shard).tobytes())
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    starts = 2 * (np.cumsum(lengths, dtype="<i8") - lengths)  # in bytes
    borders = np.arange(len(sequences) + 1, dtype="<i8")  # each document is one sequence
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(borders))  # version 1, type 8: uint16
    (out / "megatron" / f"{split}.idx").write_bytes(head + lengths.tobytes() + starts.tobytes() + borders.tobytes())
    np.concatenate(sequences).tofile(out / "megatron" / f"{split}.bin")


# Images: the same files in four formats.


def write_folder(out: Path, images: list[tuple[bytes, int]]) -> None:
    for number, (jpeg, label) in enumerate(images):
        path = out / "images" / f"direction_{label}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg)


def write_tar(out: Path, images: list[tuple[bytes, int]]) -> None:
    (out / "shards").mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        with tarfile.open(out / "shards" / f"train-{shard:06}.tar", "w") as archive:
            for number, (jpeg, label) in list(enumerate(images))[shard::2]:
                for ending, content in (("jpg", jpeg), ("cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{number:06}.{ending}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))


def write_mds(out: Path, images: list[tuple[bytes, int]]) -> None:
    """One shard: the number of samples, where each begins, and the samples: length of the image, image, label."""
    (out / "mds").mkdir(parents=True, exist_ok=True)
    samples = [struct.pack("<I", len(jpeg)) + jpeg + struct.pack("<q", label) for jpeg, label in images]
    starts = np.cumsum([4 * (len(samples) + 2), *map(len, samples)]).astype("<u4")
    shard = struct.pack("<I", len(samples)) + starts.tobytes() + b"".join(samples)
    (out / "mds" / "shard.00000.mds").write_bytes(shard)
    about = {
        "format": "mds", "version": 2, "samples": len(samples), "compression": None, "hashes": [], "size_limit": None,
        "column_names": ["image", "label"], "column_encodings": ["jpeg", "int"], "column_sizes": [None, 8],
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(shard), "hashes": {}}, "zip_data": None,
    }  # fmt: skip
    (out / "mds" / "index.json").write_text(json.dumps({"version": 2, "shards": [about]}))


def write_lmdb(out: Path, images: list[tuple[bytes, int]]) -> None:
    """A value is one byte for the class, then the image."""
    import lmdb

    with lmdb.open(str(out / "images.lmdb"), map_size=1 << 30) as file, file.begin(write=True) as transaction:
        for number, (jpeg, label) in enumerate(images):
            transaction.put(b"%06d" % number, bytes([label]) + jpeg)


# A directory as DatasetDict.save_to_disk of the package datasets writes it.


def write_reviews(out: Path, splits: dict[str, list[tuple[str, int]]]) -> None:
    import pyarrow

    for split, rows in splits.items():
        folder = out / "reviews" / split
        folder.mkdir(parents=True, exist_ok=True)
        texts, labels = zip(*rows, strict=True)
        table = pyarrow.table({"text": texts, "label": pyarrow.array(labels, pyarrow.int64())})
        with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
            stream.write_table(table)
        types = {"text": "string", "label": "int64"}
        features = {name: {"dtype": dtype, "_type": "Value"} for name, dtype in types.items()}
        (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "features": features}))
        names = ("_fingerprint", "_format_columns", "_format_type", "_split")
        state = dict.fromkeys(names) | {"_format_kwargs": {}, "_output_all_columns": False}
        state["_data_files"] = [{"filename": "data-00000-of-00001.arrow"}]
        (folder / "state.json").write_text(json.dumps(state))
    (out / "reviews" / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))


def write_all(out: Path, samples: int) -> None:
    random = np.random.default_rng(0)
    rows = [(review(number % 2, random), number % 2) for number in range(samples)]
    held_out = samples // 10
    for split, part in {"train": rows[held_out:], "val": rows[:held_out]}.items():
        write_tokens(out, split, [text for text, _ in part])
    images = [(image(number % CLASSES, random), number % CLASSES) for number in range(samples)]
    for write in (write_folder, write_tar, write_mds, write_lmdb):
        write(out, images)
    write_reviews(out, {"train": rows[held_out:], "test": rows[:held_out]})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=either("Write small data in every format of this example.", "用本示例的每种格式写出少量数据。")
    )
    add = parser.add_argument
    add("--out", type=Path, default="data", help=either("folder to write (default data)", "输出目录（默认 data）"))
    add(
        "--samples",
        type=int,
        default=2000,
        help=either("documents, images and reviews (default 2000)", "文档、图像和评论各多少（默认 2000）"),
    )
    args = parser.parse_args(argv)
    if args.samples < 20:
        parser.error(either("--samples must be at least 20", "--samples 至少为 20"))
    try:
        write_all(args.out, args.samples)
    except OSError as problem:
        parser.error(either(f"cannot write to {args.out}: {problem}", f"无法写入 {args.out}：{problem}"))
    except ImportError as problem:
        package = {"PIL": "pillow"}.get(str(problem.name), problem.name)
        parser.error(either(f"{package} is missing: pip install {package}", f"缺少 {package}：pip install {package}"))
    for path in sorted(args.out.iterdir()):
        print(path)


if __name__ == "__main__":
    main()
