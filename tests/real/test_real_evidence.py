"""The experiments behind the claims still show what their pages say, and the pages show what was measured.

Covers: every experiment of docs/evidence on this machine's kernel, and the pages against results.json.
Does not cover: pinned memory where there is no CUDA; there the experiment must say so.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evidence_run", EVIDENCE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


evidence = _load()
TORCH = {
    "sharing_strategies",
    "fallocate_or_sigbus",
    "loader_peak",
    "pin_memory",
    "bus_error_is_not_the_oom_killer",
    "workers_and_start_methods",
}


@pytest.mark.soak  # `make evidence` runs them, too
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.real(*needs)) for name, needs in evidence.EXPERIMENTS.items()]
)
def test_the_claim_holds_here(name: str) -> None:
    if name in TORCH:
        torch = pytest.importorskip("torch")
    found = evidence.measure(name)
    told = "\n".join([*found["lines"], f"{found['holds']}: {found['reason']}"])
    if name == "pin_memory" and not torch.cuda.is_available():
        assert found["holds"] == "not shown here", told
        assert "needs CUDA" in found["reason"], told
    elif name == "workers_and_start_methods" and found["holds"] == "not shown here":
        assert "3.12" in found["reason"], told  # only an older Python is installed
    else:
        assert found["holds"] == "yes", told
    assert found["lines"], "an experiment shows what it measured"


def test_pages_show_what_was_measured() -> None:
    assert evidence.stale_pages() == []


def test_a_changed_result_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = json.loads(evidence.RESULTS.read_text(encoding="utf-8"))
    results["exit_137"]["holds"] = "no"
    changed = tmp_path / "results.json"
    changed.write_text(json.dumps(results), encoding="utf-8")
    monkeypatch.setattr(evidence, "RESULTS", changed)
    assert evidence.stale_pages() == ["exit-137.md", "index.md"]


def test_every_page_has_its_experiment_and_its_result() -> None:
    names = {path.stem.replace("-", "_") for path in EVIDENCE.glob("*.md")} - {"index"}
    assert names == set(evidence.EXPERIMENTS)
    assert all((EVIDENCE / f"{name}.py").is_file() for name in names)
    results = json.loads(evidence.RESULTS.read_text(encoding="utf-8"))
    assert set(results) == names
    assert {found["holds"] for found in results.values()} <= {"yes", "not shown here"}


@pytest.mark.parametrize(
    ("last", "status", "holds"),
    [
        ("holds: yes", 0, "yes"),
        ("holds: no (it did not)", 1, "no"),
        ("holds: not shown here (needs root)", 0, "not shown here"),
        ("holds: yes", 1, "failed"),
        ("holds: perhaps", 0, "failed"),
        ("", -9, "failed"),
    ],
)
def test_only_a_known_last_line_with_its_status_is_an_answer(last: str, status: int, holds: str) -> None:
    assert evidence.outcome(last, status)[0] == holds
