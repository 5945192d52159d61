"""The Python reference names everything that is public, and every page of the documentation can be reached."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_pages import REPO, pages

import legroom
import legroom.gpu

DOCS = REPO / "docs"
REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))
PUBLIC = [f"legroom.{name}" for name in legroom.__all__] + [f"legroom.gpu.{name}" for name in legroom.gpu.__all__]
# Names that a page of docs/ tells people to import from an adapter.
ADAPTERS = sorted(
    {
        f"{module}.{name}"
        for path in DOCS.glob("*.md")
        for module, names in re.findall(
            r"^from (legroom\.integrations[\w.]*) import (.+)$", path.read_text(encoding="utf-8"), re.M
        )
        for name in names.split(", ")
    }
)


@pytest.mark.parametrize("name", PUBLIC + ADAPTERS)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert re.search(rf"{re.escape(name)}\b", REFERENCE), f"{name} is on no page of docs/reference"


def _directives() -> list[str]:
    return re.findall(r"^::: (\S+)$", REFERENCE, re.M)


@pytest.fixture
def signatures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """docs/signatures.py, which lies beside the pages and in no package."""
    monkeypatch.syspath_prepend(str(DOCS))
    import signatures

    yield signatures
    sys.modules.pop("signatures", None)


def test_every_link_to_the_reference_has_its_entry_there(signatures: Any) -> None:
    """Plain links: GitHub shows those of mkdocstrings, ``[name][path]``, as text."""
    index = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((\w+)\.md#([\w-]+)\)", index)
    assert len(links) > 15
    for page, anchor in links:
        text = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")
        assert anchor in [signatures.slug(heading) for heading in re.findall(r"^## (.+)$", text, re.M)], anchor
        assert f'<a id="{anchor}"></a>' in signatures.on_page_markdown(text)  # on the site
    assert [path.name for path in DOCS.rglob("*.md") if re.search(r"\]\[legroom\.", path.read_text("utf-8"))] == []


def test_the_reference_has_the_signatures_of_the_source(signatures: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert signatures.main(check=True) == 0, f"{capsys.readouterr().out}write them: python docs/signatures.py"


@pytest.mark.parametrize(
    "directive",
    [
        "::: legroom.records.machine\n    options:\n      show_root_heading: false\n      members: [Machine, Gone]\n",
        "::: legroom.loader.batches.legroom_open.Data\n    options:\n      members: [batches, Gone]\n",
    ],
)
def test_a_name_that_the_source_no_longer_has_is_an_error(signatures: Any, directive: str) -> None:
    with pytest.raises(LookupError, match="Gone"):
        signatures.rewritten(directive)


def test_a_page_of_the_reference_can_be_read_as_a_file_and_on_the_site(signatures: Any) -> None:
    page = "# API\n\n::: legroom.probe.legroom_available.available\n    options:\n      heading: legroom.available\n"
    text = signatures.rewritten(page)
    assert "## legroom.available\n\n```py\nlegroom.available(" in text and signatures.rewritten(text) == text
    visible = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    assert ":::" not in visible and "options:" not in visible and len(visible.splitlines()[-3]) > 20
    assert signatures.on_page_markdown(text).replace('<a id="legroomavailable"></a>\n\n', "") == page


@pytest.mark.parametrize("path", _directives())
def test_every_directive_names_something(path: str) -> None:
    """Without importing: the modules' own text has it, whatever is installed."""
    parts = path.split(".")
    module = REPO / "src" / Path(*parts)
    if module.with_suffix(".py").is_file():
        return
    home = REPO / "src" / Path(*parts[:-1])
    source = home.with_suffix(".py") if home.with_suffix(".py").is_file() else home / "__init__.py"
    names = {getattr(node, "name", None) for node in ast.parse(source.read_text(encoding="utf-8")).body}
    assert parts[-1] in names


def _functions() -> Iterator[tuple[str, object]]:
    for package in (legroom, legroom.gpu):
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isfunction(value):
                yield f"{package.__name__}.{name}", value


@pytest.mark.parametrize(("name", "function"), list(_functions()))
def test_every_argument_is_documented(name: str, function: object) -> None:
    text = inspect.getdoc(function) or ""
    told = set(re.findall(r"^    \*{0,2}(\w+): ", text.partition("Args:\n")[2], re.M))
    assert told == set(inspect.signature(function).parameters), name  # type: ignore[arg-type]


def test_every_page_is_in_the_navigation() -> None:
    import yaml

    text = (REPO / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"[\w./-]+\.md", str(yaml.safe_load(text)["nav"]))
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))  # each once


@pytest.mark.parametrize("page", [page for page in pages() if not page.startswith("docs/")])
def test_links_of_pages_outside_the_site_lead_somewhere(page: str) -> None:
    """Inside it mkdocs looks at them."""
    text = (REPO / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert ((REPO / page).parent / target).exists(), target


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("README.md", "Each machine has its own copy;"),
        ("README.zh-CN.md", "每台机器各有一份；"),
        ("docs/when-not.md", "Each machine has its own copy;"),
    ],
)
def test_what_is_said_of_one_machine_leads_to_the_nodes_of_a_cluster(page: str, sentence: str) -> None:
    text = (REPO / page).read_text(encoding="utf-8")
    assert text.count(sentence) == 1
    assert (
        text.partition(sentence)[2].split()[0].startswith("[`legroom")
        and "nodes.md)" in text.partition(sentence)[2][:60]
    )


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_developers_are_sent_to_exist(page: str) -> None:
    text = (REPO / page).read_text(encoding="utf-8")
    bases = [REPO, REPO / "src" / "legroom", DOCS]
    named = set(re.findall(r"`((?:[\w-]+/)+[\w*]+\.(?:py|md))`", text))
    assert named
    missing = [name for name in named if not any(any(base.glob(name)) for base in bases)]
    assert {name for name in missing if "NAME" not in name} == set()


def test_packages_in_the_picture_exist() -> None:
    picture = (DOCS / "images" / "architecture.svg").read_text(encoding="utf-8")
    names = re.findall(r'class="name">(\w+)<', picture)
    home = REPO / "src" / "legroom"
    assert [name for name in names if not ((home / name).is_dir() or (home / f"{name}.py").is_file())] == []
    shown = {path.name for path in home.iterdir() if (path / "__init__.py").is_file()}
    assert shown <= {*names, "testing"}  # for readers of other packages: nothing of Legroom imports it
