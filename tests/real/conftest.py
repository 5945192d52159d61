"""Which real tests must have the machine to themselves.

Whatever needs a swap file is marked ``alone``: every process of the machine swaps to it while it is on. Tests that are
alone for a reason of their own carry the marker and say why.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before -m chooses by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any("swap" in marker.args for marker in item.iter_markers("real")):
            item.add_marker(pytest.mark.alone)
