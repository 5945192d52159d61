"""A small T5 built from its configuration, its greedy answers, and their score on held-out rows."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice

import torch
from accelerate import Accelerator
from rows import COLUMNS
from score import counts, scores
from text import END, PAD, VOCABULARY, Batch, decode
from transformers import T5Config, T5ForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

import legroom
from legroom.errors import UnreadableSource
from legroom.messages import either

AT_A_TIME = 64
LONGEST_ANSWER = 64  # tokens


def new_model(width: int, layers: int) -> T5ForConditionalGeneration:
    """A T5 with random weights; nothing is downloaded."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=width, d_kv=width // 4, d_ff=2 * width, num_layers=layers, num_heads=4,
            dropout_rate=0.05, pad_token_id=PAD, decoder_start_token_id=PAD, eos_token_id=END,
        )
    )  # fmt: skip


@torch.no_grad()
def answers(model: T5ForConditionalGeneration, prompts: list[str], longest: int) -> list[str]:
    """Greedy answers: always the most likely token."""
    rows = Batch(longest)([{"prompt": prompt, "response": ""} for prompt in prompts])
    asked = {name: rows[name].to(model.device) for name in ("input_ids", "attention_mask")}
    made = model.generate(**asked, max_new_tokens=min(longest, LONGEST_ANSWER), do_sample=False, num_beams=1)
    return [decode(one) for one in made.tolist()]


def evaluate(accelerator: Accelerator, model: torch.nn.Module, flags: argparse.Namespace) -> tuple[float, float]:
    """(share of exact answers, BLEU) on the first ``--eval_rows`` held-out rows, divided among the ranks."""
    rank, ranks = accelerator.process_index, accelerator.num_processes
    plain = accelerator.unwrap_model(model)
    plain.eval()
    stream = legroom.stream(
        flags.validation_file, columns=COLUMNS, batch_size=AT_A_TIME, format="python", uneven="all",
        rank=rank, world_size=ranks,
    )  # fmt: skip
    mine = flags.eval_rows // ranks + (rank < flags.eval_rows % ranks)

    def pairs() -> Iterator[tuple[str, str]]:
        left = mine
        for batch in stream:
            some = list(islice(batch, left))
            left -= len(some)
            if not some:
                return
            made = answers(plain, [row["prompt"] or "" for row in some], flags.max_seq_len)
            yield from zip(made, (row["response"] or "" for row in some), strict=True)

    sums = torch.tensor(counts(pairs()), dtype=torch.float64, device=accelerator.device)
    plain.train()
    return scores(accelerator.reduce(sums, "sum").tolist())


def ask(flags: argparse.Namespace) -> None:
    """Answer each question with the trained model."""
    disable_progress_bar()
    try:
        model = T5ForConditionalGeneration.from_pretrained(flags.model_dir, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as problem:
        raise UnreadableSource(
            either(f"there is no model in {flags.model_dir}", f"{flags.model_dir} 中没有模型"),
            why=str(problem).strip().partition("\n")[0],
            fix=(either("train one: python train_low_mem.py train", "先训练：python train_low_mem.py train"),),
        ) from problem
    model.eval()
    for answer in answers(model, flags.prompt, longest=256):
        print(answer)
