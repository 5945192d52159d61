"""Trains a small classifier on images in WebDataset tar shards, an MDS directory, LMDB or a folder per class.

    python train_images.py 'data/shards/train-*.tar'
    python train_images.py data/mds
    python train_images.py data/images.lmdb
    python train_images.py data/images

Only ``dataset_of`` and ``labels_of`` depend on the format.
"""

from __future__ import annotations

import argparse
import io

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, Subset

import legroom
from legroom.messages import either

SIDE = 32  # images are made this large


def read_image(data: bytes) -> torch.Tensor:
    """In the worker: (3, SIDE, SIDE) between 0 and 1."""
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.array(image.convert("RGB").resize((SIDE, SIDE)))
    return torch.from_numpy(pixels).permute(2, 0, 1) / 255


def read_class_and_image(data: bytes) -> tuple[torch.Tensor, int]:
    """A value of make_data.py's LMDB: the class in one byte, then the image."""
    return read_image(data[1:]), data[0]


def dataset_of(data) -> Dataset:
    """Pairs of an image and its class, decoded where they are read."""
    if data.info.format == "webdataset":
        return data.dataset("jpg", "cls", decode={"jpg": read_image, "cls": int})
    if data.info.format == "lmdb":
        return data.dataset("value", decode={"value": read_class_and_image})
    return data.dataset("image", "label", decode={"image": read_image})  # MDS, folder


def labels_of(data) -> list[int]:
    """Every class, without decoding an image."""
    if data.info.format == "webdataset":
        return [int(bytes(text)) for text in data["cls"]]
    if data.info.format == "lmdb":
        return [int(value[0]) for value in data["value"]]
    return data["label"].tolist()


def network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=either("Train a classifier on tar shards, MDS, LMDB or a folder of images.",
                           "用 tar 分片、MDS、LMDB 或图像目录训练分类器。")
    )  # fmt: skip
    add = parser.add_argument
    add("data", nargs="+", help=either("a directory, tar shards, or a pattern", "目录、tar 分片或通配符"))
    add("--batch_size", type=int, default=32, help=either("images per batch (default 32)", "批大小（默认 32）"))
    add("--epochs", type=int, default=4, help=either("epochs to train (default 4)", "轮数（默认 4）"))
    add("--num_workers", type=int, default=2, help=either("processes that decode (default 2)", "解码进程数（默认 2）"))
    add(
        "--seed",
        type=int,
        default=0,
        help=either("seed of weights and order (default 0)", "权重和顺序的种子（默认 0）"),
    )
    args = parser.parse_args(argv)
    try:
        data = legroom.open(args.data)
        train(data, args)
    except legroom.LegroomError as error:
        parser.exit(error.exit_status, f"{error}\n")


def train(data, args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    dataset, labels = dataset_of(data), labels_of(data)
    held_out = range(0, len(labels), 5)  # every fifth image measures
    training = [row for row in range(len(labels)) if row % 5]
    print(
        either(
            f"{data.info.format}: {len(labels)} images, shared copy: {data.info.backing}",
            f"{data.info.format}：{len(labels)} 张图像，共享副本：{data.info.backing}",
        )
    )
    loading = {"batch_size": args.batch_size, "num_workers": args.num_workers}
    loading["persistent_workers"] = args.num_workers > 0
    batches = legroom.DataLoader(Subset(dataset, training), shuffle=True, **loading)
    tests = legroom.DataLoader(Subset(dataset, held_out), **loading)
    model = network(1 + max(labels)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(1, args.epochs + 1):
        for images, classes in batches:
            loss = cross_entropy(model(images.to(device)), classes.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = sum(int((model(images.to(device)).argmax(1).cpu() == classes).sum()) for images, classes in tests)
        print(
            either(
                f"epoch {epoch}: loss {loss:.3f}, {right} of {len(held_out)} held-out images right",
                f"第 {epoch} 轮：loss {loss:.3f}，验证集 {len(held_out)} 张中 {right} 张正确",
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
