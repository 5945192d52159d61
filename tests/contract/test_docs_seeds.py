"""docs/seeds.md is true: its commands exist, its Python names resolve, its tests are there, its links lead somewhere."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import doc_shell
import pytest
from doc_pages import REPO, Block

PAGE = "docs/seeds.md"
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]+))?\)")
# What each of the five notes has at the least, so that no row can be lost unnoticed.
SECTIONS = {
    "Sizing `/dev/shm` for many experiments": 15,
    "One copy of an HDF5 file": 16,
    "Bus error": 34,
    "A GPU's memory, on Windows too": 10,
    "A T5 that swaps": 24,
    "Beside the notes": 3,
}


def _rows() -> list[tuple[int, str, list[str]]]:
    """Line, section and cells of every row."""
    rows, section = [], ""
    for number, line in enumerate((REPO / PAGE).read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith(("| ---", "| in the notes", "| asked for")):
            rows.append((number, section, [cell.strip() for cell in line.strip("|").split(" | ")]))
    return rows


ROWS = _rows()


@pytest.mark.parametrize(("number", "cells"), [(number, cells) for number, _, cells in ROWS])
def test_a_row(number: int, cells: list[str]) -> None:
    assert len(cells) == 3, "what the notes say, what is here, what shows it"
    _, here, shown = cells
    for code in _CODE.findall(here):
        if code.startswith("examples/"):
            assert (REPO / code).is_file(), code
        elif code.startswith(("legroom ", "python ")):
            (line,) = doc_shell.lines(Block("README.md", number, "sh", code))
            assert (problem := doc_shell.wrong(line)) is None, f"{code}: {problem}"
            assert not code.startswith("python ") or (REPO / code.split()[1]).is_file(), code
        elif code.startswith("legroom."):
            assert callable(_resolved(code)), code
    tests = [code for code in _CODE.findall(shown) if code.startswith("tests/")]
    links = _LINK.findall(shown)
    assert tests or links, "a row without proof"
    for test in tests:
        assert _there(test), f"{test} is not there"
    for page, anchor in [*links, *_LINK.findall(here)]:
        assert (REPO / "docs" / page).is_file(), page
        assert not anchor or anchor in _anchors(REPO / "docs" / page), f"{page}#{anchor}"


def _resolved(dotted: str) -> object:
    """What a dotted name stands for."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise AssertionError(dotted)


def _there(test: str) -> bool:
    path, _, name = test.partition("::")
    if not (REPO / path).is_file():
        return False
    body = ast.parse((REPO / path).read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in body)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them."""
    from markdown.extensions.toc import slugify

    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings}


def test_no_row_was_lost() -> None:
    for section, least in SECTIONS.items():
        assert sum(one == section for _, one, _ in ROWS) >= least, section


def test_every_claim_of_the_notes_has_its_section() -> None:
    linked = {anchor for _, _, cells in ROWS for page, anchor in _LINK.findall(" ".join(cells)) if page == "myths.md"}
    headings = re.findall(r"^## (.+)$", (REPO / "docs" / "myths.md").read_text(encoding="utf-8"), re.M)
    assert len(headings) == 13 and len(linked) == 13, (headings, linked)


def test_the_glint_training_run_has_the_defaults_of_the_notes() -> None:
    tree = ast.parse((REPO / "examples" / "glint_unet" / "train_glint_unet.py").read_text(encoding="utf-8"))
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("add_argument", "add"):
            options = {one.arg: ast.unparse(one.value) for one in node.keywords}
            found[ast.literal_eval(node.args[0])] = options
    assert found["--num_workers"]["default"] == "4"
    assert found["--preload"]["default"] == "True"
    for switch in ("--shared_memory", "--cleanup_shm"):
        assert found[switch]["action"] == "'store_true'"
