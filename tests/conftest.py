"""What every test shares: the rigs' switch, and a guard against leaving anything behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

import pytest
import rigs

from legroom import words

try:
    from hypothesis import settings
except ImportError:  # `make gpu` needs pytest alone
    pass
else:
    # Speed is never asserted: on a busy machine an example may take its time.
    settings.register_profile("legroom", deadline=None)
    settings.load_profile("legroom")


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
            if os.environ.get("CI") and rigs.why_no_rigs() is None:
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
