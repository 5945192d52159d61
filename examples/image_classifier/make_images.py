"""Makes the data: coloured shapes on noise, one folder per class, one file per image.

    python make_images.py --out datas [--per_class 80] [--size 224] [--format npy]

npy files hold (height, width, 3) of uint8; jpg and png need Pillow.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from legroom.messages import either

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
    parser = argparse.ArgumentParser(
        description=either("Make images of coloured shapes on noise.", "生成噪声背景上的彩色图形。")
    )
    add = parser.add_argument
    add("--out", type=Path, default="datas", help=either("folder to make (default datas)", "输出目录（默认 datas）"))
    add("--per_class", type=int, default=80, help=either("images per class (default 80)", "每类图像数（默认 80）"))
    add("--size", type=int, default=224, help=either("pixels across and down (default 224)", "边长像素（默认 224）"))
    add("--format", choices=("npy", "jpg", "png"), default="npy", help=either("default npy", "默认 npy"))
    args = parser.parse_args(argv)
    if args.per_class < 2 or args.size < 16:
        parser.error(
            either("--per_class must be at least 2, and --size at least 16", "--per_class 至少为 2，--size 至少为 16")
        )
    random = np.random.default_rng(0)
    try:
        for shape in SHAPES:
            (args.out / shape).mkdir(parents=True, exist_ok=True)
            for number in range(args.per_class):
                write(args.out / shape / f"{number:04}.{args.format}", image(shape, args.size, random))
    except OSError as problem:
        parser.error(either(f"cannot write to {args.out}: {problem}", f"无法写入 {args.out}：{problem}"))
    except ImportError:
        parser.error(
            either("--format jpg and png need Pillow: pip install pillow", "jpg 和 png 需要 Pillow：pip install pillow")
        )
    print(
        either(
            f"{args.out}: {len(SHAPES)} classes of {args.per_class} images, {args.size} × {args.size}",
            f"{args.out}：{len(SHAPES)} 类，每类 {args.per_class} 张，{args.size} × {args.size}",
        )
    )


def write(path: Path, pixels: np.ndarray) -> None:
    if path.suffix == ".npy":
        np.save(path, pixels)
        return
    from PIL import Image

    Image.fromarray(pixels).save(path)


if __name__ == "__main__":
    main()
