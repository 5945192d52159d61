"""Trains a small GPT on token files: nanoGPT's flat .bin, llm.c's .bin, Megatron's .idx and .bin.

    python train_tokens.py data/nanogpt/train.bin --val data/nanogpt/val.bin --dtype uint16
    python train_tokens.py 'data/llm_c/train_*.bin' --val 'data/llm_c/val_*.bin'
    python train_tokens.py data/megatron/train.idx --val data/megatron/val.idx

All three become windows of sequence_length tokens, gathered from the shared copy without worker processes.
"""

from __future__ import annotations

import argparse
import math
from itertools import chain, islice, repeat

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import legroom
from legroom.messages import either


class GPT(nn.Module):
    """Two layers of a decoder."""

    def __init__(self, vocabulary: int, length: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        future = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        return self.head(self.layers(hidden, mask=future, is_causal=True))


def score(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a batch, and the share of tokens that were predicted."""
    tokens = batch["tokens"].long()  # (batch_size, sequence_length + 1), stored as uint16
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    logits = model(inputs).flatten(0, 1)
    return cross_entropy(logits, targets), (logits.argmax(1) == targets).float().mean()


def all_tokens(data):
    """The tokens as one array on the shared copy."""
    return data["sequences"].values if data.info.format == "megatron" else data["tokens"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=either("Train a small GPT on token files.", "用 token 文件训练一个小型 GPT。")
    )
    add = parser.add_argument
    add("data", nargs="+", help=either(".bin or .idx: a file, shards or a pattern", ".bin 或 .idx：文件、分片或通配符"))
    add("--val", nargs="+", required=True, help=either("files for validation, named alike", "验证集文件，写法相同"))
    add("--dtype", help=either("type of tokens without a header: uint16", "无文件头时的 token 类型：uint16"))
    add("--sequence_length", type=int, default=64, help=either("tokens a window (64)", "窗口的 token 数（64）"))
    add("--batch_size", type=int, default=32, help=either("windows per batch (default 32)", "批大小（默认 32）"))
    add("--steps", type=int, default=200, help=either("optimizer steps (default 200)", "训练步数（默认 200）"))
    add(
        "--seed",
        type=int,
        default=0,
        help=either("seed of weights and order (default 0)", "权重和顺序的种子（默认 0）"),
    )
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(either("--steps must be at least 1", "--steps 至少为 1"))
    try:
        data, val = (legroom.open(paths, dtype=args.dtype) for paths in (args.data, args.val))
        train(data, val, args)
    except legroom.LegroomError as error:
        parser.exit(error.exit_status, f"{error}\n")


def train(data, val, args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    windows = {"batch_size": args.batch_size, "sequence_length": args.sequence_length, "device": device}
    batches, tests = data.batches(**windows, shuffle=True, seed=args.seed), val.batches(**windows)
    tokens = all_tokens(data)
    vocabulary = 1 + int(max(tokens.max(), all_tokens(val).max()))
    name, backing = data.info.format, data.info.backing
    print(
        either(
            f"{name}: {len(tokens)} tokens of {tokens.dtype}, shared copy: {backing}",
            f"{name}：{len(tokens)} 个 {tokens.dtype} token，共享副本：{backing}",
        ),
        flush=True,
    )
    model = GPT(vocabulary, args.sequence_length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    epochs = chain.from_iterable(repeat(batches))  # each loop over batches is an epoch, in an order of its own
    for step, batch in enumerate(islice(epochs, args.steps), 1):
        loss, _ = score(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(either(f"step {step}: loss {loss:.3f}", f"第 {step} 步：loss {loss:.3f}"), flush=True)
    model.eval()
    with torch.no_grad():
        scores = torch.tensor([score(model, batch) for batch in tests])
    loss, right = scores.mean(0).tolist()
    print(
        either(
            f"validation: loss {loss:.3f} (guessing: {math.log(vocabulary):.3f}), {right:.0%} of next tokens right",
            f"验证集：loss {loss:.3f}（随机猜测为 {math.log(vocabulary):.3f}），下一个 token 正确率 {right:.0%}",
        )
    )


if __name__ == "__main__":
    main()
