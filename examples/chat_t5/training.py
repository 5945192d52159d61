"""The training loop: epochs, steps, log lines, when to save.

Does not cover: reading rows (rows.py), choosing settings (settings.py), checkpoints (keep.py), answers and their score
(chat.py), ZeRO (zero.py), host memory by component (host_memory.py).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import host_memory
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
from legroom.messages import either
from legroom.units import format_size

log = logging.getLogger("chat_t5")


def train(flags: argparse.Namespace) -> None:
    """Train from the start or from the checkpoint to the last epoch."""
    accelerator = started(flags)
    rows = FirstRows(flags.train_file)
    if not len(FirstRows(flags.validation_file, read=1)):
        raise UsageError(
            either(f"{flags.validation_file} has no rows", f"{flags.validation_file} 没有数据行"),
            fix=(either("give a file with rows for the evaluation", "换一个有数据行的验证文件"),),
        )
    effective = flags.batch_size_per_gpu * flags.gradient_accumulation_steps * accelerator.num_processes
    steps = len(rows) // effective
    if not steps:
        raise UsageError(
            either(f"{flags.train_file} has too few rows for one step", f"{flags.train_file} 的行数不够一步"),
            why=either(
                f"it has {len(rows)} rows, and a step takes {effective}", f"共 {len(rows)} 行，有效批大小为 {effective}"
            ),
            fix=(
                either(
                    "lower --batch_size_per_gpu or --gradient_accumulation_steps",
                    "减小 --batch_size_per_gpu 或 --gradient_accumulation_steps",
                ),
                either("or give a file with more rows", "或换一个行数更多的文件"),
            ),
        )
    left = len(rows) - steps * effective
    log.info(
        either(
            f"{len(rows)} rows, {left} left over, {steps} steps per epoch",
            f"共 {len(rows)} 行，剩余 {left} 行，每轮 {steps} 步",
        )
    )

    torch.manual_seed(flags.seed)
    with guarded(accelerator, tune="off") as guard:  # settings are chosen below, for streams too
        report_memory(guard, either("at start", "启动时"))
        training = Training(accelerator, flags, rows, steps)
        guard.model_ready()
        report_memory(guard, either("after the model", "模型加载后"), training.model, training.optimizer)
        training.run(guard)
    if accelerator.is_main_process:
        disable_progress_bar()
        accelerator.unwrap_model(training.model).save_pretrained(flags.model_dir)
        log.info(either(f"model: {flags.model_dir}", f"模型：{flags.model_dir}"))
    accelerator.end_training()


def report_memory(guard: Any, moment: str, *objects: Any, **more: Any) -> None:
    """Measure host memory by component: for the log, and for `legroom watch`."""
    sizes = host_memory.components(*objects, **more)
    guard.watch.component(**sizes)
    log.info(host_memory.described(moment, sizes))


def started(flags: argparse.Namespace) -> Accelerator:
    """The accelerator, and the log, which rank 0 writes."""
    accelerator = Accelerator(gradient_accumulation_steps=flags.gradient_accumulation_steps, **zero.started(flags))
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
    """Model, optimizer, schedule, and the position in the data."""

    def __init__(self, accelerator: Accelerator, flags: argparse.Namespace, first: FirstRows, steps: int) -> None:
        self.accelerator, self.flags, self.first, self.steps = accelerator, flags, first, steps
        self.collate = Batch(flags.max_seq_len)
        plain = new_model(flags.width, flags.layers).to(accelerator.device)
        # No first moment, and the second as one number per row and column: about 3 % of the weights.
        optimizer = Adafactor(
            plain.parameters(), lr=flags.learn_rate, beta1=None, relative_step=False, scale_parameter=False
        )
        # Not prepared: accelerate would step it once per rank.
        self.schedule = get_cosine_schedule_with_warmup(optimizer, flags.warmup_steps, steps * flags.epochs)
        self.settings = choose(accelerator, flags, first, self.collate, previous=None, step=self._timed(plain))
        self.model, self.optimizer = accelerator.prepare(plain, optimizer)
        self.checkpoint = Checkpoint(accelerator, flags, self.model, self.optimizer, self.schedule)
        self.place = self._place()

    def _timed(self, model: T5ForConditionalGeneration) -> Any:
        """A step for timing, which changes nothing."""

        def step(batch: dict[str, torch.Tensor]) -> None:
            model(**{name: part.to(model.device) for name, part in batch.items()}).loss.backward()
            model.zero_grad()

        return step

    def _place(self) -> Place:
        path = self.checkpoint.path
        if not self.flags.is_keep_training:
            if path.exists():
                log.info(
                    either(
                        f"starts from scratch and will replace {path} (--is_keep_training=True resumes from it)",
                        f"从头训练，将覆盖 {path}（加 --is_keep_training=True 可断点续训）",
                    )
                )
            return Place()
        place = self.checkpoint.restore()
        if place is None:
            log.info(either(f"starts from scratch: there is no {path}", f"从头训练：没有 {path}"))
            return Place()
        log.info(
            either(
                f"resumes from {path}: epoch {place.epoch}, step {place.step}",
                f"从 {path} 断点续训：第 {place.epoch} 轮，第 {place.step} 步",
            )
        )
        return place

    def run(self, guard: Any) -> None:
        """Train the remaining epochs, each with its own settings."""
        before, seconds = self.place.step_seconds, None
        logging.getLogger("legroom").setLevel(logging.INFO)  # each epoch's block shows what was chosen
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
            speed = ""
            if before is not None:
                times = f"{before / took:.2f}"
                speed = either(f", {times} times the speed of the epoch before", f"，速度为上一轮的 {times} 倍")
            log.info(
                either(
                    f"epoch {epoch}: loss {loss:.4f}, {1000 * took:.0f} ms per step{speed}",
                    f"第 {epoch} 轮 (epoch {epoch}): loss {loss:.4f}，每步 {1000 * took:.0f} ms{speed}",
                )
            )
            log.info(
                either(
                    f"epoch {epoch}: {exact:.1%} of the answers exactly right, BLEU {bleu:.3f}",
                    f"第 {epoch} 轮 (epoch {epoch}): {exact:.1%} 的回答完全正确，BLEU {bleu:.3f}",
                )
            )
            before = took
        if self.place.epoch == self.flags.epochs:
            log.info(either(f"all epochs are done: {self.flags.epochs}", f"全部轮次已完成：{self.flags.epochs}"))
        self._account()

    def _rows(self) -> Streamed | Shared:
        """The rows as the settings have it; an epoch that is resumed is read as it began."""
        flags, ranks = self.flags, (self.accelerator.process_index, self.accelerator.num_processes)
        begun = self.place.low_memory
        if begun is not None and begun != self.settings.low_memory:
            self.settings = because(
                self.settings,
                either("as this epoch began; the next is free", "与本轮开始时相同，下一轮可再选择"),
                low_memory=begun,
            )
        step_rows = flags.batch_size_per_gpu * flags.gradient_accumulation_steps
        rows: Streamed | Shared
        if self.settings.low_memory:
            self.settings = because(
                self.settings, either("the rows are streamed", "数据为流式读取"), num_workers=0, pin_memory=False
            )
            rows = Streamed(flags.train_file, step_rows, flags.seed, *ranks, memory=flags.stream_memory)
        else:
            rows = Shared(flags.train_file, step_rows, flags.seed, *ranks)
        if self.place.rows is not None:
            rows.load(self.place.rows[min(ranks[0], len(self.place.rows) - 1)])
        return rows

    def _epoch(self, epoch: int, rows: Streamed | Shared, guard: Any) -> tuple[float, float, float]:
        """The rest of an epoch: its mean loss, seconds per step, and seconds of computing per batch."""
        done, accelerator, flags = self.place.step, self.accelerator, self.flags
        # Its count of batches would not fit an accumulation that is new.
        accelerator.gradient_accumulation_steps, accelerator.step = self.settings.accumulation, 0
        batches = rows.batches(epoch, done, self.settings, self.collate)
        losses: list[float] = []
        computing, began = 0.0, time.perf_counter()
        for step in range(done, self.steps):
            # Random numbers depend on the step and the rank alone: a resumed run draws the same.
            place = (epoch * self.steps + step) * accelerator.num_processes + accelerator.process_index
            torch.manual_seed((flags.seed << 40) + place)
            # The optimizer makes its states in its first step: the second shows them.
            shown = step == min(done + 1, self.steps - 1)
            loss, seconds = self._step(batches, (guard, epoch, rows) if shown else None)
            losses.append(loss)
            computing += seconds
            if (step + 1) % flags.logging_steps == 0:
                told = f"{step + 1}/{self.steps}"
                log.info(
                    either(
                        f"epoch: {epoch}, step: {told}, loss: {losses[-1]:f}",
                        f"轮次 epoch: {epoch}, 步 step: {told}, loss: {losses[-1]:f}",
                    )
                )
            why = guard.step()
            if step + 1 < self.steps and (why or (step + 1) % flags.save_steps == 0):
                self.checkpoint.save(replace(self.place, epoch=epoch, step=step + 1), rows)
        took = (time.perf_counter() - began) / len(losses)
        mean = torch.tensor(sum(losses) / len(losses), device=accelerator.device)
        loss = accelerator.reduce(mean, "mean").item()
        return loss, took, computing / len(losses) / self.settings.accumulation

    def _step(
        self, batches: Iterator[dict[str, torch.Tensor]], measured: tuple[Any, int, Streamed | Shared] | None
    ) -> tuple[float, float]:
        """One optimizer step: this rank's loss, and the seconds that were not spent waiting for rows.

        ``measured``: the guard, epoch and rows to report host memory for, while gradients and batches are held.
        """
        total = seconds = 0.0
        for _ in range(self.settings.accumulation):
            batch = next(batches)
            began = time.perf_counter()
            with self.accelerator.accumulate(self.model):
                on_device = {name: part.to(self.accelerator.device) for name, part in batch.items()}
                loss = self.model(**on_device).loss
                self.accelerator.backward(loss)
                if measured is not None and self.accelerator.sync_gradients:
                    paused = time.perf_counter()
                    self._report(batch, *measured)
                    began += time.perf_counter() - paused
                self.optimizer.step()
                self.optimizer.zero_grad()
            total += loss.item()
            seconds += time.perf_counter() - began
        self.schedule.step()
        return total / self.settings.accumulation, seconds

    def _report(self, batch: dict[str, torch.Tensor], guard: Any, epoch: int, rows: Streamed | Shared) -> None:
        moment = either(f"in epoch {epoch}", f"第 {epoch} 轮")
        report_memory(guard, moment, self.model, self.optimizer, entry=rows.entry, batch=batch)

    def _account(self) -> None:
        """The size of the optimizer's states beside the weights."""
        weights = sum(one.nbytes for one in self.model.parameters())
        moments = 2 * 4 * sum(one.numel() for one in self.model.parameters())  # in 32 bits, whatever the weights have
        states = (one for state in self.optimizer.state.values() for one in state.values())
        held = sum(one.nbytes for one in states if torch.is_tensor(one))
        own, adam = format_size(held), format_size(moments)
        log.info(
            either(
                f"weights {format_size(weights)}, Adafactor's states {own} (Adam's would be {adam})",
                f"权重 {format_size(weights)}，Adafactor 的状态 {own}（Adam 的状态为 {adam}）",
            )
        )
