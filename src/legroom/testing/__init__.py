"""The tests that every data format of Legroom passes, for readers in other packages too. Needs pytest.

format_contract    FormatContract, to subclass in a test file, and FormatSample: how to write a file, and what it holds

    class TestPoints(FormatContract):
        samples = [FormatSample("points", "points", write_points, read_points)]
"""

from __future__ import annotations

try:
    import pytest
except ModuleNotFoundError as problem:
    if problem.name != "pytest":
        raise
    raise ModuleNotFoundError(
        "legroom.testing needs pytest, which is not installed: pip install pytest", name="pytest"
    ) from problem

# Before it is imported: pytest shows the values in a failed assertion only of modules that it has rewritten, and
# rewrites none of an installed package by itself.
pytest.register_assert_rewrite("legroom.testing.format_contract")

from legroom.testing.format_contract import Arrays, FormatContract, FormatSample  # noqa: E402

__all__ = ["Arrays", "FormatContract", "FormatSample"]
