"""Ten thousand random damages of a file of every format: an error in words or the right data, within a bound of memory.

``LEGROOM_SOAK_SEED`` repeats a run, ``LEGROOM_MUTATIONS`` makes it shorter or longer.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fuzz_damage import Child, Damages, random_damage
from fuzz_samples import TINY

COUNT = int(os.environ.get("LEGROOM_MUTATIONS", "10000"))
SEED = int(os.environ.get("LEGROOM_SOAK_SEED") or random.SystemRandom().randrange(1 << 31))

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300 + COUNT / 10)]


@pytest.mark.parametrize("sample", TINY, ids=str)
def test_damages(sample: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    children = {mode: Child(mode) for mode in ("ours", "reference")}
    chance, came = random.Random(f"{SEED} {sample.name}"), Counter[str]()
    try:
        damages = Damages(sample, tmp_path, children)
        for _ in range(COUNT):
            came[damages.check(random_damage(chance))] += 1
    finally:
        for child in children.values():
            child.close()
        capture = request.config.pluginmanager.getplugin("capturemanager")
        assert capture is not None
        with capture.global_and_fixture_disabled():
            print(f"\n{sample.name}: LEGROOM_SOAK_SEED={SEED} {dict(came)}", flush=True)
