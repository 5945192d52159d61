"""What every test shares: the rigs' switch, and a guard against leaving anything behind."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import rigs

from legroom import words

pytest_plugins = ["load_sensitive"]

# Tests import helpers by their file names, from every folder here.
sys.path += sorted({str(path.parent) for path in Path(__file__).parent.rglob("*.py")} - set(sys.path))

try:
    from hypothesis import settings
except ImportError:  # `make gpu` needs pytest alone
    pass
else:
    # Speed is never asserted: on a busy machine an example may take its time.
    settings.register_profile("legroom", deadline=None)
    settings.load_profile("legroom")


# Files that take long, longest first. They begin first: one that began last would keep a single worker busy
# while the others have nothing left to do.
LONG = (
    "test_docs_blocks.py",
    "test_contract_dataloader.py",
    "test_example_glint.py",
    "test_loader_measure.py",
    "test_monitor_trend.py",
    "test_cache_fuzz.py",
    "test_example_many.py",
    "test_formats_fuzz.py",
    "test_gpu_oom.py",
    "test_tune.py",
    "test_loader_deaths.py",
    "test_loader_dataloader.py",
    "test_gpu_batch_size.py",
    "test_formats.py",
    "test_integrations_lightning.py",
    "test_integrations_huggingface.py",
    "test_loader_orphans.py",
    "test_integrations_deepspeed.py",
    # rigs
    "test_real_deaths.py",
    "test_real_evidence.py",
    "test_real_dataloader.py",
    "test_real_rescue.py",
    "test_real_watch.py",
    "test_real_example_audio.py",
    "test_real_predict.py",
    "test_real_check.py",
    "test_real_batch_size.py",
    "test_real_dataloader_room.py",
    "test_real_demo.py",
    "test_real_example_chat.py",
    "test_real_tune.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, all else in its order."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Take what importing made out of the collector's sight.

    With torch and hundreds of test modules loaded a full collection takes a good part of a second, and tests that
    look at lifetimes ask for many; what a test makes itself is collected as ever. Forks share more pages, too.
    """
    gc.collect()
    gc.freeze()


@cache
def _why_not(need: str) -> str | None:
    return rigs.WHY_NOT[need]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a real test where its rig cannot be had; in CI as root that is a failure, not a skip."""
    for marker in item.iter_markers("real"):
        for need in marker.args:
            reason = _why_not(need)
            if reason is None:
                continue
            if os.environ.get("CI") and rigs.why_no_rigs() is None and need not in rigs.OPTIONAL:
                pytest.fail(f"the {need} rig must work in CI as root: {reason}", pytrace=False)
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test depends on the switches of the person who runs it, nor on the language."""
    for name in [name for name in os.environ if name.startswith("LEGROOM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.delenv("LANGUAGE", raising=False)
    words.speak(words.ENGLISH)
    yield
    words.speak(words.ENGLISH)
    os.environ.pop(words.VARIABLE, None)  # --lang sets it for the processes that follow
