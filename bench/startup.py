"""What `legroom --help` and `legroom doctor` cost over a bare interpreter, side by side.

    python bench/startup.py [--rounds 15] [--results FOLDER]

Contenders alternate, the best of many counts: start-up only ever gets slower by noise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from measure import RESULTS, Row, alternate, as_json, best, in_words, machine, save, show, spreads, timed

BARE = "python -c pass"
# An installed package has bytecode. Where an image forbids writing it, every start would compile our files again.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
# What is started, and by how many milliseconds it may be slower than a bare interpreter.
CONTENDERS: dict[str, tuple[list[str], float | None]] = {
    BARE: (["-c", "pass"], None),
    "python -c 'import click'": (["-c", "import click"], None),
    "legroom --help": (["-m", "legroom", "--help"], 45),
    "legroom doctor": (["-m", "legroom", "doctor"], 300),
    "legroom doctor --json": (["-m", "legroom", "doctor", "--json"], 300),
}


def started(arguments: list[str]) -> float:
    """Seconds until that has been and gone; doctor's status is an answer, so any will do."""
    command = [sys.executable, *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return timed(lambda: subprocess.run(command, check=False, env=ENVIRONMENT, **quiet))  # type: ignore[call-overload]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    where = machine("click", "psutil")
    print(in_words(where))
    contenders = {name: partial(started, arguments) for name, (arguments, _) in CONTENDERS.items()}
    alternate(contenders, 1)  # files and bytecode into the page cache
    figures = alternate(contenders, options.rounds)
    least = best(figures)
    rows = [
        Row(f"{name}, over bare", 1000 * (seconds - least[BARE]), "ms", CONTENDERS[name][1],
            note=f"{1000 * seconds:.0f} : {1000 * least[BARE]:.0f} ms")
        for name, seconds in least.items()
        if name != BARE
    ]  # fmt: skip
    print(show(rows))
    kept = {"machine": where, "rounds": options.rounds, "rows": as_json(rows), "seconds": spreads(figures)}
    print(f"kept in {save('startup', kept, options.results)}")


if __name__ == "__main__":
    main()
