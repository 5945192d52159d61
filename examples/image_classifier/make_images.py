"""Makes the data: coloured shapes on noise, one folder a class, one .npy file (height, width, 3; uint8) an image.

python make_images.py --out datas [--per_class 80] [--size 224]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

# By distance from the middle across (x) and down (y), in units of the shape's own size.
SHAPES = {
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) < 0.25) & (np.maximum(abs(x), abs(y)) < 1),
    "disc": lambda x, y: x**2 + y**2 < 1,
    "ring": lambda x, y: (x**2 + y**2 < 1) & (x**2 + y**2 > 0.4),
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.9,
}


def image(shape: str, size: int, random: np.random.Generator) -> np.ndarray:
    """One shape somewhere, of some size and colour."""
    pixels = random.integers(0, 60, (size, size, 3), dtype=np.uint8)
    radius = size * random.uniform(0.2, 0.35)
    across, down = random.uniform(radius, size - radius, 2)
    y, x = np.ogrid[:size, :size]
    inside = SHAPES[shape]((x - across) / radius, (y - down) / radius)
    pixels[inside] += random.integers(80, 190, 3, dtype=np.uint8)
    return pixels


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default="datas", help="the folder to make (default datas)")
    parser.add_argument("--per_class", type=int, default=80, help="images of each shape (default 80)")
    parser.add_argument("--size", type=int, default=224, help="pixels across and down (default 224)")
    args = parser.parse_args(argv)
    if args.per_class < 2 or args.size < 16:
        parser.error("there must be 2 images of a class at least, of 16 pixels at least")
    random = np.random.default_rng(0)
    try:
        for shape in SHAPES:
            (args.out / shape).mkdir(parents=True, exist_ok=True)
            for number in range(args.per_class):
                np.save(args.out / shape / f"{number:04}.npy", image(shape, args.size, random))
    except OSError as problem:
        parser.error(f"cannot write to {args.out}: {problem}")
    print(f"{args.out}: {len(SHAPES)} classes of {args.per_class} images, {args.size} × {args.size}")


if __name__ == "__main__":
    main()
