"""What others chose (names in files, paths, attributes, command lines) is shown and never obeyed by a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from rigs import TREES

from legroom.cli.language_and_streams import StandardError, StandardOutput, for_drawing
from legroom.errors import UnreadableSource
from legroom.formats.file_reads_and_errors import unreadable
from legroom.messages import say, shown

HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b31m\u202eb\rc\nlegroom: all is well\x7f"
OBEYED = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
OURS = re.compile("\x1b\\[(?:0|1|3[0-7])m")  # colours of our own
BAR = re.compile(r"\x1b\[\?25[lh]|\r?\x1b\[2K|\x1b\[1A|\x1b\[[0-9;]*m|\r\Z|\r(?=\x1b)")  # how rich draws one


def on_a_terminal(*words: str, cwd: Path, env: dict[str, str]) -> str:
    """What a command writes to a terminal, both streams."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "legroom", *words], stdin=follower, stdout=follower, stderr=follower, cwd=cwd, env=env
    )  # fmt: skip
    os.close(follower)
    written = b""
    while True:
        try:
            part = os.read(leader, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    process.wait(60)
    os.close(leader)
    return written.decode("utf-8").replace("\r\n", "\n")


def files(folder: Path) -> list[Path]:
    """A file of each format whose names are hostile, and one that is called so."""
    with h5py.File(folder / "x.h5", "w") as file:
        file[HOSTILE] = np.arange(3)
        file[HOSTILE].attrs[HOSTILE] = file.attrs[HOSTILE] = HOSTILE
    buffer = io.BytesIO()
    np.save(buffer, np.arange(4))
    with zipfile.ZipFile(folder / "x.npz", "w") as archive:
        archive.writestr(zipfile.ZipInfo(HOSTILE + ".npy"), buffer.getvalue())
    name = HOSTILE.replace("/", "") + ".npy"
    np.save(folder / name, np.arange(5))
    with open(os.fsencode(folder) + b"/\xff\xfe\x1b[2J.npy", "wb") as file:
        np.save(file, np.arange(6))
    return [folder / "x.h5", folder / "x.npz", folder / name, Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe\x1b[2J.npy"))]  # fmt: skip


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    for name in ("shm", "disk"):
        (tmp_path / name).mkdir(mode=0o700)
    return {**os.environ, "LEGROOM_SHM": str(tmp_path / "shm"), "LEGROOM_DIR": str(tmp_path / "disk"),
            "LANG": "C.UTF-8", "TERM": "xterm", "LEGROOM_LANG": "en"}  # fmt: skip


def test_nothing_in_names_drives_the_terminal(tmp_path: Path, env: dict[str, str]) -> None:
    paths = files(tmp_path)
    lines = [
        ["cache", "verify"],
        ["cache", "load", *map(str, paths), "--keys", HOSTILE],
        *(["cache", "info", str(path)] for path in paths),
        ["cache", "list"],
        ["cache", "list", "--json"],
        ["cache", "load", str(tmp_path / f"{HOSTILE}.h5")],
        ["explain", str(tmp_path / HOSTILE)],
        ["doctor", "--pid", HOSTILE],
        ["cache", "drop", "--all", "--yes"],
    ]
    for path in paths:
        subprocess.run([sys.executable, "-m", "legroom", "cache", "load", str(path)], env=env, check=True,
                       capture_output=True)  # fmt: skip
    for words in lines:
        written = on_a_terminal(*words, cwd=tmp_path, env=env)
        written = (BAR if "load" in words else OURS).sub("", written)
        assert written.strip()
        assert not OBEYED.search(written) and "\r" not in written, (words, written)
        assert "\nlegroom: all is well" not in written, (words, written)
        assert "Traceback" not in written


@pytest.mark.parametrize(
    "words",
    [
        ("doctor",),
        ("plan", "--gpus", "1", "--jobs-per-gpu", "1", "--per-process", "5MB"),
        ("check", "--sample-bytes", "1MB", "--batch", "1", "--root", str(TREES / "docker-v2")),
        ("explain", "log"),
    ],
    ids=lambda words: words[0],
)
def test_colours_of_our_own_are_not_shown_as_text(words: tuple[str, ...], tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "log").write_text("RuntimeError: CUDA out of memory.\n")
    env.pop("NO_COLOR", None)
    written = on_a_terminal(*words, cwd=tmp_path, env=env)
    assert "\x1b[" in written, written
    assert "u001b" not in written and not OBEYED.search(OURS.sub("", written)), written


def test_json_with_hostile_names_is_json(tmp_path: Path, env: dict[str, str]) -> None:
    path = files(tmp_path)[0]
    subprocess.run([sys.executable, "-m", "legroom", "cache", "load", str(path)], env=env, check=True,
                   capture_output=True)  # fmt: skip
    listed = subprocess.run([sys.executable, "-m", "legroom", "cache", "list", "--json"], env=env, check=True,
                            capture_output=True, text=True).stdout  # fmt: skip
    (entry,) = json.loads(listed)["entries"]
    assert list(entry["arrays"]) == [HOSTILE]
    assert not OBEYED.search(listed)


def test_sentences_show_what_fills_them() -> None:
    text = say("{name} of {path}", name="a\x1b[2Jb", path=Path("x\ny\x07"))
    assert text == "a\\u001b[2Jb of x\\u000ay\\u0007"
    assert say("{name!r}", name="a\x1b") == "'a\\x1b'"
    assert say("{why}", why="two\nlines") == "two\nlines"  # sentences may have several
    assert say("{size:>4}|", size="3 M") == " 3 M|"
    assert shown("tab\tline\n") == "tab\\u0009line\\u000a"
    assert shown("日本語 ü é") == "日本語 ü é"
    error = unreadable(Path("/no/such\x1b[2J"), FileNotFoundError())
    assert isinstance(error, UnreadableSource) and "\x1b" not in str(error)


@pytest.mark.parametrize("kind", [StandardOutput, StandardError])
def test_streams_let_colours_through_and_nothing_else(kind: type[StandardOutput] | type[StandardError]) -> None:
    buffer = io.BytesIO()
    stream = kind(buffer, encoding="utf-8", write_through=True)
    assert stream.write("\x1b[31mred\x1b[0m \x1b[2J\x1b[8mhidden\t\n") > 0
    assert buffer.getvalue() == b"\x1b[31mred\x1b[0m \\u001b[2J\\u001b[8mhidden\t\n"
    for_drawing(stream).write("\x1b[2J")
    assert buffer.getvalue().endswith(b"\x1b[2J")
