"""From a trial's raw answers to the figures that are shown.

Covers: joining rounds, the figures, the text table. Does not cover: measuring (trial.py), drawing (plots.py).
"""

from __future__ import annotations

from typing import Any

from measure import number, table


def merge(first: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Two rounds of one contender: all attaches, the better rates."""
    if "attach" not in first or "attach" not in later:
        return first
    rates = [one["gather"] for one in (first, later)]
    gather = {way: max((rate[way] for rate in rates if rate[way]), default=None) for way in ("own", "take")}
    return {**first, "attach": first["attach"] + later["attach"], "gather": gather}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """The figures that the table and the plot show."""
    attach = min(found["attach"], key=lambda one: one["connect_ms"] + one["attach_ms"])
    memory = {}
    for count, weights in found["memory"].items():
        total = weights["clients"]["pss"] + weights["daemons"]["pss"]
        tables = sum(weights[who]["page_tables"] for who in ("clients", "daemons")) - weights["bare"]["page_tables"]
        memory[count] = {
            "total_mb": total / 1e6,
            "bare_mb": weights["bare"]["pss"] / 1e6,
            "beyond_bare_mb": (total - weights["bare"]["pss"]) / 1e6,
            "daemons_mb": weights["daemons"]["pss"] / 1e6,
            "page_tables_mb": tables / 1e6,
        }
    kills = [one for one in found["kills"] if not one["late"]]
    return {
        "attach_ms": attach["connect_ms"] + attach["attach_ms"],
        "of_which_connect_ms": attach["connect_ms"],
        "elects": found["elects"],
        "load_ms": found["load_ms"],
        "memory": memory,
        "gather_gb_s": found["gather"],
        "killed": {
            "kills": len(kills),
            "others_finished": sum(not one["problems"] for one in kills),
            "loads_each": max((one["loads"] for one in kills), default=None),
            "left_mb": max((max(0, one["left"]) / 1e6 for one in kills), default=None),
            "left_tidied_mb": max((max(0, one["left_tidied"]) / 1e6 for one in kills), default=None),
            "problems": sorted({problem for one in kills for problem in one["problems"]}),
        },
    }


def show(results: dict[str, dict[str, Any]], counts: list[str]) -> str:
    """The table; what has no figures says why."""
    head = ["", "attach ms", "(connect)", *(f"MB for {n}" for n in counts), f"bare {counts[-1]}", "GB/s own", "take"]
    head += ["killed: others finish", "left MB", "tidied", "one loader by"]
    cells, reasons = [], []
    for name, found in results.items():
        about = found.get("summary")
        if about is None:
            reasons.append(f"{found.get('title', name)}: {found.get('missing') or found.get('failed')}")
            continue
        memory, killed, rate = about["memory"], about["killed"], about["gather_gb_s"]
        figures = [about["attach_ms"], about["of_which_connect_ms"]]
        figures += [memory[count]["beyond_bare_mb"] for count in counts] + [memory[counts[-1]]["bare_mb"]]
        figures += [rate["own"], rate["take"]]
        line = [found["title"], *("-" if one is None else number(one) for one in figures)]
        line.append(f"{killed['others_finished']} of {killed['kills']}")
        line += ["-" if killed[one] is None else f"{killed[one]:.0f}" for one in ("left_mb", "left_tidied_mb")]
        cells.append([*line, about["elects"]])
    return "\n".join([table(head, cells, right=range(1, len(head) - 1)), *reasons]) if cells else "\n".join(reasons)
