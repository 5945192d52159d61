"""An example's scripts as modules, for tests that call their ``main`` in this process instead of starting torch anew."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def modules(example: str) -> Iterator[dict[str, ModuleType]]:
    """Every script of the example by its name. They are forgotten afterwards: other examples use the same names."""
    folder = EXAMPLES / example
    names = [path.stem for path in sorted(folder.glob("*.py"))]
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
