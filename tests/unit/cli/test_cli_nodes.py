"""`legroom nodes` as a person and a program use it, with nodes that answer at once. tests/nodes has real ones."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from legroom.cli.main import run
from legroom.integrations import ray_cluster_commands
from legroom.records.node_results import NodeAnswer, NodeError, NodeLoad

URL = "s3://bucket/train.npy"
DIED = NodeError("node-died", "the node died while it was loading", "", ("run it again",))


def _node(number: int, **answer: Any) -> NodeAnswer:
    return NodeAnswer(f"id{number}", f"10.0.0.{number}", "ok", {"findings": [], **answer})


def _with(number: int, severity: str) -> NodeAnswer:
    return _node(number, findings=[{"severity": severity, "code": "shm-small", "message": "m", "why": "", "fix": []}])


LOST = NodeAnswer("id9", "10.0.0.9", "failed", {}, DIED)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that commands connected to."""
    asked: list[str] = []

    @contextlib.contextmanager
    def connect(address: str) -> Iterator[None]:
        asked.append(address)
        yield

    monkeypatch.setattr(ray_cluster_commands, "connect", connect)
    return asked


@pytest.fixture
def answers(cluster: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Sets what the nodes answer. Returns what they are asked."""

    def use(*given: NodeAnswer) -> list[Any]:
        calls: list[Any] = []

        def ask(command: str, nodes: Any = None, arguments: Any = None) -> tuple[NodeAnswer, ...]:
            calls.append((command, nodes, arguments))
            return given

        monkeypatch.setattr(ray_cluster_commands, "ask", ask)
        return calls

    return use


def _json(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[dict[str, Any]]:
    assert run(["nodes", *arguments, "--json"]) == status
    shown = json.loads(capsys.readouterr().out)
    assert shown["schema"] == f"legroom.nodes.{arguments[0]}/1"
    found: list[dict[str, Any]] = shown["nodes"]
    return found


def test_doctor_shows_the_worst_node_first(
    answers: Callable[..., list[Any]], cluster: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answers(_with(1, "info"), _with(2, "warning"), _node(3), _with(4, "critical"), LOST)
    found = _json(capsys, "doctor", "--ray", "10.0.0.1:6379", status=1)
    order = [f"10.0.0.{number}" for number in (9, 4, 2, 1, 3)]
    assert [one["address"] for one in found] == order and cluster == ["10.0.0.1:6379"]
    assert run(["nodes", "doctor"]) == 1
    text = capsys.readouterr().out
    assert "CRITICAL: " in text and "WARNING: " in text  # as doctor prints it, in the user's language
    places = [text.index(address) for address in order]
    assert places == sorted(places) and cluster[1:] == ["auto"]
    answers(_with(1, "warning"), _node(2))
    _json(capsys, "doctor")  # exits 0


def test_list_and_drop_ask_every_node_or_some(
    answers: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = answers(
        _node(1, entries=[], removed=[{}], kept=[], freed=5), _node(2, entries=[], removed=[], kept=[], freed=0)
    )
    assert len(_json(capsys, "list")) == 2
    _json(capsys, "list", URL, "--node", "10.0.0.1", "--node", "10.0.0.2")
    _json(capsys, "drop", URL)
    _json(capsys, "drop", "--all", "--force")
    assert calls == [
        ("entries", None, {"what": None}),
        ("entries", ("10.0.0.1", "10.0.0.2"), {"what": [URL]}),
        ("drop", None, {"what": [URL], "force": False}),
        ("drop", None, {"what": None, "force": True}),
    ]
    assert run(["nodes", "drop"]) == 2 and run(["nodes", "drop", URL, "--all"]) == 2  # one of both
    assert len(calls) == 4
    answers(LOST)
    _json(capsys, "list", status=1)
    answers(_node(1, removed=[], kept=[{}], freed=0))
    _json(capsys, "drop", URL, status=1)


def test_warm_shows_the_progress_of_each_node(
    cluster: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal. Elsewhere nothing is drawn."""
    size = 64 << 20
    given: list[Any] = []

    def warm(sources: Any, nodes: Any, *, told: Any, **options: Any) -> tuple[NodeLoad, ...]:
        given.append((sources, nodes, options))
        if told is not None:
            for done in (size // 4, size):
                told("10.0.0.1", URL, done, size)
                told("10.0.0.2", URL, done // 2, size)
        return (
            NodeLoad("a", "10.0.0.1", URL, "loaded", 2.0, size, size, 0),
            NodeLoad("b", "10.0.0.2", URL, "failed", 2.0, size, error=DIED),
        )

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(ray_cluster_commands, "warm", warm)
    found = _json(capsys, "warm", URL, "--keys", "a, b", "--backing", "disk", "--revalidate", status=1)
    assert [one["state"] for one in found] == ["loaded", "failed"] and capsys.readouterr().err == ""
    assert given == [((URL,), None, {"keys": ["a", "b"], "backing": "disk", "revalidate": True})]
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["nodes", "warm", URL]) == 1
    lines = [line for line in screen.getvalue().splitlines() if "10.0.0." in line]
    assert any("10.0.0.1" in line and "64.0/64.0" in line for line in lines), lines
    assert any("10.0.0.2" in line and "32.0/64.0" in line for line in lines), lines


@pytest.mark.parametrize("command", ["doctor", "warm x.npy", "list", "drop --all"])
def test_without_ray_one_line_says_how_to_get_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["nodes", *command.split()]
    assert run(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    assert [line.split() for line in said.err.splitlines() if "pip" in line] == [["do:", "pip", "install", "ray"]]
    assert run([*words, "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == f"legroom.nodes.{words[1]}/1"
    assert (answer["error"]["code"], answer["error"]["fix"]) == ("missing-package", ["pip install ray"])
