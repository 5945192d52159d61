"""A small rectified-flow transformer: from noise to mel spectrograms along straight lines, guided by text."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Flow(nn.Module):
    """The clean spectrogram behind a noisy one, at a time between 0 (all noise) and 1 (none)."""

    def __init__(self, bands: int, text: int, patch: int = 16, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.bands, self.patch = bands, patch
        self.text_in = nn.Linear(text, width)
        self.mel_in = nn.Linear(bands * patch, width)
        self.mel_out = nn.Linear(width, bands * patch)
        self.condition = nn.Sequential(nn.Linear(text + width, width), nn.SiLU(), nn.Linear(width, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, noisy: Tensor, time: Tensor, words: Tensor, text: Tensor) -> Tensor:
        batch, _, frames = noisy.shape
        patches = noisy.transpose(1, 2).reshape(batch, frames // self.patch, -1)
        tokens = torch.cat([self.text_in(words), self.mel_in(patches)], 1)
        width = tokens.shape[2]
        condition = self.condition(torch.cat([text, waves(1000 * time, width)], 1))
        places = waves(torch.arange(tokens.shape[1], device=tokens.device), width)
        tokens = self.blocks(tokens + places + condition[:, None])
        return self.mel_out(tokens[:, words.shape[1] :]).reshape(batch, frames, self.bands).transpose(1, 2)

    @torch.no_grad()
    def generate(self, words: Tensor, text: Tensor, frames: int, steps: int = 16) -> Tensor:
        """Spectrograms for these captions: from noise, a little of what is left of the way at every step."""
        mels = torch.randn(len(text), self.bands, frames, device=text.device)
        for step in range(steps):
            time = torch.full((len(text),), step / steps, device=text.device)
            mels = torch.lerp(mels, self(mels, time, words, text), 1 / (steps - step))
        return mels


def flow_loss(model: nn.Module, mels: Tensor, words: Tensor, text: Tensor) -> Tensor:
    """How far off the clean spectrogram is, at random times; of a Flow, or of one that DDP wraps."""
    time = torch.rand(len(mels), device=mels.device)
    noisy = torch.lerp(torch.randn_like(mels), mels, time[:, None, None])
    return nn.functional.mse_loss(model(noisy, time, words, text), mels)


def waves(places: Tensor, width: int) -> Tensor:
    """Sines and cosines of each place at ``width / 2`` frequencies."""
    frequencies = 10_000 ** -torch.linspace(0, 1, width // 2, device=places.device)
    angles = places[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)
