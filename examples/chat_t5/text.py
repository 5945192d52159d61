"""Text as token ids, byte by byte: any language, no vocabulary to download, 259 tokens.

Covers: texts to ids and back, batches of rows as a T5 takes them. Does not cover: where rows come from (rows.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.nn.utils.rnn import pad_sequence

PAD, END, FIRST = 0, 1, 3  # 2 is T5's unknown token, which bytes do not need
VOCABULARY = FIRST + 256
IGNORED = -100  # what torch's cross entropy leaves out


def encode(text: str, longest: int) -> torch.Tensor:
    """The ids of a text, cut to ``longest`` with its end included."""
    return torch.tensor([FIRST + byte for byte in text.encode()[: longest - 1]] + [END])


def decode(ids: Iterable[int]) -> str:
    """The text before the first end."""
    found = bytearray()
    for token in ids:
        if token == END:
            break
        if token >= FIRST:
            found.append(token - FIRST)
    return found.decode(errors="replace")


class Batch:
    """Rows to tensors; a class and no closure, so that workers can be sent it."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def __call__(self, rows: list[Mapping[str, str | None]]) -> dict[str, torch.Tensor]:
        prompts = [encode(row["prompt"] or "", self.longest) for row in rows]
        responses = [encode(row["response"] or "", self.longest) for row in rows]
        ids = pad_sequence(prompts, batch_first=True, padding_value=PAD)
        labels = pad_sequence(responses, batch_first=True, padding_value=IGNORED)
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}
