"""Experiments that decode the same images: with workers of their own each, and with one set of workers for all.

    python shared_decoding.py [--experiments 4] [--workers 2] [--seconds 10] [--plot decoding.svg]

Every experiment is a process with a learning rate of its own. The data are JPEG images that are made here and removed
at the end. What is measured is how many images a second all experiments get together.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

import legroom
from legroom.charts.drawing import Drawing, Polygon, Scale, Text, box, check_path, render, round_ticks, y_axis
from legroom.messages import either

SIDE, KEPT, IMAGES, CLASSES = 512, 64, 512, 8
RATES = (0.003, 0.001, 0.01, 0.0003, 0.03, 0.1)
START_S = 120.0  # for all experiments to have their first batches


def write_images(path: Path) -> None:
    """Stripes in noise as JPEG files, one after the other, with their offsets."""
    from PIL import Image

    random, data, offsets = np.random.default_rng(0), io.BytesIO(), [0]
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for number in range(IMAGES):
        angle = number % CLASSES * np.pi / CLASSES
        wave = 100 + 60 * np.sin((rows * np.sin(angle) + columns * np.cos(angle)) / 9)
        image = wave[..., None] + random.integers(0, 60, (SIDE, SIDE, 3))
        Image.fromarray(image.astype(np.uint8)).save(data, "JPEG", quality=90)
        offsets.append(data.tell())
    np.savez(path, data=np.frombuffer(data.getvalue(), np.uint8), offsets=np.array(offsets))


class Jpegs(Dataset):
    """Decodes an image, crops it at random and makes it small: 2 to 5 ms of a core."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.data, self.offsets = file["data"], file["offsets"]

    def __len__(self) -> int:
        return IMAGES * 64  # enough for the measurement

    def __getitem__(self, index: int):
        from PIL import Image

        number = index % IMAGES
        raw = self.data[self.offsets[number] : self.offsets[number + 1]].tobytes()
        left, top = torch.randint(0, SIDE // 4, (2,)).tolist()
        image = Image.open(io.BytesIO(raw)).convert("RGB").crop((left, top, left + 384, top + 384)).resize((KEPT, KEPT))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.float() / 255 - 0.5, number % CLASSES


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, CLASSES)
    )


def experiment(make: Callable[[], object], rate: float, ready, until, rates, number: int) -> None:
    """Train; count the images from the moment when all experiments have had their first batches."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    images_seen, begun = 0, None
    for step, (images, labels) in enumerate(make()):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if step == 8:
            ready.wait()
        elif step > 8 and until.value:
            begun = begun or time.monotonic()
            images_seen += len(images)
            if time.monotonic() > until.value:
                break
    rates[number] = images_seen / (time.monotonic() - begun)
    ready.wait()  # no experiment ends while others are measured


def measure(dataset: Dataset, flags: argparse.Namespace, share: str | None) -> float:
    """Images a second of all experiments together."""
    context = multiprocessing.get_context("fork")
    ready, until = context.Barrier(flags.experiments + 1, timeout=START_S), context.Value("d", 0.0)
    rates = context.Array("d", flags.experiments)

    def make():
        return legroom.DataLoader(dataset, 32, shuffle=True, num_workers=flags.workers, share=share)

    running = [
        context.Process(target=experiment, args=(make, RATES[number % len(RATES)], ready, until, rates, number))
        for number in range(flags.experiments)
    ]
    for one in running:
        one.start()
    try:
        ready.wait()
        if share is not None:
            time.sleep(5)  # the process that makes the batches starts: until then, experiments make their own
        until.value = time.monotonic() + flags.seconds
        ready.wait()
    finally:
        for one in running:
            one.join(10)
            one.kill()
            one.join()
    return sum(rates)


def chart(separate: float, shared: float, flags: argparse.Namespace) -> Drawing:
    """Two bars."""
    title = either(
        f"{flags.experiments} experiments, {flags.workers} workers: {shared / separate:.1f} × as many images a second",
        f"{flags.experiments} 个实验，{flags.workers} 个 worker：每秒图像数为 {shared / separate:.1f} 倍",
    )
    scale = Scale(0, shared * 1.1, 300, 60)
    shapes = [
        Text(16, 26, title, 14, bold=True),
        *y_axis(scale, round_ticks(shared * 1.1, lambda value: f"{value}/s"), 70, 460),
    ]
    names = (
        either("workers of their own", "各用各的 worker"),
        either("one set of workers (share=)", "共用一组 worker（share=）"),
    )
    for number, (name, value, colour) in enumerate(zip(names, (separate, shared), ("grey", "blue"), strict=True)):
        left = 110 + number * 190
        shapes.append(Polygon(box(left, scale(value), 110, 300 - scale(value)), colour))
        shapes.append(Text(left + 55, scale(value) - 6, f"{value:.0f}/s", 12, anchor="middle", bold=True))
        shapes.append(Text(left + 55, 320, name, 12, anchor="middle"))
    return Drawing(500, 340, title, tuple(shapes))


@contextmanager
def own_store():
    """A store of this program's own, so that nothing of it stays."""
    with tempfile.TemporaryDirectory(prefix="legroom-experiments-") as folder:
        os.environ["LEGROOM_SHM"] = folder
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=either(
            "Measure experiments that decode the same images, apart and together.",
            "测量多个实验解码同一批图像：各自解码，以及共用一组 worker。",
        )
    )
    parser.add_argument("--experiments", type=int, default=4, help=either("default 4", "实验个数（默认 4）"))
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help=either("of each, or of all (default 2)", "每个实验或全部的 worker 数（默认 2）"),
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help=either("to measure (default 10)", "测量秒数（默认 10）")
    )
    parser.add_argument("--plot", type=Path, help=either("write a picture: .svg, .png", "输出图片：.svg 或 .png"))
    flags = parser.parse_args()
    if flags.experiments < 1 or flags.workers < 1 or not flags.seconds > 0:
        parser.error(
            either(
                "--experiments and --workers must be 1 or more, --seconds above 0",
                "--experiments 和 --workers 至少为 1，--seconds 大于 0",
            )
        )
    if sys.platform != "linux":
        parser.error(either("batches are shared on Linux only", "仅支持 Linux"))
    if flags.plot:
        try:
            check_path(flags.plot, (".svg", ".png"))
        except legroom.LegroomError as error:
            parser.exit(error.exit_status, f"{error}\n")
    with own_store() as folder:
        write_images(folder / "images.npz")
        dataset = Jpegs(folder / "images.npz")
        separate = measure(dataset, flags, None)
        print(
            either(
                f"workers of their own:    {separate:6.0f} images/s in all", f"各用各的 worker：{separate:6.0f} 图像/秒"
            )
        )
        shared = measure(dataset, flags, "decoding")
        print(
            either(
                f"one set of workers:      {shared:6.0f} images/s in all, {shared / separate:.2f} ×",
                f"共用一组 worker：{shared:6.0f} 图像/秒，{shared / separate:.2f} 倍",
            )
        )
        if flags.plot:
            flags.plot.write_bytes(render(chart(separate, shared, flags), flags.plot.suffix))


if __name__ == "__main__":
    main()
