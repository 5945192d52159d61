"""What is built holds what it must and nothing else; the version is one everywhere."""

from __future__ import annotations

import re
import subprocess
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import legroom

REPO = Path(__file__).parents[2]

from release_build import Built, build  # noqa: E402

JUNK = re.compile(
    r"__pycache__|\.py[co]$|\.coverage|\.hypothesis|_cache/|\.venv|/site/|\.egg-info|~$|\.ready$|\.DS_Store"
)
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    pytest.importorskip("build")
    return build(tmp_path_factory.mktemp("dist"))


def _kept_in_git(*folders: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=REPO, capture_output=True, text=True)
    return {name for name in listed.stdout.split("\0") if name and (REPO / name).exists()}


def test_the_wheel_holds_the_package_and_its_data(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
        info = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(info).decode())
    top = {name.split("/")[0] for name in names}
    assert top == {"legroom", f"legroom-{legroom.__version__}.dist-info"}
    assert not [name for name in names if JUNK.search(name)]
    assert {name.removeprefix("src/") for name in _kept_in_git("src/legroom")} <= names
    for needed in (
        "legroom/py.typed",
        "legroom/monitor/web_page/index.html",
        "legroom/monitor/web_page/watch.js",
        "legroom/monitor/web_page/watch.css",
        "legroom/monitor/share/dashboard.json",
        "legroom/monitor/share/alerts.yml",
    ):
        assert needed in names
    assert any(re.fullmatch(r"legroom/locale/zh[\w]*/LC_MESSAGES/legroom\.mo", name) for name in names)
    assert metadata["Version"] == legroom.__version__ and metadata["License-Expression"] == "Apache-2.0"
    # A base install must never pull these.
    heavy = ("torch", "pyarrow", "zarr", "lightning", "transformers", "textual")
    base = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
    assert base and not [line for line in base if line.startswith(heavy)]


def test_the_sdist_holds_what_its_tests_need(built: Built) -> None:
    with tarfile.open(built.sdist) as bag:
        members = {member.name.partition("/")[2]: member for member in bag.getmembers() if member.isfile()}
    assert not [name for name in members if JUNK.search(name)]
    missing = _kept_in_git("src", "tests", "docs", "examples", "bench", "po") - set(members)
    assert not missing
    for needed in (
        "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "Makefile", "constraints.txt",
        "mkdocs.yml", "pyproject.toml", "tests/conftest.py", "tests/rigs.py", "tests/release/smoke.py",
        "examples/glint_unet/make_data.py", "docs/index.md",
    ):  # fmt: skip
        assert needed in members
    assert {name.split("/")[0] for name in members if "/" in name} == {
        "src", "tests", "docs", "examples", "bench", "po",
    }  # fmt: skip
    assert all(member.uid == member.gid == 0 and not member.uname for member in members.values())


def test_the_wheel_out_of_the_sdist_is_that_of_the_checkout(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        for name in wheel.namelist():
            if name.startswith("legroom/"):
                assert wheel.read(name) == (built.unpacked / "src" / name).read_bytes(), name


def test_the_version_is_one_everywhere() -> None:
    cited = (REPO / "CITATION.cff").read_text()
    assert PROJECT["version"] == legroom.__version__
    assert re.findall(r"(?m)^version: \"?([^\"\n]+)", cited) == [legroom.__version__]
    released = re.findall(r"(?m)^## (?:\[)?(\d[^\]\s]*)", (REPO / "CHANGELOG.md").read_text())
    unreleased = "dev" in legroom.__version__
    if unreleased:  # what is being made has no heading of its own yet
        assert "## Unreleased" in (REPO / "CHANGELOG.md").read_text() and legroom.__version__ not in released
    else:
        assert released[0] == legroom.__version__
        assert re.search(r"(?m)^date-released: \"?\d{4}-\d\d-\d\d", cited)


def test_the_citation_agrees_with_the_project() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited["title"] == "Legroom" and cited["license"] == PROJECT["license"]
    assert [author["name"] for author in cited["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_every_python_that_is_promised_is_named() -> None:
    versions = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: Python :: 3." in line]
    assert versions == ["3.11", "3.12", "3.13", "3.14"] and PROJECT["requires-python"] == ">=3.11"
