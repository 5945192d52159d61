"""Runs the tests of formats, cache and loaders with the oldest and with the newest packages that pyproject.toml allows.

    make test-versions
    python tests/release/versions.py --only oldest --keep FOLDER      one of the environments, which is kept

Both install the wheel, with all extras whose packages Legroom reads data with, into an environment of the oldest
supported Python. "oldest" has the release of each package that is its lower bound in pyproject.toml, "newest" whatever
pip finds. torch is the one of constraints.txt in both: for the oldest, see `make test-torch`. A package that has
dropped this Python has a newer release: "newest-python" has it, with the newest Python here, and without torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).parent))

from pythons import MINORS, environment_variables, find
from release_build import REPO, Built, build

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
EXTRAS = ("parquet", "zarr", "hash", "plugins")  # what data are read with
FOR_TESTS = ("dill", "hypothesis", "lmdb", "pytest", "pytest-timeout", "pyyaml", "safetensors", "webdataset")
SHOWN = ("numpy", "pyarrow", "h5py", "zarr", "torch")
# What calls these packages. Tests of locks, kills and groups of processes take most of the suite's time and call none.
WITHOUT_TORCH = (
    "tests/contract/test_formats.py",
    "tests/unit/formats",
    *(f"tests/unit/cache/test_cache_{name}.py" for name in (
        "open", "cached_arrays_and_tables", "tables", "checksums", "freeze", "frozen_encoding",
    )),
    "tests/unit/cli/test_cache_cli.py",
    "tests/unit/cli/test_doctor.py",
    "tests/unit/cli/test_cli_plan.py",
    "tests/unit/probe/test_probe_gpu_devices.py",
    "tests/unit/probe/test_probe_ram_swap_and_pressure.py",
    "tests/unit/test_other_platforms.py",
)  # fmt: skip
WITH_TORCH = (
    *WITHOUT_TORCH,
    "tests/unit/cache/test_cache_token_files.py",
    "tests/contract/test_contract_batches.py",
    "tests/contract/test_contract_dataloader.py",
    *(f"tests/unit/loader/test_{name}.py" for name in (
        "batches_buffers", "batches_groups", "batches_iterator", "batches_windows", "dataloader", "dataloader_nested_collate", "stream",
        "stream_errors", "stream_formats", "stream_shards", "stream_torch",
    )),
)  # fmt: skip

TABLES, ZARR = "tests/unit/formats/test_formats_table_readers.py", "tests/unit/formats/test_formats_zarr_reader.py"
STREAM = "tests/unit/loader/test_stream_errors.py"
FUZZ = "tests/unit/formats/test_formats_fuzz.py::test_a_damaged_file_is_an_error_or_right"
CREATE_ARRAY = "Group.create_array() of zarr 3.0.8 has no argument data, with which the test writes its file"
# Tests that are left out with the lower bounds, and why.
NOT_WITH_THE_OLDEST = {
    f"{TABLES}::test_the_footer_is_read_as_pyarrow_reads_it": "pyarrow 16 writes no size statistics",
    f"{TABLES}::test_memory_stays_small_while_a_large_row_group_is_written": "pyarrow 16 takes more than 25 MB",
    f"{TABLES}::test_a_stream_that_replaces_a_dictionary_is_refused": "pyarrow 16 cannot write such a stream this way",
    f"{STREAM}::test_a_batch_larger_than_the_bound_is_refused_at_once": "without size statistics it is refused later",
    f"{STREAM}::test_what_cannot_be_decoded_within_the_bound_is_refused_with_numbers[page]": (
        "pyarrow 16 has no max_rows_per_page, with which the test writes its file"
    ),
    f"{ZARR}::test_shards_are_read_whole": CREATE_ARRAY,
    f"{ZARR}::test_large_arrays_are_read_in_pieces_cut_between_chunks": CREATE_ARRAY,
    f"{ZARR}::test_strings_of_variable_length_are_refused_by_name": CREATE_ARRAY,
    f"{ZARR}::test_a_damaged_chunk_is_detected": CREATE_ARRAY,
}


@dataclass(frozen=True)
class Case:
    """An environment, and the tests that are run in it."""

    name: str
    minor: int  # of Python
    oldest: bool
    torch: bool

    @property
    def tests(self) -> tuple[str, ...]:
        return WITH_TORCH if self.torch else WITHOUT_TORCH


def cases() -> list[Case]:
    """Those that can be tried with the Pythons here."""
    here = [minor for minor in MINORS if find(minor) is not None]
    if not here:
        return []
    found = [Case("oldest", here[0], oldest=True, torch=True), Case("newest", here[0], oldest=False, torch=True)]
    if here[-1] != here[0]:
        found.append(Case("newest-python", here[-1], oldest=False, torch=False))
    return found


def claimed(extras: tuple[str, ...] = EXTRAS, base: bool = True) -> Iterator[Requirement]:
    """What the base install and these extras require on this platform."""
    of_extras = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    for line in [*(PROJECT["dependencies"] if base else ()), *of_extras]:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            yield requirement


def oldest(requirement: Requirement) -> str:
    """Its lower bound, which must be a release that has a wheel: pip fails otherwise, and the bound has to be raised."""
    (bound,) = [one.version for one in requirement.specifier if one.operator == ">="]
    return f"{requirement.name}=={bound}"


def pinned(name: str) -> str:
    """The line of constraints.txt for that package."""
    return next(line for line in (REPO / "constraints.txt").read_text().splitlines() if line.startswith(f"{name}=="))


def requirements(case: Case, built: Built) -> list[str]:
    """What pip installs, all in one call, so that it also shows whether the lower bounds go together."""
    tests = [line for line in PROJECT["optional-dependencies"]["test"] if Requirement(line).name in FOR_TESTS]
    packages = [oldest(one) for one in claimed()] if case.oldest else []
    torch = [pinned("torch")] if case.torch else []
    return [f"{built.wheel}[{','.join(EXTRAS)}]", *packages, *torch, *tests]


def try_case(case: Case, built: Built, folder: Path) -> bool:
    """Whether the packages can be installed and the tests pass."""
    base = find(case.minor)
    assert base is not None
    environment = folder / case.name
    subprocess.run([base, "-m", "venv", "--clear", environment], check=True)
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--only-binary", ":all:"]
    wanted = requirements(case, built)
    done = subprocess.run([*pip, *wanted], capture_output=True, text=True, env=environment_variables())
    if done.returncode:
        print(f"{case.name}: CANNOT BE INSTALLED: {' '.join(wanted)}\n{done.stderr[-4000:]}")
        return False
    if case.oldest and "yanked" in done.stderr:
        print(f"{case.name}: A LOWER BOUND IS A RELEASE THAT ITS AUTHORS HAVE WITHDRAWN\n{done.stderr[-4000:]}")
        return False
    print(f"{case.name}: {versions(python)}", flush=True)
    left_out = NOT_WITH_THE_OLDEST if case.oldest else {}
    left_out |= {} if case.torch else {f"{FUZZ}[torch]": "it needs torch"}
    for test, why in left_out.items():
        print(f"{case.name}: left out: {test}: {why}")
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not real and not soak",
        *(f"--deselect={test}" for test in left_out),
    ]
    command = [python, "-m", "pytest", *options, *case.tests]
    passed = subprocess.run(command, cwd=built.unpacked, env=environment_variables()).returncode == 0
    print(f"{case.name}: {'passed' if passed else 'FAILED'}", flush=True)
    return passed


def versions(python: Path) -> str:
    """Python and the packages that matter most, as installed there."""
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "freeze"], capture_output=True, text=True, check=True
    ).stdout
    found = dict(line.split("==", 1) for line in listed.splitlines() if "==" in line)
    shown = [f"{name} {found[name]}" for name in SHOWN if name in found]
    version = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    others = {one.name for one in claimed()} - set(SHOWN)
    return ", ".join([version, *shown, *(f"{name} {found[name]}" for name in sorted(others) if name in found)])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("oldest", "newest", "newest-python"))
    parser.add_argument("--keep", type=Path, help="where the environments are made and left")
    asked = parser.parse_args()
    chosen = [case for case in cases() if asked.only in (None, case.name)]
    if not chosen:
        print("no Python here for it")
        return 1
    with tempfile.TemporaryDirectory(prefix="legroom-versions-") as scratch:
        folder = asked.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        built = build(Path(scratch))
        failed = [case.name for case in chosen if not try_case(case, built, folder)]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
