"""What `legroom --help` and `legroom doctor` cost over a bare interpreter, side by side.

    python bench/startup.py [--json]

Contenders alternate, the best of many counts: start-up only ever gets slower by noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time

ROUNDS = 15
CONTENDERS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "python -c 'import click'": [sys.executable, "-c", "import click"],
    "legroom --help": [sys.executable, "-m", "legroom", "--help"],
    "legroom doctor": [sys.executable, "-m", "legroom", "doctor"],
    "legroom doctor --json": [sys.executable, "-m", "legroom", "doctor", "--json"],
}


def _once(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - started


def measure() -> dict[str, float]:
    """The best time of each contender in seconds."""
    best = {name: _once(command) for name, command in CONTENDERS.items()}  # the first warms the caches
    for _ in range(ROUNDS):
        for name, command in CONTENDERS.items():
            best[name] = min(best[name], _once(command))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    wants_json = parser.parse_args().json
    best = measure()
    bare = best["python -c pass"]
    machine = f"{os.cpu_count()} CPUs, Linux {platform.release()}, Python {platform.python_version()}"
    rows = {
        name: {"ms": 1000 * seconds, "over_bare_ms": 1000 * (seconds - bare), "times_bare": seconds / bare}
        for name, seconds in best.items()
    }
    if wants_json:
        print(
            json.dumps(
                {"schema": "legroom.bench.startup/1", "machine": machine, "rounds": ROUNDS, "rows": rows}
            )
        )
        return
    print(machine)
    print(f"{'':<28}{'ms':>8}{'over bare':>12}{'times bare':>12}")
    for name, row in rows.items():
        print(f"{name:<28}{row['ms']:>8.1f}{row['over_bare_ms']:>12.1f}{row['times_bare']:>12.1f}")


if __name__ == "__main__":
    main()
