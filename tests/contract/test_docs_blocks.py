"""Every block of code that people read is run, or looked at with the reason why it is not run."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import doc_shell
import pytest
from doc_folder import copy, furnish
from doc_pages import REPO, BadMark, Block, blocks_of, original, pages, parse
from doc_runner import Runner, runs, scripts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the blocks are for Linux")
CUDA = torch.cuda.is_available()
PATIENCE = 240
COMMAND = Path(__file__).with_name("doc_command.py")
_DRAWN: set[str] = set()  # commands with --dataset that pages have run
_STARTED: set[str] = set()  # verbs of `legroom` that a shell has started
_READ: set[str] = set()  # commands that only read the machine and a page's files, as they were given to the shell
TAG = f"page-{os.getpid()}"  # by which the training that pages speak of is known among all that run here

# What makes an example's command small, put at its end. Commands of scripts that are not here start several processes,
# and are looked at only: tests/unit/examples and tests/real run them.
TINY = {
    "audio_diffusion/make_data.py": "--clips 32",
    "glint_unet/make_data.py": "--images 16 --size 32",
    "glint_unet/train_glint_unet.py": "--epochs 1 --num_workers 1 --batch 8",
    "glint_unet/shm_manager.py": "",
    "image_classifier/make_images.py": "--per_class 4 --size 32",
    "image_classifier/train_classifier.py": "--epochs 1 --num_workers 1 --image_size 32",
    "image_classifier/extract_features.py": "--num_workers 0 --image_size 32",
    "image_classifier/train_transformer.py": "--epochs 1",
}


def _pages_with(*languages: str) -> list[str]:
    """Pages with such blocks; one that cannot be read is among them, so that its own test fails."""

    def has(page: str) -> bool:
        try:
            return any(block.language in languages for block in blocks_of(page))
        except BadMark:
            return True

    return [page for page in pages() if has(page)]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    furnish(folder)
    return folder


@pytest.fixture
def page_folder(template: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    # Not pytest's own folder: its long path does not fit a socket's name, which workers need.
    with tempfile.TemporaryDirectory(prefix="legroom-doc-", ignore_cleanup_errors=True) as folder:
        yield Path(folder), copy(template, Path(folder))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    process = Runner("h5py", "torch", "torch._dynamo", COMMAND.stem)
    yield process
    process.close()


@pytest.mark.parametrize("page", _pages_with("python"))
def test_python(page: str, page_folder: tuple[Path, dict[str, str]], runner: Runner) -> None:
    folder, environment = page_folder
    blocks = blocks_of(page)
    for block in blocks:
        if block.language == "python":
            compile(block.text, str(block), "exec")
        if name := block.marks.get("file"):
            (folder / name).write_text(block.text, encoding="utf-8")
    for name, text in scripts(blocks, CUDA):
        if _meaning(text) in _of_the_original(page):
            continue
        script = folder / name
        text = re.sub(r'sample_bytes="[\d.]+[KM]B"', 'sample_bytes="2KB"', text)  # a trial run fills the batches
        script.write_text(text, encoding="utf-8")
        status, output = runner.run(script, folder, environment)
        assert status == 0, f"{page}: {name} ended with {status}\n{output}"


@pytest.mark.parametrize("page", [one for one in _pages_with("sh", "console") if "examples/" not in one])
def test_commands(page: str, page_folder: tuple[Path, dict[str, str]], runner: Runner) -> None:
    folder, environment = page_folder
    training, drawn = None, False
    try:
        for block in blocks_of(page):
            for line in doc_shell.lines(block):
                assert (problem := doc_shell.wrong(line)) is None, f"{block}: {line.text}: {problem}"
                if doc_shell.why_not_run(line) or line.text in _of_the_original(page):
                    continue
                if "--dataset" in line.text:
                    # Children that import torch draw from the dataset: one such line a page, and with other flags than
                    # those of the pages before.
                    flags = re.sub(r"(--[\w-]+)[= ][^-]\S*", r"\1", line.text)
                    if drawn or flags in _DRAWN:
                        continue
                    drawn = True
                    _DRAWN.add(flags)
                if training is None and re.search(r"4711|train_\.\*", line.text):
                    training = _somebody_trains(folder, environment)
                text = line.text.replace("4711", str(training.pid)) if training else line.text
                text = text.replace("train_.*", f"train_.*{TAG}")
                text = re.sub(r"--workers \d+", "--workers 1", text)  # each imports torch
                text = re.sub(
                    r"--sample-bytes [\d.]+[KM]B", "--sample-bytes 2KB", text
                )  # a trial run fills the batches
                text = text.replace("--root /host", f"--root {REPO / 'tests' / 'trees' / 'docker-v2'}")
                if training is None and doc_shell.only_reads(line):  # files of all pages begin alike
                    if text in _READ:
                        continue
                    _READ.add(text)
                if needs_no_shell(text):
                    status, output = runner.run(COMMAND, folder, environment, *shlex.split(text)[1:])
                else:
                    status, output = _run(text, folder, environment, until_it_speaks=doc_shell.goes_on(line))
                assert status in doc_shell.may_end_with(line), f"{block}: {text}\nended with {status}\n{output}"
    finally:
        if training is not None:
            training.kill()
            training.wait()


@pytest.mark.parametrize("page", [page for page in pages() if page.startswith("examples/")])
def test_commands_of_an_example(page: str, page_folder: tuple[Path, dict[str, str]], runner: Runner) -> None:
    folder, environment = page_folder
    for line in [line for block in blocks_of(page) for line in doc_shell.lines(block)]:
        assert (problem := doc_shell.wrong(line)) is None, f"{line.block}: {line.text}: {problem}"
        words = line.parts[0]
        script = (REPO / page).parent / words[min(1, len(words) - 1)]
        tiny = TINY.get(f"{script.parent.name}/{script.name}")
        if tiny is None or doc_shell.why_not_run(line) or line.text in _of_the_original(page):
            continue
        status, output = runner.run(script, folder, environment, *words[2:], *tiny.split())
        assert status == 0, f"{line.block}: {line.text} {tiny}\nended with {status}\n{output}"


@cache
def _of_the_original(page: str) -> frozenset[str]:
    """What a translated page need not run once more: the scripts and command lines of its original."""
    before = original(page)
    if before is None:
        return frozenset()
    blocks = blocks_of(before)
    lines = {line.text for block in blocks for line in doc_shell.lines(block)}
    return frozenset(lines | {_meaning(text) for _, text in scripts(blocks, CUDA)})


def _meaning(script: str) -> str:
    """A script without its comments and line numbers."""
    return ast.dump(ast.parse(script))


def needs_no_shell(text: str) -> bool:
    """Whether a line may run in a fork: one command that starts no program, if its verb was started by a shell before."""
    verb = re.match(r"legroom (cache|check|doctor|explain|plan|report|tune)\b[^|&;<>*$`]*$", text)
    if verb is None or verb[1] in _STARTED:
        return verb is not None
    _STARTED.add(verb[1])
    return False


def _somebody_trains(folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "train_faces.py", "--linger", "600", TAG], cwd=folder, env=environment)


def _run(text: str, folder: Path, environment: dict[str, str], *, until_it_speaks: bool) -> tuple[int, str]:
    """The line in a shell; one that would go on for ever is ended, as a person would, once it has said something."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {text}" if until_it_speaks else text], cwd=folder, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            first = process.stdout.readline() if until_it_speaks else ""
            if until_it_speaks:
                process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=PATIENCE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, first + rest


@pytest.mark.parametrize("page", _pages_with("sh", "console", "json", "yaml", "toml"))
def test_they_parse(page: str) -> None:
    for block in blocks_of(page):
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            import yaml

            list(yaml.safe_load_all(block.text))
        elif block.language == "toml":
            import tomllib

            tomllib.loads(block.text)
        elif block.language == "sh":
            shown = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
            assert shown.returncode == 0, f"{block}: {shown.stderr}"


def test_what_is_not_run_has_its_reason(record_property: pytest.RecordProperty) -> None:
    left_out = [block for page in pages() for block in blocks_of(page) if not runs(block, CUDA)]
    every = [block for page in pages() for block in blocks_of(page)]
    for block in left_out:
        record_property(str(block), block.marks.get("no") or f"needs {block.marks['needs']}")
    # Those run elsewhere: docs/outputs.py writes what they print into the page, tests/nodes and tests/gpu need a machine.
    elsewhere = ("docs/outputs.py runs it", "tests/nodes runs it")
    left_out = [
        one for one in left_out if not one.marks.get("no", "").startswith(elsewhere) and "needs" not in one.marks
    ]
    assert len(left_out) <= len(every) // 20, [f"{block}: {block.marks}" for block in left_out]


@pytest.mark.parametrize(
    "text",
    [
        "<!-- run: maybe -->\n```python\n1\n```",
        "<!-- run: needs=luck -->\n```python\n1\n```",
        "<!-- run: no: -->\n```sh\nls\n```",
        "<!-- run: after -->\nwords\n```python\n1\n```",
        "<!-- run: after -->\n```python\n1\n```",
        "<!-- run: no: a reason -->\n```python\n1\n```\n<!-- run: after -->\n```python\n1\n```",
        "```\nno language\n```",
        "```pyhton\n1\n```",
        "```python\nno end",
    ],
)
def test_unknown_marks_are_refused(text: str) -> None:
    with pytest.raises(BadMark):
        scripts(parse("page.md", text), cuda=False)


@pytest.mark.parametrize(
    "text",
    [
        "legroom docter",
        "legroom doctor --jsn",
        "legroom cache lst",
        "dmesg | legroom explain --lgo -",
        "legroom plan --emit nomad",
        "make nothing",
        "pip install 'legroom[everything]'",
        "python docs/evidence/run.py --chekc",
        "frobnicate",
    ],
)
def test_wrong_commands_are_noticed(text: str) -> None:
    block = Block("README.md", 1, "sh", text)
    assert [doc_shell.wrong(line) for line in doc_shell.lines(block)] != [None]


def test_line_numbers_are_the_pages() -> None:
    text = "\n\n```python\na = 1\n```\n\n<!-- run: after; given=train -->\n```python\nraise ValueError(a)\n```\n"
    ((_, script),) = scripts(parse("page.md", text), cuda=False)
    assert script.splitlines()[3] == "a = 1" and script.splitlines()[8] == "raise ValueError(a)"
    assert "from doc_given import train" in script
