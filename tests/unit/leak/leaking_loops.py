"""Loops as people write them, each with one thing that grows, or with none. The mark ``# here`` is the line to be named.

Each runs in a process of its own: a loop gets the number of steps and calls ``step()`` in each.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import os
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

Step = Callable[[], None]
KB = 1024
LIBC: Any = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
BY_STEP: dict[int, Any] = {}
PRELOADED = [np.zeros(5 * KB) for _ in range(2000)]


def _model() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(32, 64), torch.randint(10, (32,))


def outputs_in_a_list(steps: int, step: Step) -> None:
    model, x, _ = _model()
    outputs = []
    for _ in range(steps):
        outputs.append(model(x).detach().repeat(20, 1))  # here
        step()


def losses_with_graph(steps: int, step: Step) -> None:
    model, x, y = _model()
    losses = []
    for _ in range(steps):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss)  # here
        step()


def one_of_several_lists(steps: int, step: Step) -> None:
    model, x, _ = _model()
    log: dict[str, list[Any]] = {"reward": [], "loss": [], "target": []}
    for number in range(steps):
        value = model(x).mean()
        log["reward"].append(float(number))
        log["loss"].append(value.item())
        log["target"].append(value)  # here
        step()


def sum_of_losses(steps: int, step: Step) -> None:
    model, x, y = _model()
    total: Any = 0
    for _ in range(steps):
        loss = functional.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        total += loss  # here
        step()


def hidden_state(steps: int, step: Step) -> None:
    cell = nn.RNNCell(64, 64)
    x, hidden = torch.randn(32, 64), torch.zeros(32, 64)
    for _ in range(steps):
        hidden = cell(x, hidden)  # here
        step()


def forward_hook(steps: int, step: Step) -> None:
    model, x, _ = _model()
    seen: dict[str, list[torch.Tensor]] = collections.defaultdict(list)

    def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        seen["first"].append(output.detach().clone())  # here

    model[0].register_forward_hook(keep)  # type: ignore[index]
    for _ in range(steps):
        model(x)
        step()


def _keep_gradients(module: nn.Module) -> None:
    kept: dict[str, list[torch.Tensor]] = {"weight": []}

    def keep(gradient: torch.Tensor) -> None:
        kept["weight"].append(gradient.clone())  # here

    next(module.parameters()).register_hook(keep)


def hook_of_a_parameter(steps: int, step: Step) -> None:
    """No variable of the script holds what the hook keeps."""
    model, x, y = _model()
    _keep_gradients(model)
    for _ in range(steps):
        functional.cross_entropy(model(x), y).backward()
        step()


@functools.cache  # here
def _position(number: int) -> torch.Tensor:
    return torch.randn(5 * KB)


def cached_function(steps: int, step: Step) -> None:
    for number in range(steps):
        _position(number)
        step()
    _position.cache_clear()


class Metrics:
    """Keeps every batch in an attribute of the class."""

    all_of_them: list[Any] = []  # noqa: RUF012

    def update(self, values: Any) -> None:
        self.all_of_them.append(values)  # here


def class_attribute(steps: int, step: Step) -> None:
    metrics = Metrics()
    for _ in range(steps):
        metrics.update(np.random.rand(3 * KB))
        step()
    Metrics.all_of_them.clear()


def global_dict(steps: int, step: Step) -> None:
    for number in range(steps):
        BY_STEP[number] = {"text": "loss " * 4 * KB, "step": number}  # here
        step()
    BY_STEP.clear()


def default_argument(steps: int, step: Step) -> None:
    def remember(value: Any, seen: list[Any] = []) -> None:  # noqa: B006
        seen.append(value)  # here

    for _ in range(steps):
        remember(bytearray(30 * KB))
        step()


def concatenated(steps: int, step: Step) -> None:
    history = torch.zeros(0)
    for _ in range(steps):
        history = torch.cat([history, torch.randn(4 * KB)])  # here
        step()


def text(steps: int, step: Step) -> None:
    log = ""
    for _ in range(steps):
        log += "one more line of the log\n" * 500  # here
        step()


def queue_without_reader(steps: int, step: Step) -> None:
    results: queue.Queue[Any] = queue.Queue()
    for _ in range(steps):
        results.put(torch.randn(5 * KB))  # here
        step()


def passed_to_a_function(steps: int, step: Step) -> None:
    def add(to: list[Any], value: Any) -> None:
        to.append(value)

    kept: list[Any] = []
    for _ in range(steps):
        add(kept, np.random.rand(5 * KB))  # here
        step()


def files_in_shm(steps: int, step: Step) -> None:
    names = [f"/dev/shm/legroom-test-{os.getpid()}-{number}" for number in range(steps)]
    try:
        for name in names:
            with open(name, "wb") as file:  # here
                file.write(b"x" * 40 * KB)
            step()
    finally:
        for name in names:
            if os.path.exists(name):
                os.unlink(name)


def malloc(steps: int, step: Step) -> None:
    taken = []
    for _ in range(steps):
        address = LIBC.malloc(ctypes.c_size_t(100 * KB))
        ctypes.memset(address, 1, 100 * KB)
        taken.append(address)
        step()
    for address in taken:
        LIBC.free(ctypes.c_void_p(address))


def mapped(steps: int, step: Step) -> None:
    LIBC.mmap.restype = ctypes.c_void_p
    taken = []
    for _ in range(steps):
        address = LIBC.mmap(None, ctypes.c_size_t(256 * KB), 3, 0x22, -1, ctypes.c_size_t(0))
        ctypes.memset(address, 1, 256 * KB)
        taken.append(address)
        step()
    for address in taken:
        LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(256 * KB))


NAMED = (
    outputs_in_a_list, losses_with_graph, one_of_several_lists, sum_of_losses, hidden_state, forward_hook, hook_of_a_parameter, cached_function, class_attribute,
    global_dict, default_argument, concatenated, text, queue_without_reader, passed_to_a_function, files_in_shm,
)  # fmt: skip


def small_and_large_items(steps: int, step: Step) -> None:
    model, x, y = _model()
    keep: list[torch.Tensor] = []
    for _ in range(steps):
        loss = functional.cross_entropy(model(x), y).detach()
        keep.append(loss)
        keep.append(torch.ones(50 * KB))  # here
        step()


def large_and_small_items(steps: int, step: Step) -> None:
    keep: list[torch.Tensor] = []
    for number in range(steps):
        keep.append(torch.ones(50 * KB))  # here
        keep.append(torch.tensor(float(number)))
        step()


def large_item_that_has_a_name(steps: int, step: Step) -> None:
    keep: list[torch.Tensor] = []
    for number in range(steps):
        small, large = torch.tensor(float(number)), torch.randn(10 * KB)
        large = large.repeat(5)
        keep.append(small)
        keep.append(  # here
            large
        )
        step()


def one_large_after_many_small(steps: int, step: Step) -> None:
    keep: list[Any] = []
    for number in range(steps):
        keep.append(np.ones(20 * KB))  # here
        for part in range(21):
            keep.append(f"{number} {part}")
        step()


def _noise() -> torch.Tensor:
    return torch.randn(40 * KB)


def dict_filled_at_two_places(steps: int, step: Step) -> None:
    cache: dict[Any, torch.Tensor] = {}
    for number in range(steps):
        cache["small", number] = torch.zeros(8)
        cache["large", number] = _noise()  # here
        step()


def attribute_filled_by_two_methods(steps: int, step: Step) -> None:
    class Log:
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def name(self, text: str) -> None:
            self.rows.append(text)

        def keep(self, value: Any) -> None:
            self.rows.append(value)  # here

    log = Log()
    for number in range(steps):
        log.name(f"step {number}")
        values = np.ones(15 * KB)
        log.keep(values)
        step()


def two_entries_of_a_dict(steps: int, step: Step) -> None:
    log: dict[str, list[Any]] = {"loss": [], "out": []}
    for number in range(steps):
        log["loss"].append(torch.tensor(float(number)))
        log["out"].append(torch.randn(30 * KB))  # here
        step()


def one_line_with_two_sites(steps: int, step: Step) -> None:
    keep: list[torch.Tensor] = []
    for number in range(steps):
        small = torch.tensor(float(number))
        large = torch.ones(40 * KB)  # made
        for one in (small, large):
            keep.append(one)  # here
        step()


def two_lines_that_add_as_much(steps: int, step: Step) -> None:
    keep: list[torch.Tensor] = []
    for number in range(steps):
        keep.append(torch.tensor(float(number)))
        keep.append(torch.ones(40 * KB))
        keep.append(torch.zeros(40 * KB))
        step()


def graphs_and_plain_tensors(steps: int, step: Step) -> None:
    model, x, _ = _model()
    keep: list[torch.Tensor] = []
    for _ in range(steps):
        out = model(x.repeat(20, 1))
        keep.append(out.mean())
        keep.append(torch.ones(60 * KB))
        step()


TWO_SITES = (
    small_and_large_items, large_and_small_items, large_item_that_has_a_name, one_large_after_many_small,
    dict_filled_at_two_places, attribute_filled_by_two_methods, two_entries_of_a_dict, one_line_with_two_sites,
)  # fmt: skip


def nothing_grows(steps: int, step: Step) -> None:
    model, x, y = _model()
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # 32 bytes a step: not worth a line
        step()


def warm_up(steps: int, step: Step) -> None:
    kept = []
    for number in range(steps):
        if number < steps * 0.4:
            kept.append(torch.randn(50 * KB))
        step()


def cache_that_fills(steps: int, step: Step) -> None:
    cache: dict[int, torch.Tensor] = {}
    for number in range(steps):
        key = number % int(steps * 0.6)
        if key not in cache:
            cache[key] = torch.randn(20 * KB)
        step()


def list_of_an_epoch(steps: int, step: Step) -> None:
    outputs: list[torch.Tensor] = []
    for number in range(steps):
        outputs.append(torch.randn(20 * KB))
        if number % 30 == 29:
            outputs = []
        step()


def replay_buffer(steps: int, step: Step) -> None:
    memory: collections.deque[torch.Tensor] = collections.deque(maxlen=10_000)
    for _ in range(steps):
        memory.append(torch.randn(KB))
        step()


def references(steps: int, step: Step) -> None:
    order = []
    for number in range(steps):
        order.append(PRELOADED[number])  # exists anyway
        step()


def buffer_made_before(steps: int, step: Step) -> None:
    buffer = torch.empty(steps, 50 * KB)
    for number in range(steps):
        buffer[number] = 1.0
        step()


def sizes_that_vary(steps: int, step: Step) -> None:
    chance = np.random.default_rng(0)
    for _ in range(steps):
        kept = [torch.randn(int(size)) for size in chance.integers(100, 20 * KB, 20)]
        assert kept
        step()


CLEAN = (
    nothing_grows, warm_up, cache_that_fills, list_of_an_epoch, replay_buffer, references, buffer_made_before,
    sizes_that_vary,
)  # fmt: skip
