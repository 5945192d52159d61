"""The README as PyPI shows it, which has none of the other files: hatchling calls this when it builds.

With a Repository in [project.urls] of pyproject.toml, links to files lead to this version of them there. Without one
they become plain text, and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?:|mailto:|#)([^()\s]+)\)")
_CODE = re.compile(r"^```.*?^```$", re.M | re.S)
_WHERE = (
    "The pages that are named here are files of the source distribution: "
    "`pip download --no-deps --no-binary legroom legroom`."
)


class ReadmeForPyPI(MetadataHookInterface):
    """Sets the field readme of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        version = re.search(r'VERSION = "(.+)"', (root / "src/legroom/version.py").read_text(encoding="utf-8"))
        assert version is not None
        text, repository = (root / "README.md").read_text(encoding="utf-8"), metadata.get("urls", {}).get("Repository")
        text = readme_for_pypi(text, repository, f"v{version[1]}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def readme_for_pypi(text: str, repository: str | None, tag: str) -> str:
    """The text with links that work without the other files."""

    def link(found: re.Match[str]) -> str:
        picture, shown, target = found.groups()
        if repository is None:
            return "" if picture else shown
        return f"{picture}[{shown}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/{tag}/{target})"

    parts, at = [], 0
    for code in _CODE.finditer(text):
        parts += [_LINK.sub(link, text[at : code.start()]), code.group()]
        at = code.end()
    whole = "".join([*parts, _LINK.sub(link, text[at:])])
    return whole if repository is not None else f"{whole.rstrip()}\n\n{_WHERE}\n"
