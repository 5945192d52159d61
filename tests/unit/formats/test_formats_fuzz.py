"""Damaged files of every format: an error that says so, or the right data; never anything else.

Ten thousand damages of each are in tests/soak/test_soak_formats.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz_damage import Child, Damages
from fuzz_samples import TINY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def children() -> Iterator[dict[str, Child]]:
    made = {mode: Child(mode) for mode in ("ours", "reference")}
    yield made
    for child in made.values():
        child.close()


place = st.integers(0, 1 << 32)  # modulo the length: small numbers would all be at the beginning
damage = st.one_of(
    st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=6),
    place,  # cut there
)


@pytest.mark.skipif(sys.platform == "win32", reason="select needs pipes that Windows does not have")
@pytest.mark.parametrize("sample", TINY, ids=str)
def test_a_damaged_file_is_an_error_or_right(sample: Any, children: dict[str, Child], tmp_path: Path) -> None:
    damages = Damages(sample, tmp_path, children)

    @settings(max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(how=damage)
    def check(how: Any) -> None:
        damages.check(how)

    check()
