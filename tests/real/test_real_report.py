"""report on a real machine: a 64 MB /dev/shm and a dataset in the cache, read back as another machine would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import rigs

LEGROOM = [sys.executable, "-m", "legroom"]


@pytest.mark.real("mount")
def test_the_bundle_shows_what_the_machine_would(tmp_path: Path) -> None:
    data, out = tmp_path / "heartofgold.npy", tmp_path / "report.zip"
    words = " ".join(LEGROOM)
    make = f"{sys.executable} -c 'import numpy, sys; numpy.save(sys.argv[1], numpy.zeros(1 << 20))' {data}"
    script = f"{make} && {words} cache load {data} && {words} report --out {out}; {words} doctor --json"
    done = subprocess.run(
        rigs.small_shm(["sh", "-c", script]),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/home/zaphod",
            "LEGROOM_DIR": str(tmp_path / "store"),
            **({"PYTHONPATH": path} if (path := os.environ.get("PYTHONPATH")) else {}),
        },
    )
    assert done.stderr == ""
    with zipfile.ZipFile(out) as bundle:
        bundle.extractall(tmp_path / "there")
    there = tmp_path / "there"
    (entry,) = json.loads((there / "cache.json").read_text())["entries"]
    assert entry["sources"][0].endswith("/file-1.npy") and entry["bytes"] >= 8 << 20
    texts = [path.read_text() for path in there.rglob("*") if path.is_file()]
    assert not any("heartofgold" in text or "zaphod" in text for text in texts)
    again = subprocess.run(
        [*LEGROOM, "doctor", "--json", "--root", str(there / "machine")], capture_output=True, text=True
    )
    here, elsewhere = json.loads(done.stdout.splitlines()[-1]), json.loads(again.stdout)
    assert again.returncode == 1 and "shm-default-64mb" in {one["code"] for one in elsewhere["findings"]}
    sizes = [
        {pool["name"]: pool["size"] for pool in one["pools"] if pool["name"] in ("shm", "ram")}
        for one in (here, elsewhere)
    ]
    assert sizes[0] == sizes[1] and sizes[0]["shm"] == 64 << 20
    assert here["place"]["kind"] == elsewhere["place"]["kind"]
