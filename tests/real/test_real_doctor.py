"""doctor against the real thing: a 64 MB /dev/shm, a memory cgroup, a real OOM kill, a swap file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import rigs

MB = 1 << 20
DOCTOR = [sys.executable, "-m", "legroom", "doctor"]


def _report(command: list[str]) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def _codes(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["code"]: finding for finding in report["findings"]}


def _pool(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(pool for pool in report["pools"] if pool["name"] == name)


@pytest.mark.real("mount")
def test_a_64_mb_shm_is_critical_and_the_fix_is_for_this_runtime() -> None:
    status, report = _report(rigs.small_shm([*DOCTOR, "--json"]))
    assert status == 1
    assert _pool(report, "shm")["size"] == 64 * MB
    finding = _codes(report)["shm-default-64mb"]
    assert finding["severity"] == "critical"
    fix = "\n".join(finding["fix"])
    expected = {"bare": "mount -o remount,size=", "docker": "--shm-size=", "kubernetes": "emptyDir"}
    assert expected.get(report["place"]["kind"], "shm") in fix
    assert "check:\ndf -h /dev/shm" in fix


@pytest.mark.real("mount")
def test_the_fix_works_when_typed() -> None:
    """The remount that doctor offers to a root with mount rights, run word for word."""
    script = (
        f'{sys.executable} -m legroom doctor --json > "$1"; '
        'step=$(jq -r \'.findings[] | select(.code == "shm-default-64mb") | .fix[0]\' "$1" | sed -n 2p); '
        'eval "$step" && exec ' + " ".join([*DOCTOR, "--json"])
    )
    if subprocess.run(["which", "jq"], capture_output=True).returncode:
        pytest.skip("jq is not installed")
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".json") as before:
        _, after = _report(rigs.small_shm(["sh", "-c", script, "sh", before.name]))
        first = json.loads(Path(before.name).read_text())
    if not first["place"]["may_mount"]:
        pytest.skip("doctor does not offer a remount here")
    assert "shm-default-64mb" not in _codes(after)
    assert _pool(after, "shm")["size"] >= 512 * MB


@pytest.mark.real("mount")
def test_a_nearly_full_shm_names_the_leftovers() -> None:
    script = "head -c 55000000 /dev/zero > /dev/shm/torch_999999999_2_3 && touch -d '1 hour ago' /dev/shm/torch_999999999_2_3 && exec \"$@\""
    status, report = _report(rigs.small_shm(["sh", "-c", script, "sh", *DOCTOR, "--json"]))
    codes = _codes(report)
    assert status == 1
    assert {"shm-nearly-full", "shm-leftovers"} <= codes.keys()
    assert "rm /dev/shm/torch_999999999_2_3" in "\n".join(codes["shm-leftovers"]["fix"])


@pytest.mark.real("cgroup")
def test_the_ram_pool_is_the_cgroups_whatever_the_host_has() -> None:
    with rigs.memory_cgroup(300 * MB) as group:
        _, report = _report(group.command([*DOCTOR, "--json"]))
    assert _pool(report, "ram")["size"] == 300 * MB
    assert 0 < _pool(report, "ram")["free"] < 300 * MB
    assert "cgroup-below-host" in _codes(report)
    assert "oom-kills-seen" not in _codes(report)


@pytest.mark.real("cgroup")
def test_a_real_oom_kill_is_seen() -> None:
    with rigs.memory_cgroup(300 * MB) as group:
        victim = subprocess.run(group.command([sys.executable, "-c", "bytearray(500 << 20)"]))
        assert victim.returncode == -9 and group.oom_kills() == 1
        _, report = _report(group.command([*DOCTOR, "--json"]))
    finding = _codes(report)["oom-kills-seen"]
    assert "1 process" in finding["message"] and "in this cgroup" in finding["message"]


@pytest.mark.real("cgroup", "swap")
def test_swap_in_use_is_seen() -> None:
    hold = "import time; x = bytearray(b'x') * (220 << 20); print('ready', flush=True); time.sleep(600)"
    with rigs.swap_file(400 * MB), rigs.memory_cgroup(120 * MB, swap=None) as group:
        holder = subprocess.Popen(group.command([sys.executable, "-c", hold]), stdout=subprocess.PIPE)
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
            time.sleep(0.2)
            _, report = _report([*DOCTOR, "--json", "--job", str(holder.pid)])
        finally:
            holder.kill()
            holder.wait()
            holder.stdout.close()
    finding = _codes(report)["swap-in-use"]
    assert "swapping now" in finding["message"]
    assert _pool(report, "swap")["used"] > 50 * MB
    assert report["job"]["held"]["swap"] > 50 * MB


@pytest.mark.real("user")
def test_needs_no_rights() -> None:
    done = subprocess.run(
        rigs.as_user(12345, [*DOCTOR, "--json"]), capture_output=True, text=True, timeout=240, cwd="/"
    )
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report["place"]["root"] is False and report["place"]["may_mount"] is False
    assert all(
        "mount -o remount" not in step or "administrator" in step for f in report["findings"] for step in f["fix"]
    )


@pytest.mark.real("mount")
def test_what_it_offers_in_64_mb_is_what_check_accepts() -> None:
    script = (
        f'row=$("{sys.executable}" -m legroom doctor --plain | grep -o "prefetch_factor=1 *batches up to .*"); '
        f'size=$(echo "$row" | sed "s/.*up to //; s/ //"); echo "$size"; '
        f'"{sys.executable}" -m legroom check --sample-bytes "$size" --batch 1 --workers 1 --prefetch 1'
    )
    done = subprocess.run(rigs.small_shm(["sh", "-c", script]), capture_output=True, text=True, timeout=240, cwd="/")
    assert done.returncode == 0 and "Verdict: fits" in done.stdout, done.stdout + done.stderr
    assert done.stdout.split("\n")[0].endswith("MB")
