"""Pictures of kept results: drawn from bench/results/*.json alone, nothing is measured here.

    python bench/plots.py [--results DIR]        needs matplotlib

peers.png   attach time, memory by number of processes, gather rate, and what a killed loader leaves; one line a
            contender, in the same order in every panel.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from measure import RESULTS, number

OURS, OTHERS, FAINT = "#0b6e4f", "#8a8f98", "#d5d8dc"


def peers(result: dict[str, Any]) -> Any:
    """The four questions asked of every way to share data."""
    import matplotlib.pyplot as plt

    found = {name: one for name, one in result["peers"].items() if "summary" in one}
    absent = [name for name in result["peers"] if name not in found]
    titles = [_title(one) for one in found.values()]
    about = [one["summary"] for one in found.values()]
    colours = [OURS if name == "legroom" else OTHERS for name in found]
    figure, panels = plt.subplots(
        1, 4, figsize=(15, 0.62 * len(found) + 2.0), sharey=True, gridspec_kw={"width_ratios": [1, 1.5, 1, 1.15]}
    )
    lines = range(len(found))
    _attach(panels[0], about, colours)
    _memory(panels[1], about, colours, result["megabytes"])
    _gather(panels[2], about, colours)
    _killed(panels[3], about)
    panels[0].set_yticks(lines, titles)
    panels[0].set_ylim(len(found) - 0.5, -0.5)
    for panel in panels:
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    for label, name in zip(panels[0].get_yticklabels(), found, strict=True):
        label.set_fontweight("bold" if name == "legroom" else "normal")
    figure.suptitle(
        f"Ways to give several processes the same {result['megabytes']:.0f} MB", x=0.01, ha="left", weight="bold"
    )
    figure.text(0.01, 0.01, _footnote(result, absent), fontsize=8, color="#555555", va="bottom")
    figure.tight_layout(rect=(0, 0.07, 1, 1), w_pad=2.5)
    return figure


def _attach(panel: Any, about: list[dict[str, Any]], colours: list[str]) -> None:
    values = [one["attach_ms"] for one in about]
    panel.scatter(values, range(len(values)), color=colours, s=45)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_xlim(min(values) / 2, max(values) * 6)
    for line, value in enumerate(values):
        panel.annotate(number(value), (value, line), (8, 0), textcoords="offset points", va="center", fontsize=9)
    panel.set_title("Another process attaches:\nms until its first row (log)", fontsize=10, loc="left")


def _memory(panel: Any, about: list[dict[str, Any]], colours: list[str], megabytes: float) -> None:
    """A line from one process to the most; flat is shared."""
    counts = sorted(about[0]["memory"], key=int)
    least, most = 1e9, 0.0
    for line, (one, colour) in enumerate(zip(about, colours, strict=True)):
        values = [max(1.0, one["memory"][count]["beyond_bare_mb"]) for count in counts]
        least, most = min(least, *values), max(most, *values)
        spots = [line - 0.24 + 0.24 * at * 2 / max(1, len(counts) - 1) for at in range(len(counts))]
        panel.plot(values, spots, color=FAINT, lw=1.2, zorder=1)
        panel.scatter(values, spots, color=colour, s=22, zorder=2)
        for count, value, spot in zip(counts, values, spots, strict=True):
            panel.annotate(
                f"{count}: {number(value)}",
                (value, spot),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                # the line to the next spot passes behind the label
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )
    panel.axvline(megabytes, color=OURS, lw=0.8, ls=":", zorder=0)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("")
    panel.set_xlim(least / 1.5, most * 3)
    asked = ", ".join(counts[:-1]) + f" and {counts[-1]}" if len(counts) > 1 else counts[0]
    title = f"Memory of {asked} processes and daemons beyond\nbare interpreters: MB of PSS (log); dotted: one copy"
    panel.set_title(title, fontsize=10, loc="left")


def _gather(panel: Any, about: list[dict[str, Any]], colours: list[str]) -> None:
    """The library's own indexing as a bar; np.take into a reused buffer, where it hands out a view, as a tick."""
    own = [one["gather_gb_s"]["own"] for one in about]
    take = [one["gather_gb_s"]["take"] for one in about]
    panel.barh(range(len(own)), own, color=colours, height=0.55)
    most = max([*own, *(value for value in take if value)])
    for line, (value, other) in enumerate(zip(own, take, strict=True)):
        text = number(value) if other is None else f"{number(value)} | {number(other)}"
        if other is not None:
            panel.plot([other, other], [line - 0.38, line + 0.38], color="black", lw=1.4)
        panel.text(max(value, other or 0) + most * 0.03, line, text, va="center", fontsize=9)
    panel.set_xlim(0, most * 1.6)
    panel.set_title(
        "Random batches of 64 × 196 kB, GB/s\nbar: own indexing | tick: np.take(out=)", fontsize=10, loc="left"
    )


def _killed(panel: Any, about: list[dict[str, Any]]) -> None:
    for line, one in enumerate(about):
        killed = one["killed"]
        if not killed["kills"]:
            panel.text(0, line, "not measured", va="center", fontsize=9)
            continue
        good = killed["others_finished"] == killed["kills"]
        left = f"{number(killed['left_mb'])} MB left" if killed["left_mb"] >= 1 else "nothing left"
        if killed["left_mb"] >= 1 and killed["left_tidied_mb"] < 1:
            left += " until tidied"
        words = {
            "the library": "the library elects one loader",
            "a lock in user code": "one loader by a lock of the user's",
        }
        elects = words.get(one["elects"], "each process loads")
        text = f"{killed['others_finished']} of {killed['kills']} survived, {left}\n{elects}"
        panel.text(
            0,
            line,
            text,
            va="center",
            fontsize=9,
            color="black" if good and killed["left_tidied_mb"] < 1 else "#b00020",
        )
    panel.set_xlim(0, 1)
    panel.set_xticks([])
    panel.spines["bottom"].set_visible(False)
    panel.set_title("The loader is killed (SIGKILL) while\ntwo others want the data", fontsize=10, loc="left")


def _title(one: dict[str, Any]) -> str:
    return f"{one['title']} {one['version']}" if one.get("version") else str(one["title"])


def _footnote(result: dict[str, Any], absent: list[str]) -> str:
    where = result["machine"]
    text = f"{where['cpus']} × {where['cpu']}, {where['system']}, {where['when'][:10]}"
    if where["load"] > 0.5:
        text += f"; the machine was not quiet (load {where['load']:.1f})"
    if absent:
        text += f"; without figures: {', '.join(absent)}"
    return text


PICTURES = {"peers": peers}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--results", type=Path, default=RESULTS)
    folder = options.parse_args().results
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no picture is drawn", file=sys.stderr)
        return 1
    matplotlib.use("Agg")
    for name, draw in PICTURES.items():
        source = folder / f"{name}.json"
        if source.exists() and any("summary" in one for one in json.loads(source.read_text())["peers"].values()):
            draw(json.loads(source.read_text())).savefig(folder / f"{name}.png", dpi=130)
            print(f"drawn: {folder / f'{name}.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
