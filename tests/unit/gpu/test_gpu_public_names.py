"""The names of legroom.gpu: complete, and imported without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import legroom


def test_public_names_do_not_import_torch() -> None:
    code = "import sys, legroom\nlegroom.gpu.limit, legroom.gpu.find_batch_size, legroom.gpu.on_oom, legroom.gpu.account\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(legroom.gpu.__all__) == set(legroom.gpu._MODULES) and set(legroom.gpu.__all__) <= set(dir(legroom.gpu))
    with pytest.raises(AttributeError):
        _ = legroom.gpu.nonsense
