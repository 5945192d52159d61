"""Eyes with glints: an HDF5 file of synthetic infra-red eye images and of heatmaps that say where the glints are.

    python make_data.py train_256.h5 [--images 512] [--size 256] [--seed 0]

``images`` and ``heatmaps`` are uint8 arrays of (image, row, column). A glint is the reflection of a lamp on the
cornea; there are two in every image. Wider reflections, and specks just like glints outside the iris, are none: neither
brightness nor size alone gives the glints away.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import h5py
import numpy as np

from legroom.messages import either

AT_A_TIME = 64  # images in memory while the file is written


def draw_eye(random: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """One image and its heatmap, both from 0 to 255."""
    rows, columns = np.mgrid[:size, :size].astype(np.float32)

    def disc(centre: np.ndarray, radius: float) -> np.ndarray:
        inside = radius - np.hypot(rows - centre[0], columns - centre[1])
        return np.clip(inside + 0.5, 0, 1)  # an edge of one pixel

    def spot(centre: np.ndarray, width: float) -> np.ndarray:
        return np.exp(-((rows - centre[0]) ** 2 + (columns - centre[1]) ** 2) / (2 * width**2))

    eye = random.uniform(0.4, 0.6, 2) * size
    image = random.uniform(90, 140) + random.uniform(-20, 20) * rows / size
    image += (random.uniform(50, 80) - image) * disc(eye, 0.3 * size)  # the iris
    image += (random.uniform(10, 30) - image) * disc(eye, random.uniform(0.1, 0.16) * size)  # the pupil
    for _ in range(3):
        image += 130 * spot(random.uniform(0, size, 2), random.uniform(0.03, 0.05) * size)
        angle, far = random.uniform(0, 2 * np.pi), random.uniform(0.33, 0.4) * size
        image += 200 * spot(eye + far * np.array([np.sin(angle), np.cos(angle)]), 0.008 * size)
    image += random.normal(0, 6, image.shape)

    heatmap = np.zeros_like(rows)
    middle = eye + random.uniform(-0.06, 0.06, 2) * size
    apart = np.array([random.uniform(-0.03, 0.03), random.uniform(0.06, 0.09)]) * size
    for centre in (middle - apart, middle + apart):
        image += 200 * spot(centre, 0.008 * size)
        marked = np.rint(centre)  # as people mark them: by the pixel
        heatmap = np.maximum(heatmap, spot(marked, max(1.0, 0.012 * size)))
    return np.clip(image, 0, 255).astype(np.uint8), np.rint(255 * heatmap).astype(np.uint8)


def write(path: Path, count: int, size: int, seed: int) -> None:
    """Write the file beside its name and rename it, so that nobody opens half of it."""
    random = np.random.default_rng(seed)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with h5py.File(beside, "w") as file:
            shape = (count, size, size)
            images = file.create_dataset("images", shape, np.uint8)
            heatmaps = file.create_dataset("heatmaps", shape, np.uint8)
            for start in range(0, count, AT_A_TIME):
                end = min(start + AT_A_TIME, count)
                pairs = [draw_eye(random, size) for _ in range(start, end)]
                images[start:end] = [image for image, _ in pairs]
                heatmaps[start:end] = [heatmap for _, heatmap in pairs]
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=either("Make synthetic eye images with glints.", "生成带角膜反光点的合成眼部图像。")
    )
    parser.add_argument(
        "path", type=Path, nargs="?", default="train_256.h5", help=either("default: train_256.h5", "默认 train_256.h5")
    )
    parser.add_argument(
        "--images", type=int, default=512, help=either("how many (default 512: 64 MB)", "图像数（默认 512，约 64 MB）")
    )
    parser.add_argument(
        "--size", type=int, default=256, help=either("pixels of a side (default 256)", "边长像素（默认 256）")
    )
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    if wanted.images < 2:
        parser.error(
            either(
                "--images must be at least 2: one to learn from, one to test on",
                "--images 至少为 2：一张训练，一张测试",
            )
        )
    if wanted.size < 32 or wanted.size % 4:
        parser.error(either("--size must be at least 32 and divide by 4", "--size 至少为 32，且能被 4 整除"))
    if wanted.seed < 0:
        parser.error(either("--seed must be 0 or more", "--seed 至少为 0"))
    try:
        write(wanted.path, wanted.images, wanted.size, wanted.seed)
    except OSError as problem:
        parser.error(either(f"cannot write {wanted.path}: {problem}", f"无法写入 {wanted.path}：{problem}"))
    print(
        either(
            f"{wanted.path}: {wanted.images} images of {wanted.size} x {wanted.size}",
            f"{wanted.path}：{wanted.images} 张图像，{wanted.size} x {wanted.size}",
        )
    )


if __name__ == "__main__":
    main()
