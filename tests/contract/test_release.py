"""What is built holds what it must and nothing else; the version is one everywhere."""

from __future__ import annotations

import re
import subprocess
import tarfile
import tomllib
import zipfile
from datetime import date
from email.parser import Parser
from pathlib import Path

import pytest

import legroom
from legroom.system.lazy_and_optional_imports import EXTRAS

REPO = Path(__file__).parents[2]

from release_build import Built, build  # noqa: E402

JUNK = re.compile(
    r"__pycache__|\.py[co]$|\.coverage|\.hypothesis|_cache/|\.venv|/site/|\.egg-info|~$|\.ready$|\.DS_Store"
)
FOLDERS = (".ci", "src", "tests", "docs", "examples", "bench", "po")  # of the sdist
DEVELOPMENT = {"bench", "demo", "docs", "integrations", "lint", "test", "dev"}  # extras that no user needs
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
    missing = _kept_in_git(*FOLDERS) - set(members)
    assert not missing
    for needed in (
        "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "Makefile", "constraints.txt",
        "mkdocs.yml", "pyproject.toml", "readme_for_pypi.py", "tests/conftest.py", "tests/rigs.py", "tests/release/smoke.py",
        "examples/glint_unet/make_data.py", "docs/index.md",
    ):  # fmt: skip
        assert needed in members
    assert {name.split("/")[0] for name in members if "/" in name} == set(FOLDERS)
    assert all(member.uid == member.gid == 0 and not member.uname for member in members.values())


def test_the_wheel_out_of_the_sdist_is_that_of_the_checkout(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        for name in wheel.namelist():
            if name.startswith("legroom/"):
                assert wheel.read(name) == (built.unpacked / "src" / name).read_bytes(), name


LINKS = re.compile(r"\]\(([^)\s]+)\)")


def test_the_page_on_pypi_has_no_links_that_lead_nowhere(built: Built) -> None:
    """It is shown without the other files. Pictures and links to them work in a clone alone."""
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
    shown = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown" and shown.startswith("# Legroom")
    assert "legroom run --retries 4 -- python train.py" in shown
    assert [target for target in LINKS.findall(shown) if not target.startswith(("https://", "#"))] == []


def test_with_a_repository_the_links_of_that_page_lead_there() -> None:
    pytest.importorskip("hatchling")
    from readme_for_pypi import readme_for_pypi

    text = (REPO / "README.md").read_text(encoding="utf-8")
    relative = [target for target in LINKS.findall(text) if not target.startswith(("https://", "#"))]
    assert relative and "docs/images/doctor.png" in relative
    shown = readme_for_pypi(text, "https://example.org/legroom/", "v1.2.3")
    assert [one for one in LINKS.findall(shown) if "example.org" in one] == [
        f"https://example.org/legroom/{'raw' if target.endswith('.png') else 'blob'}/v1.2.3/{target}"
        for target in relative
    ]
    code = "```text\n[a](b)\n```"
    assert readme_for_pypi(f"[x](docs/y.md)\n{code}\n![p](q.png)[z](#here)", None, "v1").startswith(
        f"x\n{code}\n[z](#here)"
    )


def test_the_version_is_one_everywhere() -> None:
    """It is written in version.py, from which the build takes it; the citation and the changelog repeat it."""
    cited = (REPO / "CITATION.cff").read_text()
    changes = re.findall(r"(?m)^## (\S+)(?: - (\S+))?$", (REPO / "CHANGELOG.md").read_text())
    assert "version" not in PROJECT and "version" in PROJECT["dynamic"]
    assert re.findall(r"(?m)^version: \"(.+)\"", cited) == [legroom.__version__]
    dates = re.findall(r"(?m)^date-released: \"(.+)\"", cited)
    if "dev" in legroom.__version__:  # what is being made has no heading of its own yet
        assert changes[0] == ("Unreleased", "") and not dates
    else:
        assert [changes[0]] == [(legroom.__version__, one) for one in dates]
        date.fromisoformat(dates[0])


def test_the_citation_agrees_with_the_project() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited["title"] == "Legroom" and cited["license"] == PROJECT["license"]
    assert cited["abstract"] == PROJECT["description"]
    assert [author["name"] for author in cited["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_the_pages_show_how_to_install() -> None:
    """From a clone, and from PyPI; each page in one line, so that the day of publication changes one line of each."""
    for page in ("README.md", "README.zh-CN.md", "docs/get-started.md", "docs/index.md"):
        lines = (REPO / page).read_text(encoding="utf-8").splitlines()
        installs = [line.partition("#")[0].strip() for line in lines if line.startswith("pip install")]
        assert installs == ["pip install .", "pip install legroom"], page


def test_the_extras_for_users_are_described() -> None:
    extras = PROJECT["optional-dependencies"]
    table = (REPO / "docs" / "get-started.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0]
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", table)) == set(extras) - DEVELOPMENT
    (together,) = extras["all"]
    parts = set(together.removeprefix("legroom[").removesuffix("]").split(","))
    assert parts == set(extras) - DEVELOPMENT - {"all", "remote", "ray"}


def test_the_packages_that_advice_names_are_those_of_the_extras() -> None:
    """`pip install PACKAGE` is right for every installation; the name of an extra depends on where Legroom came from."""
    extras = {
        name: parts for name, parts in PROJECT["optional-dependencies"].items() if name not in {*DEVELOPMENT, "all"}
    }
    names = {extra: " ".join(re.split(r"[^\w-]", part)[0] for part in parts) for extra, parts in extras.items()}
    assert names == EXTRAS
    advising = [
        REPO / "README.md",
        REPO / "README.zh-CN.md",
        *(REPO / "src").rglob("*.py"),
        *(REPO / "docs").rglob("*.md"),
    ]
    assert [path for path in advising if re.search(r"pip install ['\"]?legroom\[", path.read_text())] == []


def test_every_package_has_a_lower_bound_that_can_be_tried() -> None:
    """`make test-versions` and `make test-torch` install exactly this release."""
    pytest.importorskip("packaging")
    from versions import claimed, oldest

    extras = tuple(set(PROJECT["optional-dependencies"]) - DEVELOPMENT - {"all"})
    assert all(re.fullmatch(r"[\w-]+==\d+(\.\d+)*", oldest(one)) for one in claimed(extras))
    shown = subprocess.run(["make", "-n", "-B", "test-torch"], cwd=REPO, capture_output=True, text=True, check=True)
    assert f"'{oldest(*claimed(('torch',), base=False))}'" in shown.stdout


def test_every_python_that_is_promised_is_named() -> None:
    versions = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: Python :: 3." in line]
    assert versions == ["3.11", "3.12", "3.13"] and PROJECT["requires-python"] == ">=3.11"
