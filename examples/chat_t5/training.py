"""The training: epochs, steps, what is logged and when it is saved.

Covers: the loop. Does not cover: reading rows (rows.py), choosing settings (settings.py), checkpoints (keep.py),
answers and their score (chat.py), ZeRO (zero.py).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import zero
from accelerate import Accelerator
from chat import evaluate, new_model
from keep import Checkpoint, Place
from rows import FirstRows, Shared, Streamed
from settings import because, choose
from text import Batch
from transformers import T5ForConditionalGeneration
from transformers.optimization import Adafactor, get_cosine_schedule_with_warmup
from transformers.utils.logging import disable_progress_bar

from legroom.errors import UsageError
from legroom.integrations.accelerate import guarded
from legroom.units import format_size

log = logging.getLogger("chat_t5")


def train(flags: argparse.Namespace) -> None:
    """From the beginning or the checkpoint to the last epoch."""
    accelerator = started(flags)
    rows = FirstRows(flags.train_file)
    if not len(FirstRows(flags.validation_file, read=1)):
        raise UsageError(f"{flags.validation_file} has no rows", fix=("give rows to be tested with",))
    effective = flags.batch_size_per_gpu * flags.gradient_accumulation_steps * accelerator.num_processes
    steps = len(rows) // effective
    if not steps:
        raise UsageError(
            f"{flags.train_file} has no whole step",
            why=f"it has {len(rows)} rows, and a step takes {effective}",
            fix=("lower --batch_size_per_gpu or --gradient_accumulation_steps", "or give a file with more rows"),
        )  # fmt: skip
    log.info("%d rows, %d left over, %d steps an epoch", len(rows), len(rows) - steps * effective, steps)

    torch.manual_seed(flags.seed)
    with guarded(accelerator, tune="off") as guard:  # settings are chosen below, for streams too
        training = Training(accelerator, flags, rows, steps)
        guard.model_ready()
        training.run(guard)
    if accelerator.is_main_process:
        disable_progress_bar()
        accelerator.unwrap_model(training.model).save_pretrained(flags.model_dir)
        log.info("model: %s", flags.model_dir)
    accelerator.end_training()


def started(flags: argparse.Namespace) -> Accelerator:
    """The accelerator, and a log that the first rank writes."""
    accelerator = Accelerator(
        gradient_accumulation_steps=flags.gradient_accumulation_steps,
        **zero.started(flags),
    )
    if accelerator.gradient_accumulation_steps != flags.gradient_accumulation_steps:
        raise UsageError(
            "the launcher and the script accumulate differently",
            why=f"{accelerator.gradient_accumulation_steps} and {flags.gradient_accumulation_steps} batches to a step",
            fix=(f"give --gradient_accumulation_steps={accelerator.gradient_accumulation_steps} to the script too",),
        )  # fmt: skip
    zero.prepare(accelerator, flags.batch_size_per_gpu)
    if accelerator.is_main_process:
        path = flags.log_dir / time.strftime("chat_trainer_low_mem_%Y%m%d_%H%M%S.log")
        for name in ("chat_t5", "legroom"):
            logger = logging.getLogger(name)
            logger.setLevel(logging.INFO if name == "chat_t5" else logging.WARNING)
            logger.handlers = [logging.StreamHandler(sys.stdout), logging.FileHandler(path)]
            logger.handlers[1].setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            logger.propagate = False
    return accelerator


class Training:
    """Model, optimizer, schedule and where they stand."""

    def __init__(
        self, accelerator: Accelerator, flags: argparse.Namespace, first: FirstRows, steps: int
    ) -> None:
        self.accelerator, self.flags, self.first, self.steps = accelerator, flags, first, steps
        self.collate = Batch(flags.max_seq_len)
        plain = new_model(flags.width, flags.layers).to(accelerator.device)
        # No first moment, and the second as one number a row and a column: next to nothing beside the weights.
        optimizer = Adafactor(
            plain.parameters(), lr=flags.learn_rate, beta1=None, relative_step=False, scale_parameter=False
        )
        # Not prepared: accelerate would step it once for every rank.
        self.schedule = get_cosine_schedule_with_warmup(optimizer, flags.warmup_steps, steps * flags.epochs)
        self.settings = choose(
            accelerator, flags, first, self.collate, previous=None, step=self._timed(plain)
        )
        self.model, self.optimizer = accelerator.prepare(plain, optimizer)
        self.checkpoint = Checkpoint(accelerator, flags, self.model, self.optimizer, self.schedule)
        self.place = self._place()

    def _timed(self, model: T5ForConditionalGeneration) -> Any:
        """A step that leaves nothing behind: only its time is wanted."""

        def step(batch: dict[str, torch.Tensor]) -> None:
            model(**{name: part.to(model.device) for name, part in batch.items()}).loss.backward()
            model.zero_grad()

        return step

    def _place(self) -> Place:
        path = self.checkpoint.path
        if not self.flags.is_keep_training:
            if path.exists():
                log.info("begins anew, and will replace %s (--is_keep_training=True goes on from it)", path)
            return Place()
        place = self.checkpoint.restore()
        if place is None:
            log.info("begins anew: there is no %s", path)
            return Place()
        log.info("goes on from %s: epoch %d, step %d", path, place.epoch, place.step)
        return place

    def run(self, guard: Any) -> None:
        """Every epoch that is left, each with settings of its own."""
        before, seconds = self.place.step_seconds, None
        logging.getLogger("legroom").setLevel(logging.INFO)  # each epoch's block says what was chosen
        for epoch in range(self.place.epoch, self.flags.epochs):
            if seconds is not None:
                self.settings = choose(
                    self.accelerator, self.flags, self.first, self.collate,
                    previous=self.settings, step_seconds=seconds,
                )  # fmt: skip
            rows = self._rows()
            guard.settings = self.settings
            guard.epoch(epoch)
            loss, took, seconds = self._epoch(epoch, rows, guard)
            self.place = Place(epoch + 1, step_seconds=took)
            self.checkpoint.save(self.place, rows)
            exact, bleu = evaluate(self.accelerator, self.model, self.flags)
            speed = "" if before is None else f", {before / took:.2f} times the speed of before"
            log.info("epoch %d: loss %.4f, %.0f ms a step%s", epoch, loss, 1000 * took, speed)
            log.info("epoch %d: %.1f%% of the answers exactly right, BLEU %.3f", epoch, 100 * exact, bleu)
            before = took
        if self.place.epoch == self.flags.epochs:
            log.info("all %d epochs are done", self.flags.epochs)
        self._account()

    def _rows(self) -> Streamed | Shared:
        """The rows as the settings say; an epoch that is under way goes on as it began."""
        flags, ranks = self.flags, (self.accelerator.process_index, self.accelerator.num_processes)
        begun = self.place.low_memory
        if begun is not None and begun != self.settings.low_memory:
            self.settings = because(self.settings, "as this epoch began; the next is free", low_memory=begun)
        step_rows = flags.batch_size_per_gpu * flags.gradient_accumulation_steps
        rows: Streamed | Shared
        if self.settings.low_memory:
            self.settings = because(self.settings, "a stream is read here", num_workers=0, pin_memory=False)
            rows = Streamed(flags.train_file, step_rows, flags.seed, *ranks, memory=flags.stream_memory)
        else:
            rows = Shared(flags.train_file, step_rows, flags.seed, *ranks)
        if self.place.rows is not None:
            rows.load(self.place.rows[min(ranks[0], len(self.place.rows) - 1)])
        return rows

    def _epoch(self, epoch: int, rows: Streamed | Shared, guard: Any) -> tuple[float, float, float]:
        """The rest of an epoch: its mean loss, seconds a step, and seconds of computing for a batch."""
        done, accelerator, flags = self.place.step, self.accelerator, self.flags
        # Its count of batches would not fit an accumulation that is new.
        accelerator.gradient_accumulation_steps, accelerator.step = self.settings.accumulation, 0
        batches = rows.batches(epoch, done, self.settings, self.collate)
        losses: list[float] = []
        computing, began = 0.0, time.perf_counter()
        for step in range(done, self.steps):
            # What is drawn depends on the step and the rank alone: a resumed training draws the same.
            place = (epoch * self.steps + step) * accelerator.num_processes + accelerator.process_index
            torch.manual_seed((flags.seed << 40) + place)
            loss, seconds = self._step(batches)
            losses.append(loss)
            computing += seconds
            if (step + 1) % flags.logging_steps == 0:
                log.info("epoch: %d, step: %d/%d, loss: %f", epoch, step + 1, self.steps, losses[-1])
            why = guard.step()
            if step + 1 < self.steps and (why or (step + 1) % flags.save_steps == 0):
                self.checkpoint.save(replace(self.place, epoch=epoch, step=step + 1), rows)
        took = (time.perf_counter() - began) / len(losses)
        mean = torch.tensor(sum(losses) / len(losses), device=accelerator.device)
        loss = accelerator.reduce(mean, "mean").item()
        return loss, took, computing / len(losses) / self.settings.accumulation

    def _step(self, batches: Iterator[dict[str, torch.Tensor]]) -> tuple[float, float]:
        """One optimizer step: this rank's loss, and the seconds that were not spent waiting for rows."""
        total = seconds = 0.0
        for _ in range(self.settings.accumulation):
            batch = next(batches)
            began = time.perf_counter()
            with self.accelerator.accumulate(self.model):
                on_device = {name: part.to(self.accelerator.device) for name, part in batch.items()}
                loss = self.model(**on_device).loss
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            total += loss.item()
            seconds += time.perf_counter() - began
        self.schedule.step()
        return total / self.settings.accumulation, seconds

    def _account(self) -> None:
        """What the optimizer holds beside the weights."""
        weights = sum(one.nbytes for one in self.model.parameters())
        states = (one for state in self.optimizer.state.values() for one in state.values())
        held = sum(one.nbytes for one in states if torch.is_tensor(one))
        log.info(
            "weights %s, Adafactor's states %s (Adam's would be %s)",
            *map(format_size, (weights, held, 2 * weights)),
        )
