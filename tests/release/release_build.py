"""Builds the sdist and, out of the sdist, the wheel, as `python -m build` does.

With hatchling installed nothing is fetched; else it is installed once into an environment of its own, for both.
"""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).parents[2]


class Built(NamedTuple):
    sdist: Path
    wheel: Path
    unpacked: Path  # the sdist's content


def build(out: Path) -> Built:
    """Both distributions of this checkout, and the unpacked sdist, below ``out``."""
    from build import ProjectBuilder

    with _backend() as builder_at:
        make = builder_at(REPO)
        assert isinstance(make, ProjectBuilder)
        sdist = Path(make.build("sdist", out))
        unpacked = unpack(sdist, out / "unpacked")
        wheel = Path(builder_at(unpacked).build("wheel", out))
    return Built(sdist, wheel, unpacked)


def unpack(sdist: Path, folder: Path) -> Path:
    """Where the sdist's one directory lies once unpacked."""
    with tarfile.open(sdist) as bag:
        bag.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


@contextmanager
def _backend() -> Iterator[object]:
    from build import ProjectBuilder
    from build.env import DefaultIsolatedEnv
    from pyproject_hooks import quiet_subprocess_runner

    if find_spec("hatchling") is not None:
        yield lambda where: ProjectBuilder(where, sys.executable, quiet_subprocess_runner)
        return
    with DefaultIsolatedEnv() as environment:
        environment.install(ProjectBuilder(REPO).build_system_requires)
        yield lambda where: ProjectBuilder.from_isolated_env(environment, where, quiet_subprocess_runner)
