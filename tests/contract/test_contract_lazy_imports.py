"""What the library imports at first use, in a process of the user's, is imported under the lock that forks wait for.

A child forked while another thread imports a module inherits that module's lock, held by a thread that it does not
have: its own first import of the module never returns. See legroom.system.lazy_and_optional_imports.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "legroom"
# Commands and their reports, and a trial's own process: no thread of a user's program is there.
OWN_PROCESSES = ("__main__.py", "cli/", "demo/", "report/", "rescue/", "loader/measure/dataloader_trial.py")
LOCKS = {"import_lock", "_holding_forks_back()"}
# The lock's own module; and what has to import it.
THE_LOCK = {"system/lazy_and_optional_imports.py": {"importlib"}, "__init__.py": {"legroom.system.lazy_and_optional_imports"}, "leak/__init__.py": {"legroom.system.lazy_and_optional_imports"}, "formats/__init__.py": {"legroom.system.lazy_and_optional_imports"}}  # fmt: skip


def unguarded(text: str) -> set[str]:
    """Modules of Python's library and of ours that functions there import without the lock."""
    return set(_unguarded(ast.parse(text), inside=False))


def _unguarded(node: ast.AST, *, inside: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.With) and any(ast.unparse(one.context_expr) in LOCKS for one in child.items):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom) and inside:
            names = [one.name for one in child.names] if isinstance(child, ast.Import) else [child.module or ""]
            yield from (name for name in names if name.split(".")[0] in {"legroom", *sys.stdlib_module_names})
        yield from _unguarded(child, inside=inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


# For each module that is named: in a fork, which of the names importing it does not import.
_TRY = """
import json, os, sys
for line in sys.stdin:
    module, names = json.loads(line)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        __import__(module)
        print(json.dumps([module, [name for name in names if name not in sys.modules]]), flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, module
"""


def _not_yet_imported(asked: dict[str, set[str]]) -> dict[str, list[str]]:
    """By module: those names that importing it alone does not import."""
    lines = "".join(json.dumps([module, sorted(names)]) + "\n" for module, names in asked.items())
    ran = subprocess.run([sys.executable, "-c", _TRY], input=lines, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(line) for line in ran.stdout.splitlines())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import ssl", set()),
        ("def f():\n    import ssl", {"ssl"}),
        ("def f():\n    from legroom.units import format_size", {"legroom.units"}),
        ("def f():\n    with import_lock:\n        import ssl", set()),
        ("def f():\n    import torch", set()),  # a fork does not wait for other packages
        ("class A:\n    def f(self):\n        if a:\n            import ssl", {"ssl"}),
    ],
)
def test_what_counts(text: str, expected: set[str]) -> None:
    assert unguarded(text) == expected


def test_every_first_import_in_a_users_process_holds_forks_back() -> None:
    asked = {}
    for path in sorted(SOURCES.rglob("*.py")):
        name = str(path.relative_to(SOURCES))
        names = unguarded(path.read_text(encoding="utf-8")) - THE_LOCK.get(name, set()) - set(sys.builtin_module_names)
        if names and not name.startswith(OWN_PROCESSES):
            asked["legroom." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")] = names
    assert {module: names for module, names in _not_yet_imported(asked).items() if names} == {}
