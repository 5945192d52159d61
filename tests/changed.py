"""Run the tests that reach what changed since main, nearest first: `make check`.

A test file is nearer the fewer imports lie between it and a changed module, read from the source text of both. Changed
test files come first. Tests that have not begun after SECONDS are skipped, and the run says how many.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
SECONDS = 55.0  # with lint before it, `make check` stays within 90 s on two cores
END = "LEGROOM_CHECK_END"  # the variable that holds the monotonic time after which no test begins


def module_of(path: Path) -> str:
    """The name by which other files import this one; a test's helpers are imported by their file names."""
    if path.is_relative_to("src"):
        parts = path.relative_to("src").with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return path.stem


def imports_of(text: str, known: Iterable[str]) -> Iterator[str]:
    """The known modules that this source names: by import statements, or in a string for an import at first use.

    "legroom.cli." + name, also as an f-string, stands for every module of that package.
    """
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name for name in inner if name in known] or [node.module]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
            if node.value.endswith(".") and node.value[:-1] in known:
                names = [name for name in known if name.rpartition(".")[0] == node.value[:-1]]
        for name in names:
            if name in known or (name := name.rpartition(".")[2]) in known:
                yield name


def nearest(sources: dict[Path, str], changed: set[Path]) -> list[Path]:
    """The test files that reach a changed file, nearest first."""
    modules = {module_of(path): path for path in sources}
    importers: dict[Path, set[Path]] = {path: set() for path in sources}
    for path, text in sources.items():
        for name in imports_of(text, modules):
            importers[modules[name]].add(path)
    distance = dict.fromkeys(sorted(changed & set(sources)), 0)
    queue = deque(distance)
    while queue:
        path = queue.popleft()
        for importer in sorted(importers[path] - set(distance)):
            distance[importer] = distance[path] + 1
            queue.append(importer)
    return [path for path in distance if path.name.startswith("test_") and path.name.endswith(".py")]


def changed_files() -> set[Path]:
    """Files that differ from where this branch left main, committed or not."""

    def lines(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    (base,) = lines("merge-base", "main", "HEAD")
    return {Path(name) for name in lines("diff", "--name-only", base) + lines("ls-files", "-o", "--exclude-standard")}


def pytest_collection_modifyitems(config: object, items: list[object]) -> None:
    """In pytest: the order of the files on the command line (this plugin is loaded before tests/conftest.py)."""
    order = {(REPO / name).resolve(): place for place, name in enumerate(config.args)}  # type: ignore[attr-defined]
    items.sort(key=lambda item: order.get(item.path, len(order)))  # type: ignore[attr-defined]


def pytest_runtest_setup(item: object) -> None:
    import pytest

    if time.monotonic() > float(os.environ.get(END, "inf")):
        pytest.skip(f"`make check` begins no test after {SECONDS:.0f} s")


def main(arguments: list[str]) -> int:
    changed = changed_files()
    folders = [REPO / "src", REPO / "tests"]
    paths = [path.relative_to(REPO) for folder in folders for path in folder.rglob("*.py")]
    sources = {path: (REPO / path).read_text(encoding="utf-8") for path in paths}
    tests = [str(path) for path in nearest(sources, changed) if path.parts[1] in ("unit", "contract")]
    print(f"{len(changed)} files changed since main, {len(tests)} test files reach them", flush=True)
    if not tests:
        return 0
    os.environ[END] = str(time.monotonic() + SECONDS)
    command = [sys.executable, "-m", "pytest", "-m", "not soak", "-p", "changed", "--no-loadscope-reorder"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO / "tests"), os.environ.get("PYTHONPATH", "")])}
    return subprocess.call([*command, *arguments, *tests], cwd=REPO, env=environment)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
