"""How the plan and the outcome of many experiments read.

Covers: text. Does not cover: planning, running or measuring (run_experiments.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from legroom.messages import either
from legroom.records.workload import Plan
from legroom.units import format_duration, format_size


@dataclass(frozen=True)
class Row:
    """One experiment."""

    number: int
    card: int
    rate: float
    seed: int
    opened: float  # seconds until it had the data
    held: int  # bytes of RAM by PSS: what several processes share is divided among them
    accuracy: float


@dataclass(frozen=True)
class Outcome:
    """All of them, measured at one moment."""

    rows: list[Row]
    data_bytes: int
    backing: str  # shm, disk, or memory: each process has a copy of its own

    @property
    def held(self) -> int:
        return sum(row.held for row in self.rows)


def plan_text(plan: Plan, jobs: int) -> str:
    """What the plan says, and what is done about it."""
    asked = plan.jobs_per_gpu
    advice = [*(problem.message for problem in plan.problems), *plan.fix] if plan.problems else []
    size = plan.sizes.recommended
    shm, ram, best = (format_size(part) for part in (plan.need.shm, plan.need.ram, size))
    if size >= plan.need.shm:
        enough = either(f"{best} recommended", f"建议 {best}")
    else:
        enough = either("more than memory allows", "超过内存允许的大小")
    fits = plan.fits_now
    return "\n".join(
        [
            either(
                f"plan: {plan.gpus} GPU x {asked} jobs, measured on one running experiment",
                f"计划：{plan.gpus} 张显卡 x {asked} 个任务，按一个正在运行的实验测得",
            ),
            either(f"  /dev/shm  {shm} needed, {enough}", f"  /dev/shm  需要 {shm}，{enough}"),
            either(f"  RAM       {ram} needed in total, /dev/shm included", f"  内存      共需要 {ram}"),
            *(f"  {sentence}" for sentence in advice),
            either(
                f"  fits here: {'all jobs' if fits is None else f'{fits} jobs per GPU'}; running {plan.gpus} x {jobs}",
                f"  本机可容纳：{'全部任务' if fits is None else f'每张显卡 {fits} 个任务'}；运行 {plan.gpus} x {jobs}",
            ),
        ]
    )


def outcome_text(outcome: Outcome) -> str:
    """A line for each experiment, then all of them together."""
    lines = [
        "",
        either(
            "  #  GPU      lr  seed   has data after  RAM (PSS)  accuracy",
            "  #  GPU      lr  seed     数据可用时间  RAM (PSS)    准确率",
        ),
    ]
    for row in outcome.rows:
        lines.append(
            f"{row.number:>3}  {row.card:>3}  {row.rate:>6g}  {row.seed:>4}  {format_duration(row.opened):>15}  "
            f"{format_size(row.held):>9}  {row.accuracy:>7.0%}"
        )
    count, data = len(outcome.rows), format_size(outcome.data_bytes)
    where = {
        "shm": either(f"one copy of {data} of data in /dev/shm", f" /dev/shm 中有一份 {data} 的数据"),
        "disk": either(
            f"one copy of {data} of data on disk, in the page cache", f"磁盘上有一份 {data} 的数据，经页缓存共享"
        ),
        "memory": either(f"{count} copies of {data} of data", f"有 {count} 份 {data} 的数据"),
    }[outcome.backing]
    held = format_size(outcome.held)
    lines += ["", either(f"together {held} of RAM, with {where}", f"合计内存 {held}，其中{where}")]
    if outcome.backing != "memory":
        apart = format_size(outcome.held + (count - 1) * outcome.data_bytes)
        lines.append(
            either(
                f"with a copy each it would be {count - 1} x {data} more: {apart}",
                f"各用一份时还要多 {count - 1} x {data}：共 {apart}",
            )
        )
    return "\n".join(lines)
