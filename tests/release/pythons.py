"""Installs the wheel into an empty environment of every Python of 3.11 to 3.14 here, and tries it without torch.

    make test-pythons

Interpreters are looked for on PATH, among pyenv's and among uv's. The wheel is built once, out of the sdist. The
first Python also installs from the sdist and runs unit tests out of the unpacked sdist.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from release_build import REPO, Built, build

MINORS = (11, 12, 13, 14)
LOG = REPO / "tests" / "real" / "deaths" / "logs" / "gpu_oom_2_11.log"
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis")
OPTIONAL = ("torch", "pyarrow", "zarr", "blake3", "xxhash", "hdf5plugin", "textual")  # what the extras pull
UNIT_TESTS = (  # that need no more than this
    "tests/unit/test_errors.py",
    "tests/unit/test_units.py",
    "tests/unit/advice/test_advice_findings.py",
    "tests/unit/probe",
    "tests/unit/report",
    "tests/unit/rescue/test_rescue_verdict.py",
)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="legroom-pythons-") as name:
        folder = Path(name)
        built = build(folder)
        print(f"built {built.sdist.name} and, out of it, {built.wheel.name}")
        pythons = {minor: python for minor in MINORS if (python := find(minor)) is not None}
        failed = [minor for minor, python in pythons.items() if not try_wheel(minor, python, built, folder)]
        for minor in MINORS:
            if minor not in pythons:
                print(f"3.{minor}: not on this machine, not tried")
        if pythons and not try_sdist(*next(iter(pythons.items())), built, folder):
            failed.append(0)
    return 1 if failed or not pythons else 0


def find(minor: int) -> str | None:
    """A Python of that version that can make environments."""
    script = "import ensurepip, sys, venv; print(sys.version_info[1], sys.executable)"
    for candidate in _candidates(minor):
        done = subprocess.run([candidate, "-c", script], capture_output=True, text=True)
        words = done.stdout.split(maxsplit=1)
        if done.returncode == 0 and words[0] == str(minor):
            return words[1].strip()
    return None


def _candidates(minor: int) -> Iterator[str]:
    homes = (
        os.path.join(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv")), "versions", f"3.{minor}.*"),
        os.path.expanduser(f"~/.local/share/uv/python/cpython-3.{minor}.*"),
    )
    for home in homes:
        yield from sorted(glob.glob(os.path.join(home, "bin", "python3")), reverse=True)
    if found := shutil.which(f"python3.{minor}"):
        yield found


def try_wheel(minor: int, python: str, built: Built, folder: Path) -> bool:
    """The wheel in an empty environment of that Python: installed, and doing what it must."""
    environment = folder / f"venv-{minor}"
    how = install(python, environment, built.wheel)
    if how is None:
        return False
    version = _output([environment / "bin" / "python", "-c", "import platform; print(platform.python_version())"])
    done = subprocess.run(
        [
            environment / "bin" / "python",
            "-W",
            "error::DeprecationWarning:legroom",
            Path(__file__).with_name("smoke.py"),
            LOG,
        ],
        cwd=folder,
        env=environment_variables(),
    )
    print(f"{version}: wheel {how}: {'works without torch' if done.returncode == 0 else 'FAILED'}", flush=True)
    print(f"  {_output([environment / 'bin' / 'pip', 'list', '--format', 'freeze']).replace(chr(10), ' ')}")
    lacking = [name for name in OPTIONAL if not releases_with_wheels(environment / "bin" / "python", name)]
    print(f"  optional packages without a wheel for it: {', '.join(lacking) or 'none'}", flush=True)
    return done.returncode == 0


def try_sdist(minor: int, python: str, built: Built, folder: Path) -> bool:
    """Installed from the sdist; unit tests run out of what was in it."""
    environment = folder / "venv-sdist"
    how = install(python, environment, built.sdist)
    if how is None:
        return False
    pip = [environment / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
    fetched = subprocess.run([*pip, *FOR_TESTS], capture_output=True, text=True, env=environment_variables())
    if fetched.returncode:
        print(f"{', '.join(FOR_TESTS)} CANNOT BE INSTALLED\n{fetched.stderr[-2000:]}")
        return False
    done = subprocess.run(
        [environment / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not real", *UNIT_TESTS],
        cwd=built.unpacked,
        env=environment_variables(),
    )
    print(f"3.{minor}: sdist {how}, unit tests out of it: {'passed' if done.returncode == 0 else 'FAILED'}")
    return done.returncode == 0


def install(python: str, environment: Path, what: Path) -> str | None:
    """Into a new environment, with the pinned versions where this Python has them; how, or None where it cannot be."""
    subprocess.run([python, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
    pinned = subprocess.run(
        [*pip, "-c", REPO / "constraints.txt", what], capture_output=True, text=True, env=environment_variables()
    )
    if pinned.returncode == 0:
        return "installed with constraints.txt"
    free = subprocess.run([*pip, what], capture_output=True, env=environment_variables())
    if free.returncode == 0:
        return "installed with the newest versions (constraints.txt does not apply)"
    print(f"{python}: {what.name} CANNOT BE INSTALLED\n{pinned.stderr[-2000:]}")
    return None


def releases_with_wheels(python: Path, name: str) -> list[str]:
    """The releases of that package which this Python can install without a compiler.

    pip lists them when it is asked for one that does not exist; `pip index` also lists those without a wheel.
    """
    asked = [python, "-m", "pip", "install", "--dry-run", "--no-deps", "--only-binary", ":all:", f"{name}==0.0.0.dev0"]
    done = subprocess.run(asked, capture_output=True, text=True, env=environment_variables())
    listed = re.search(r"\(from versions: ([^)]*)\)", done.stderr)
    if listed is None:
        raise RuntimeError(f"pip does not list the releases of {name}: {done.stderr[-2000:]}")
    return [] if listed[1] in ("", "none") else listed[1].split(", ")


def environment_variables() -> dict[str, str]:
    """This process's variables, without those that would lead back into this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def _output(command: list[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
