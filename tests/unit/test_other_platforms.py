"""Legroom imports, and doctor answers, where the POSIX modules and calls do not exist.

No macOS or Windows is at hand: a child interpreter is made to look like one. What is then unknown must say so.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PRETEND = """
import sys, os
class Missing:
    names = {"fcntl", "grp", "pwd", "resource", "termios"}
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ImportError(f"pretending there is no {name}")
# These choose their implementation by the real platform: first.
import ctypes, multiprocessing, subprocess, tempfile, click, psutil, numpy, h5py
for name in Missing.names:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
for name in ("geteuid", "getuid", "getgroups", "uname", "statvfs", "sched_getaffinity", "memfd_create", "posix_fallocate",
             "register_at_fork", "fork"):
    if hasattr(os, name):
        delattr(os, name)
sys.platform = PLATFORM
"""

IMPORT_ALL = """
import importlib, pkgutil, legroom
# Classes of torch's own kind: imported where a step is traced, which needs torch anyway.
of_torch = {"legroom.gpu.fake_tensor_trace"}
apart = of_torch | {"legroom.__main__"}
names = [m.name for m in pkgutil.walk_packages(legroom.__path__, "legroom.") if m.name not in apart]
for name in names:
    importlib.import_module(name)
print(len(names))
"""

DOCTOR = """
import legroom.cli.main
sys.exit(legroom.cli.main.run(["doctor", "--json"]))
"""


def _pretend(platform: str, code: str) -> subprocess.CompletedProcess[str]:
    script = PRETEND.replace("PLATFORM", repr(platform)) + code
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_everything_imports(platform: str) -> None:
    done = _pretend(platform, IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_doctor_reports_what_it_cannot_know(platform: str) -> None:
    done = _pretend(platform, DOCTOR)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report["place"]["platform"] == platform
    pools = {pool["name"]: pool for pool in report["pools"]}
    assert pools["shm"]["size"] is None and pools["shm"]["reason"]
    assert pools["ram"]["size"] > 0  # psutil knows it
