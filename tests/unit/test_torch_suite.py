"""What a test of torch's own suite counts as, from its results alone and with torch's class."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture
def torch_suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, which replaces torch's DataLoader at import unless it is told not to."""
    pytest.importorskip("torch")
    monkeypatch.setenv("LEGROOM_TORCH_SUITE_PLAIN", "1")
    monkeypatch.syspath_prepend("")  # puts sys.path back, which the module changes
    return importlib.import_module("torch_suite")


@pytest.mark.parametrize(
    ("first", "again", "with_torch", "expected", "runs"),
    [
        ("ok", None, None, "ok", ""),
        ("skipped", None, None, "skipped", ""),
        ("unexpected success", None, None, "unexpected success", ""),
        ("failed", "ok", None, "ok", "again"),
        ("failed", "skipped", None, "skipped", "again"),
        ("failed", "failed", "ok", "failed", "again torch"),
        ("failed", "failed", "failed", "as with torch's class", "again torch"),
        ("failed", "failed", "hung", "failed", "again torch"),
        ("failed", "hung", "failed", "hung", "again torch"),
        ("failed", "hung", "hung", "as with torch's class", "again torch"),
        # A hang is not excused by a second run that ends.
        ("hung", "ok", "ok", "hung", "torch"),
        ("hung", "ok", "failed", "hung", "torch"),
        ("hung", "ok", "hung", "as with torch's class", "torch"),
        # The process ended before the test began.
        (None, "ok", None, "ok", "again"),
        (None, "failed", "ok", "failed", "again torch"),
    ],
)
def test_a_result_is_ours_unless_torchs_class_has_the_same(
    torch_suite: ModuleType, first: str | None, again: str, with_torch: str, expected: str, runs: str
) -> None:
    ran = []

    def run(name: str, result: str) -> str:
        ran.append(name)
        return result

    outcome, note = torch_suite.judged(first, lambda: run("again", again), lambda: run("torch", with_torch))
    assert (outcome, " ".join(ran)) == (expected, runs)
    assert bool(note) == bool(runs) and note.isupper() == (expected in ("failed", "hung"))


def test_what_only_our_class_skips_is_found(torch_suite: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_torch(ids: list[str], name: str, **environment: str) -> dict[str, str]:
        assert environment == {torch_suite.WITH_TORCHS_CLASS: "1"}
        return {"no GPU": "skipped", "runs": "ok"}  # "none" did not come so far

    monkeypatch.setattr(torch_suite, "run_apart", with_torch)
    assert torch_suite.only_ours_skips(["no GPU", "runs", "none"], "skipped") == ["runs", "none"]
    assert torch_suite.only_ours_skips([], "skipped") == []
