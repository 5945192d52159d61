"""Trains a text classifier on a directory of Hugging Face datasets: save_to_disk's, or load_dataset's cache.

    python train_text.py data/reviews

Texts are read from the shared copy and turned into numbers in the workers.
"""

from __future__ import annotations

import argparse
import zlib

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import legroom
from legroom.messages import either

BUCKETS = 4096  # words are numbered by a hash


def read_words(text: str) -> torch.Tensor:
    """In the worker: a number for each word."""
    return torch.tensor([zlib.crc32(word.strip(".,!?").lower().encode()) % BUCKETS for word in text.split()] or [0])


def join(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch: the words of all texts one after the other, where each text begins, and the labels."""
    texts, labels = zip(*samples, strict=True)
    starts = torch.tensor([0, *map(len, texts)]).cumsum(0)[:-1]
    return torch.cat(texts), starts, torch.stack(labels)


class Classifier(nn.Module):
    """The mean of the vectors of a text's words, and a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(BUCKETS, 16), nn.Linear(16, classes)

    def forward(self, words: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words, starts))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=either("Train a text classifier on a directory of Hugging Face datasets.",
                           "用 Hugging Face datasets 目录训练文本分类器。")
    )  # fmt: skip
    add = parser.add_argument
    add("data", help=either("directory of save_to_disk or load_dataset", "save_to_disk 或 load_dataset 的目录"))
    add("--train", default="train", help=either("split to learn from (default train)", "训练集名称（默认 train）"))
    add("--test", default="test", help=either("split to measure on (default test)", "测试集名称（默认 test）"))
    add("--text", default="text", help=either("column of texts (default text)", "文本列（默认 text）"))
    add("--label", default="label", help=either("column of classes (default label)", "类别列（默认 label）"))
    add("--batch_size", type=int, default=32, help=either("texts per batch (default 32)", "批大小（默认 32）"))
    add("--epochs", type=int, default=3, help=either("epochs to train (default 3)", "轮数（默认 3）"))
    add("--num_workers", type=int, default=2, help=either("worker processes (default 2)", "worker 进程数（默认 2）"))
    args = parser.parse_args(argv)
    try:
        train(legroom.open(args.data), args)
    except legroom.LegroomError as error:
        parser.exit(error.exit_status, f"{error}\n")


def train(data, args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    loaders = []
    for split in (args.train, args.test):
        text, label = f"{split}/{args.text}", f"{split}/{args.label}"
        loaders.append(
            legroom.DataLoader(
                data.dataset(text, label, decode={text: read_words}),
                batch_size=args.batch_size,
                shuffle=split == args.train,
                collate_fn=join,
                num_workers=args.num_workers,
                persistent_workers=args.num_workers > 0,
            )
        )
    batches, tests = loaders
    classes = data[f"{args.train}/{args.label}"]  # a numpy array on the shared copy
    print(
        either(
            f"{data.info.format}: {len(classes)} texts to learn from, shared copy: {data.info.backing}",
            f"{data.info.format}：{len(classes)} 条训练文本，共享副本：{data.info.backing}",
        )
    )
    model = Classifier(1 + int(classes.max())).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.006)
    for epoch in range(1, args.epochs + 1):
        for words, starts, labels in batches:
            loss = cross_entropy(model(words.to(device), starts.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            found = [(model(w.to(device), s.to(device)).argmax(1).cpu() == labels) for w, s, labels in tests]
        right = torch.cat(found)
        print(
            either(
                f"epoch {epoch}: loss {loss:.3f}, {right.sum()} of {len(right)} test texts right",
                f"第 {epoch} 轮：loss {loss:.3f}，测试集 {len(right)} 条中 {right.sum()} 条正确",
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
