"""Print the public names of a source tree, one per line, or what another tree has and this one lacks.

python tests/release/public_names.py                  the names of this tree
python tests/release/public_names.py --against TREE   names that TREE has and this tree does not have; status 1 if any

Names: documented Python names with arguments, and fields of documented records; options of every command; fields of
JSON outputs; error, finding and verdict codes; environment variables; files and manifest fields of a cache entry.
Everything is found by importing and running the tree, not from a list.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

REPO = Path(__file__).parents[2]
# Commands whose JSON is read. Each runs in a folder with `data.npy` and `crash.log`, with stores of its own.
OUTPUTS = {
    "doctor": "doctor",
    "plan": "plan --gpus 1 --per-gpu 2 --workers 2 --sample-bytes 1MB --batch 4",
    "check": "check --workers 2 --sample-bytes 1MB --batch 4",
    "explain": "explain crash.log",
    "run": "run -- sleep 3",
    "watch": "watch --once",
    "cache.load": "cache load data.npy",
    "cache.list": "cache list",
    "cache.info": "cache info data.npy",
    "cache.verify": "cache verify",
    "cache.drop": "cache drop --all",
    "cache.gc": "cache gc",
    "error": "cache info absent.npy",
}


def python_names(docs: Path) -> Iterator[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((docs / "reference").glob("*.md")))
    for block in re.split(r"^::: ", text, flags=re.M)[1:]:
        path = block.split(None, 1)[0]
        heading = re.search(r"heading: (\S+)", block)
        members = re.search(r"^ +members: \[(.*?)\]", block, re.M)
        listed = members[1].split(", ") if members else []
        try:
            found: Any = import_module(path)
        except ImportError:
            module, _, name = path.rpartition(".")
            found = getattr(import_module(module), name)
        if inspect.ismodule(found):
            defined = [name for name, one in vars(found).items() if getattr(one, "__module__", None) == path]
            for name in listed or [name for name in defined if not name.startswith("_")]:
                if name in vars(found):
                    yield from _described(name, getattr(found, name))
        else:
            name = heading[1] if heading else path.rpartition(".")[2]
            yield from _described(name, found)
            yield from (f"{name}.{member}" for member in listed)
    for package in ("legroom", "legroom.gpu", "legroom.leak"):
        try:
            yield from (f"{package}.{name}" for name in getattr(import_module(package), "__all__", ()))
        except ImportError:
            pass  # a tree that does not have it yet


def _described(name: str, found: Any) -> Iterator[str]:
    if not (inspect.isfunction(found) or inspect.isclass(found)) or not found.__module__.startswith("legroom"):
        return
    yield name
    if dataclasses.is_dataclass(found):
        yield from (f"{name}.{one.name}" for one in dataclasses.fields(found) if not one.name.startswith("_"))
    elif inspect.isfunction(found):
        yield from (f"{name}({argument}=)" for argument in inspect.signature(found).parameters)


def options() -> Iterator[str]:
    import click

    main = import_module("legroom.cli.main")

    def below(command: click.Command, words: str) -> Iterator[str]:
        for param in command.params:
            yield from (f"{words} {spelling}" for spelling in (*param.opts, *param.secondary_opts))
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                if child is not None:
                    yield f"{words} {name}"
                    yield from below(child, f"{words} {name}")

    return below(main.cli, "legroom")


def json_fields(folder: Path) -> Iterator[str]:
    import numpy as np

    np.save(folder / "data.npy", np.zeros((64, 8), np.float32))
    (folder / "crash.log").write_text("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.\n")
    environment = os.environ | {
        "LEGROOM_DIR": str(folder / "disk"), "LEGROOM_SHM": str(folder / "shm"), "XDG_STATE_HOME": str(folder),
        "LEGROOM_LANG": "en",
    }  # fmt: skip
    for name in ("disk", "shm"):
        (folder / name).mkdir()
    for output, line in OUTPUTS.items():
        head, dash, rest = line.partition(" -- ")
        command = [sys.executable, "-m", "legroom", *head.split(), "--json", *(["--", *rest.split()] if dash else [])]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        for text in done.stdout.splitlines()[:1]:
            yield from sorted({f"{output}: {field}" for field in _fields(json.loads(text))})
        if output == "cache.load":
            yield from (f"cache entry: {one}" for one in _entry_files(folder))


def _fields(value: Any, above: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            # Names that the machine gives (GPUs, variables, the pools that were read) are not fields.
            by_name = above.endswith(("levels.", "peaks.")) or not re.fullmatch(r"[a-z][a-z0-9_]*", name)
            shown = "*" if by_name else name
            yield f"{above}{shown}"
            yield from _fields(inner, f"{above}{shown}.")
    elif isinstance(value, list):
        for inner in value:
            yield from _fields(inner, f"{above}[].")


def _entry_files(folder: Path) -> Iterator[str]:
    for manifest in folder.glob("*/legroom-*/*/manifest.json"):
        for path in sorted(manifest.parent.iterdir()):
            yield f"{manifest.parent.name}/{path.name} {path.stat().st_mode & 0o777:o}"
        text = manifest.read_text(encoding="utf-8")
        yield from sorted({f"manifest {field}" for field in _fields(json.loads(text))})


def codes(source: Path) -> Iterator[str]:
    errors = import_module("legroom.errors")
    for found in vars(errors).values():
        if inspect.isclass(found) and issubclass(found, errors.LegroomError):
            yield f"error {found.code} exit {found.exit_status}"
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Finding", "Problem", "Lever"):
                words = [*node.args[:2], *(word.value for word in node.keywords if word.arg in ("code", "id"))]
                for word in words:
                    if isinstance(word, ast.Constant) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", str(word.value)):
                        yield f"{node.func.id.lower()} {word.value}"  # type: ignore[attr-defined]
    failure = import_module("legroom.records.failure")
    for alternative in get_args(failure.Cause):
        yield from (f"verdict {name}" for name in get_args(alternative) or [alternative])


def variables(source: Path) -> Iterator[str]:
    for path in sorted(source.rglob("*.py")):
        yield from re.findall(r"\bLEGROOM_[A-Z_]+\b", path.read_text(encoding="utf-8"))


def listed(tree: Path) -> None:
    """Print the names of the tree that this process imports from."""
    import legroom

    source = Path(legroom.__file__).parent
    assert source == tree / "src" / "legroom", source
    found = {f"python {name}" for name in python_names(tree / "docs")}
    found |= {f"option {name}" for name in options()}
    found |= set(codes(source)) | {f"variable {name}" for name in variables(source)}
    with tempfile.TemporaryDirectory(prefix="public-names-") as folder:
        found |= {f"json {name}" for name in json_fields(Path(folder))}
    print("\n".join(sorted(found)))


def names_of(tree: Path) -> list[str]:
    """The names of a tree, by a process that imports it."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    command = [sys.executable, __file__, "--list", str(tree)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> int:
    if sys.argv[1:2] == ["--list"]:
        listed(Path(sys.argv[2]).resolve())
        return 0
    here = names_of(REPO)
    if sys.argv[1:2] != ["--against"]:
        print("\n".join(here))
        return 0
    gone = sorted(set(names_of(Path(sys.argv[2]).resolve())) - set(here))
    print("\n".join([*gone, f"{len(here)} names, {len(gone)} gone"]))
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
