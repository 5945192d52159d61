"""`legroom leak --read`: directories without records, and a page that cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legroom.cli.main import run


def _records(folder: Path) -> str:
    line = {"kind": "process", "schema": "legroom.leak-record/1", "pid": 7, "parent": 1, "command": "python train.py"}
    (folder / "7-0.jsonl").write_text(json.dumps(line) + "\n")
    return str(folder)


@pytest.mark.parametrize("content", [None, ("notes.txt", "hello"), ("other.jsonl", '{"a": 1}\n')])
def test_a_directory_without_records_exits_2(
    content: tuple[str, str] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / content[0]).write_text(content[1])
    assert run(["leak", "--read", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "contains no records of a process" in shown.err and shown.out == ""


def test_a_page_that_could_not_be_written_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    directory = _records(tmp_path)
    assert run(["leak", "--read", directory]) == 0
    monkeypatch.setattr("legroom.system.atomic_file.replace_file", no_space)
    assert run(["leak", "--read", directory, "--html", str(tmp_path / "page.html")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    for status, shown in ((0, 2), (3, 3)):  # the command's own failure counts more
        assert run(["leak", "--html", str(tmp_path / "page.html"), "--", "sh", "-c", f"exit {status}"]) == shown
