"""Finding glints as heatmaps: the network, the two losses, and the error in pixels.

Covers: what is learnt and how it is judged. Does not cover: data and training (train_glint_unet.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

DOWNSCALED_BY = 4  # two poolings: both sides of an image must divide by it


class GlintUNet(nn.Module):
    """A U-Net of three levels: images in, logits of heatmaps out, both (batch, 1, rows, columns)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fine = double_conv(1, width)
        self.middle = double_conv(width, 2 * width)
        self.coarse = double_conv(2 * width, 4 * width)
        self.up_middle = double_conv(6 * width, 2 * width)
        self.up_fine = double_conv(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)
        nn.init.constant_(self.head.bias, -4.0)  # begin with "no glint here", true of nearly every pixel

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        middle = self.middle(F.max_pool2d(fine, 2))
        coarse = self.coarse(F.max_pool2d(middle, 2))
        middle = self.up_middle(torch.cat([F.interpolate(coarse, scale_factor=2.0), middle], 1))
        fine = self.up_fine(torch.cat([F.interpolate(middle, scale_factor=2.0), fine], 1))
        return self.head(fine)


def double_conv(channels_in: int, channels_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (channels_in, channels_out):
        conv = nn.Conv2d(before, channels_out, 3, padding=1, bias=False)
        layers += [conv, nn.GroupNorm(4, channels_out), nn.ReLU()]
    return nn.Sequential(*layers)


def focal(logits: Tensor, heatmaps: Tensor) -> Tensor:
    """Cross-entropy weighted by the square of the error, so that the easy background does not drown the glints."""
    error = torch.sigmoid(logits) - heatmaps
    each = F.binary_cross_entropy_with_logits(logits, heatmaps, reduction="none")
    return (error.square() * each).sum() / heatmaps.sum().clamp(min=1)


def hybrid(logits: Tensor, heatmaps: Tensor) -> Tensor:
    """Focal for the pixels, Dice for the overlap of whole spots."""
    found = torch.sigmoid(logits)
    overlap = 2 * (found * heatmaps).sum() / (found.square().sum() + heatmaps.square().sum()).clamp(min=1)
    return focal(logits, heatmaps) + (1 - overlap)


LOSSES = {"focal": focal, "hybrid": hybrid}


def pixel_errors(found: Tensor, heatmaps: Tensor) -> Tensor:
    """For every true glint, how far the nearest found one is; as many are looked for as are in the image."""
    errors = [found.new_empty(0)]
    for guess, truth in zip(peaks(found), peaks(heatmaps), strict=True):
        glints = (truth > 0.5).nonzero()
        strongest = guess.flatten().topk(len(glints)).indices
        places = torch.stack([strongest // guess.shape[1], strongest % guess.shape[1]], 1)
        if len(glints):
            errors.append(torch.cdist(glints.float(), places.float()).amin(1))
    return torch.cat(errors)


def peaks(heatmaps: Tensor) -> Tensor:
    """(batch, 1, rows, columns) to (batch, rows, columns) with everything but local maxima set to zero."""
    highest = F.max_pool2d(heatmaps, 5, stride=1, padding=2)
    return torch.where(heatmaps == highest, heatmaps, 0)[:, 0]
