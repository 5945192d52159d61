"""A small decoder-only transformer, and LoRA adapters for its linear layers: written out, or those of PEFT."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_ffn = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length, width = tokens.shape
        seen = self.before_attention(tokens)
        query, key, value = (
            layer(seen).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        scores = (query @ key.transpose(2, 3) / math.sqrt(width // self.heads)).masked_fill(later, -torch.inf)
        tokens = tokens + self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, width))
        return tokens + self.down(functional.gelu(self.up(self.before_ffn(tokens))))


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self, vocabulary: int, width: int, layers: int, length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 32)) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.positions[: tokens.shape[1]]))


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained product of two small matrices: W x + scale · B A x."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float = 16.0) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        where = {"device": base.weight.device, "dtype": base.weight.dtype}
        # Drawn on the CPU: the same numbers on every device.
        first = torch.randn(rank, base.in_features, dtype=torch.float32) / math.sqrt(base.in_features)
        self.a = nn.Parameter(first.to(**where))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, **where))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + self.scale * (inputs @ self.a.T @ self.b.T)


def add_lora(model: nn.Module, rank: int, names: tuple[str, ...] = ("query", "value")) -> list[nn.Parameter]:
    """Freeze the model and give the layers of these names an adapter; returns the parameters to train."""
    model.requires_grad_(False)
    trained: list[nn.Parameter] = []
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if name in names and isinstance(layer, nn.Linear):
                adapter = LoraLinear(layer, rank)
                setattr(module, name, adapter)
                trained += [adapter.a, adapter.b]
    return trained


def add_peft_lora(model: nn.Module, rank: int, names: tuple[str, ...] = ("query", "value")) -> list[nn.Parameter]:
    """The same with PEFT. It replaces the layers inside ``model``, and freezes everything but the adapters."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=16, target_modules=list(names)))
    return [parameter for parameter in adapted.parameters() if parameter.requires_grad]
