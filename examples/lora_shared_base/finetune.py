"""One LoRA fine-tune on a frozen base model of which all processes use one copy.

    python finetune.py base.safetensors --task 1 [--device cuda] [--own] [--peft]

It loads the base, prints a line of JSON, waits for a line on its input, trains, and prints the losses as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from model import Transformer, add_lora, add_peft_lora
from torch.nn import functional

import legroom


def load_base(path: str, device: str, *, shared: bool) -> tuple[Transformer, str]:
    """The model with the weights of the file. Nothing is allocated for the model itself."""
    if device == "cpu":
        weights = legroom.weights(path)  # one copy in RAM for all processes
    else:
        weights = legroom.weights(path, device, shared=shared)  # one copy on the GPU
    vocabulary, width = weights["embed.weight"].shape
    layers = sum(name.endswith("query.weight") for name in weights)
    with torch.device("meta"):
        model = Transformer(vocabulary, width, layers, len(weights["positions"]))
    model.load_state_dict(weights, assign=True)
    return model, weights.why


def batches(task: int, vocabulary: int, steps: int, device: str) -> torch.Tensor:
    """Sequences that count up by ``task``: something that an adapter can learn in a few steps."""
    random = torch.Generator().manual_seed(task)
    first = torch.randint(0, vocabulary, (steps, 16, 1), generator=random)
    return ((first + task * torch.arange(33)) % vocabulary).to(device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("--task", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--own", action="store_true", help="a copy of its own on the GPU, for comparison")
    parser.add_argument("--peft", action="store_true", help="adapters of PEFT, which must be installed")
    asked = parser.parse_args()
    if asked.device == "cpu":
        torch.set_num_threads(1)  # several fine-tunes run side by side
    torch.manual_seed(asked.task)
    model, why = load_base(asked.base, asked.device, shared=not asked.own)
    trained = (add_peft_lora if asked.peft else add_lora)(model, asked.rank)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    own = torch.cuda.memory_allocated() if asked.device != "cpu" else 0
    print(json.dumps({"why": why, "allocated": own, "trained": sum(one.numel() for one in trained)}), flush=True)
    sys.stdin.readline()
    losses = []
    for tokens in batches(asked.task, model.embed.num_embeddings, asked.steps, asked.device):
        optimizer.zero_grad()
        guesses = model(tokens[:, :-1])
        loss = functional.cross_entropy(guesses.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps({"losses": losses}), flush=True)


if __name__ == "__main__":
    main()
