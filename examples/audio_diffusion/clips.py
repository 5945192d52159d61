"""The clips as a dataset: a random stretch of each mel spectrogram, with its caption's text features."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.utils.data import Dataset

ARRAYS = ("mels", "captions", "text_words", "text_whole")
Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Clips(Dataset[Sample]):
    """Stretches of ``frames`` frames. Which ones depends on epoch and index alone, not on the number of workers."""

    def __init__(self, data: Mapping[str, np.ndarray], frames: int, epoch: int) -> None:
        self.data, self.frames, self.epoch = data, frames, epoch

    def __len__(self) -> int:
        return len(self.data["mels"])

    def __getitem__(self, index: int) -> Sample:
        whole = self.data["mels"][index]
        room = whole.shape[1] - self.frames
        start = np.random.default_rng((self.epoch, index)).integers(room + 1)
        mel = whole[:, start : start + self.frames].astype(np.float32)
        caption = self.data["captions"][index]
        words, text = self.data["text_words"][caption], self.data["text_whole"][caption]
        return torch.from_numpy(mel), torch.from_numpy(words), torch.from_numpy(text)
