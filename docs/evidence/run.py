"""Runs the experiments behind the claims, keeps what they showed, and puts it into their pages.

    run.py [NAME …]   measure all of them, or those named; results.json keeps the outcome
    run.py --write    put results.json into the pages and the index; measures nothing
    run.py --check    status 1 where a page does not show what results.json holds; measures nothing

Covers: the list of experiments and what each needs. Does not cover: any claim; those are one script each.

An outcome that was shown is not replaced by one that cannot be shown: a result from a machine with CUDA
survives a run on one without.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
BEGIN, END = "<!-- result:begin -->", "<!-- result:end -->"
CLAIM = "**Claim.** "
LIMIT_S = 240  # one that takes longer hangs; on a busy machine importing torch alone may take half a minute

# Page and script share the name (hyphens in the page's); the rigs of tests/rigs.py that each needs.
EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "sharing_strategies": ("mount",),
    "fallocate_or_sigbus": ("mount",),
    "loader_peak": ("mount",),
    "rss_shmem": ("mount",),
    "pin_memory": (),
    "tmpfs_and_cgroup": ("mount", "cgroup"),
    "exit_137": ("cgroup",),
    "bus_error_is_not_the_oom_killer": ("mount", "cgroup"),
    "sysv_limits": ("mount",),
    "remount_not_mount_a": ("mount",),
    "psutil_and_cgroups": ("cgroup",),
    "swap_is_slow_when_it_moves": ("cgroup", "swap"),
    "workers_and_start_methods": (),
    "parquet_memory": (),
    "copy_on_write": (),
    "sum_keeps_graphs": (),
    "list_keeps_batches": (),
}


def machine() -> dict[str, str | None]:
    """What a result depends on."""
    cgroups = Path("/sys/fs/cgroup")
    version = "v2" if (cgroups / "cgroup.controllers").exists() else "v1" if cgroups.exists() else None
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    return {
        "kernel": f"{platform.system()} {platform.release()}",
        "cgroup": version,
        "python": platform.python_version(),
        "torch": torch,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def measure(name: str) -> dict[str, Any]:
    """Run one experiment: what it printed, whether its claim holds, where and when."""
    own = ("COVERAGE_", "COV_CORE_")  # a traced child would be slow and would measure the tracer
    env = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    start = time.monotonic()
    command = [sys.executable, "-B", str(HERE / f"{name}.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=HERE
    ) as child:
        try:
            out, err = child.communicate(timeout=LIMIT_S)
        except BaseException:
            child.terminate()  # it removes its cgroups, mounts and swap, then ends
            try:
                out, err = child.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()
                raise
    lines = out.rstrip().splitlines()
    holds, reason = outcome(lines[-1] if lines else "", child.returncode)
    if holds == "failed":
        reason = (err.strip().splitlines() or [reason])[-1]
    seconds = round(time.monotonic() - start, 1)
    return {"holds": holds, "reason": reason, "lines": lines[:-1], "seconds": seconds, "machine": machine()}


def outcome(last: str, status: int) -> tuple[str, str]:
    """``holds: no (why)`` → ("no", "why"); anything else is a failed experiment, not an answer."""
    words, _, reason = last.removeprefix("holds: ").partition(" (")
    if last.startswith("holds: ") and (words, status) in (("yes", 0), ("no", 1), ("not shown here", 0)):
        return words, reason.removesuffix(")")
    return "failed", f"it ended with status {status}"


def load() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def measure_all(names: list[str]) -> int:
    """Measure, print a summary, keep the results; status 1 where something does not hold."""
    results, status = load(), 0
    for name in names:
        found = measure(name)
        why = f" ({found['reason']})" if found["reason"] else ""
        print(f"{name:34} {found['seconds']:5.1f} s  holds: {found['holds']}{why}", flush=True)
        if found["holds"] in ("no", "failed"):
            status = 1
        known = results.get(name, {}).get("holds")
        if found["holds"] == "not shown here" and known in ("yes", "no"):
            print(f"{'':34} kept: {known}, {results[name]['machine']['date']}")
        elif found["holds"] != "failed":
            results[name] = found
    results = {name: results[name] for name in EXPERIMENTS if name in results}
    RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if stale := stale_pages():
        print(f"{len(stale)} pages show older results: run.py --write puts these in")
    return status


def page(name: str) -> Path:
    return HERE / f"{name.replace('_', '-')}.md"


def block(found: dict[str, Any] | None) -> str:
    """A page's result, as Markdown."""
    if found is None:
        return "Not measured yet."
    there = found["machine"]
    where = [there["kernel"], f"cgroup {there['cgroup']}" if there["cgroup"] else "no cgroups"]
    where += [f"Python {there['python']}", f"torch {there['torch']}" if there["torch"] else "no torch"]
    why = f" ({found['reason']})" if found["reason"] else ""
    text = "\n".join(found["lines"]).strip()
    return f"Holds: **{found['holds']}**{why}. Measured {there['date']} on {', '.join(where)}.\n\n```text\n{text}\n```"


def index(results: dict[str, Any]) -> str:
    """The table of all claims."""
    rows = ["| page | claim | holds | measured |", "| --- | --- | --- | --- |"]
    for name in EXPERIMENTS:
        lines = page(name).read_text(encoding="utf-8").splitlines()
        title = lines[0].removeprefix("# ")
        claim = next(line for line in lines if line.startswith(CLAIM)).removeprefix(CLAIM)
        found = results.get(name)
        holds, date = (found["holds"], found["machine"]["date"]) if found else ("not measured yet", "")
        rows.append(f"| [{title}]({page(name).name}) | {claim} | {holds} | {date} |")
    return "\n".join(rows)


def rendered() -> dict[Path, str]:
    """Every page as results.json would have it."""
    results = load()
    blocks = {page(name): block(results.get(name)) for name in EXPERIMENTS}
    blocks[HERE / "index.md"] = index(results)
    pages = {}
    for path, text in blocks.items():
        head, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        _, end, tail = rest.partition(END)
        if not (begin and end):
            raise SystemExit(f"{path.name} has no {BEGIN} … {END}")
        pages[path] = f"{head}{BEGIN}\n{text}\n{END}{tail}"
    return pages


def stale_pages() -> list[str]:
    return [path.name for path, text in rendered().items() if path.read_text(encoding="utf-8") != text]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--write", action="store_true", help="put results.json into the pages")
    parser.add_argument("--check", action="store_true", help="status 1 where a page differs from results.json")
    asked = parser.parse_args()
    names = [name.replace("-", "_").removesuffix(".py") for name in asked.names]
    if unknown := sorted(set(names) - set(EXPERIMENTS)):
        parser.error(f"no such experiment: {', '.join(unknown)}")
    if asked.write:
        for path, text in rendered().items():
            path.write_text(text, encoding="utf-8")
        return 0
    if asked.check:
        for name in (stale := stale_pages()):
            print(f"{name} does not show what results.json holds: run.py --write")
        return 1 if stale else 0
    return measure_all(names or list(EXPERIMENTS))


if __name__ == "__main__":
    raise SystemExit(main())
