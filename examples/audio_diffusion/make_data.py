"""Makes the data: short clips of synthetic instruments, as mel spectrograms with captions and text features.

    python make_data.py --out clips.h5 [--clips 384]

The text features stand in for a T5's (a vector a word) and a CLAP's (one vector a caption): every word has a fixed
random vector. They have real encoders' shapes and cost what real ones cost in memory; they know nothing of language.
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path

import h5py
import numpy as np

from legroom.messages import either
from legroom.units import format_size

RATE, HOP, WINDOW = 8000, 64, 256  # samples a second, from frame to frame, in a frame
BANDS, FRAMES = 64, 960  # of a mel spectrogram: 7.7 seconds
WORDS, WIDTH = 16, 512  # of a caption's text features

PITCHES = {"low": 130.0, "middle": 440.0, "high": 1500.0}  # Hz
INSTRUMENTS = ("flute", "organ", "guitar", "siren")
CAPTIONS = [f"a {pitch} note on a {instrument}" for instrument in INSTRUMENTS for pitch in PITCHES]


def clip(caption: str, random: np.random.Generator) -> np.ndarray:
    """A few seconds of that instrument, repeating a note near that pitch."""
    _, pitch, *_, instrument = caption.split()
    time = np.arange(FRAMES * HOP) / RATE
    since = time % random.uniform(0.4, 1.2)  # the note begins again and again
    phase = 2 * np.pi * PITCHES[pitch] * random.uniform(0.9, 1.1) * time
    wave = {
        "flute": np.sin(phase),
        "organ": sum(np.sin(n * phase) / n for n in (1, 3, 5)),
        "guitar": np.sin(phase) * np.exp(-5 * since),
        "siren": np.sin(phase + 20 * np.sin(2 * np.pi * 2 * time)),
    }[instrument]
    return wave + 0.01 * random.standard_normal(len(time))


def mel_filters() -> np.ndarray:
    """Triangles, evenly spaced on the mel scale: (bands, frequencies)."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1)
    left, middle, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    triangles = np.minimum((frequencies - left) / (middle - left), (right - frequencies) / (right - middle))
    return np.maximum(triangles, 0)


def mel(wave: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """The log-mel spectrogram, about between -1 and 1: (bands, frames)."""
    padded = np.pad(wave, (0, WINDOW - HOP))
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW))) ** 2
    return np.log10(filters @ power.T + 1e-2) / 3


def text_features(caption: str) -> tuple[np.ndarray, np.ndarray]:
    """One vector a word, padded with zeros, and one for the whole caption."""
    vectors = [np.random.default_rng(zlib.crc32(word.encode())).standard_normal(WIDTH) for word in caption.split()]
    words = np.zeros((WORDS, WIDTH))
    words[: len(vectors)] = vectors
    return words, np.mean(vectors, axis=0)


def make(path: Path, clips: int) -> None:
    """Write the file."""
    random = np.random.default_rng(0)
    filters = mel_filters()
    captions = np.arange(clips) % len(CAPTIONS)
    words, whole = zip(*map(text_features, CAPTIONS), strict=True)
    with h5py.File(path, "w") as file:
        mels = file.create_dataset("mels", (clips, BANDS, FRAMES), np.float16)
        for row, caption in enumerate(captions):
            mels[row] = mel(clip(CAPTIONS[caption], random), filters)
        file["captions"] = captions
        file["text_words"] = np.asarray(words, np.float32)
        file["text_whole"] = np.asarray(whole, np.float32)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=either("Make short clips of synthetic instruments.", "生成合成乐器的短片段。")
    )
    parser.add_argument(
        "--out", type=Path, default="clips.h5", help=either("file to write (clips.h5)", "输出文件（clips.h5）")
    )
    parser.add_argument(
        "--clips", type=int, default=384, help=either("how many (384: 45 MB)", "片段数（384 个约 45 MB）")
    )
    args = parser.parse_args(argv)
    if args.clips < 1:
        parser.error(either("--clips must be at least 1", "--clips 不能小于 1"))
    try:
        make(args.out, args.clips)
    except OSError as problem:
        parser.error(either(f"cannot write {args.out}: {problem}", f"无法写入 {args.out}：{problem}"))
    size, seconds = format_size(args.out.stat().st_size), FRAMES * HOP / RATE
    print(
        either(
            f"{args.out}: {args.clips} clips of {seconds:.1f} s, {size}",
            f"{args.out}：{args.clips} 个片段，每个 {seconds:.1f} 秒，共 {size}",
        )
    )


if __name__ == "__main__":
    main()
