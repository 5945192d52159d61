"""Snippets are valid as they stand: parsed by what will read them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from machines import GB, MB, healthy

from legroom.advice.config_snippets_for_shm_size import KINDS, emit
from legroom.advice.fit_on_machine import plan_for
from legroom.advice.memory_need import need
from legroom.messages import cells, speak
from legroom.records.workload import PlannedLoader, Workload
from legroom.units import parse_size

NEED = need(Workload(processes=48, process_shm=23 * MB // 4, process_ram=100 * MB))


def _commands(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_docker() -> None:
    (command,) = _commands(emit("docker", GB))
    assert shlex.split(command) == ["docker", "run", "--shm-size=1g", "$@"]
    (limited,) = _commands(emit("docker", GB, need=NEED))
    assert shlex.split(limited)[3] == "--memory=5888m"  # 48 × 100 MB and 1 GB, up to the next 256 MB


def test_compose() -> None:
    assert yaml.safe_load(emit("compose", GB)) == {"services": {"training": {"shm_size": "1gb"}}}
    limited = yaml.safe_load(emit("compose", GB, need=NEED))["services"]["training"]
    assert limited == {"shm_size": "1gb", "mem_limit": "5888mb"}


def test_kubernetes() -> None:
    pod = yaml.safe_load(emit("kubernetes", GB, need=NEED))
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    (volume,), (container,) = pod["spec"]["volumes"], pod["spec"]["containers"]
    assert volume == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert container["resources"] == {"limits": {"memory": "5888Mi"}}
    plain = yaml.safe_load(emit("kubernetes", GB))
    assert "resources" not in plain["spec"]["containers"][0]  # nothing is known of the processes


def test_no_memory_limit_leaves_out_the_processes() -> None:
    """768 MB of batches are known beside /dev/shm; a limit of 4864 MB would leave nothing to the processes."""
    loader = PlannedLoader(tensors=(96 * MB,), batch_size=64, num_workers=8, prefetch_factor=2)
    unknown = plan_for(Workload(loaders=(loader,)), healthy(), gpus=1, jobs_per_gpu=1).need
    assert "ram" in unknown.at_least
    for kind in ("docker", "compose", "kubernetes", "slurm"):
        text = emit(kind, 4 * GB, need=unknown)
        set_here = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("# "))
        assert not re.search("--memory|mem_limit|memory:|--mem", set_here), text
        comments = re.sub(r"\n *# ", " ", text)
        assert re.search(r"To add one, set \S+ to the RAM of the processes plus 4864", comments), text
        if kind in ("compose", "kubernetes"):
            yaml.safe_load(text)
    known = plan_for(Workload(loaders=(loader,), process_ram=3 * GB), healthy(), gpus=1, jobs_per_gpu=1).need
    assert "--memory=7936m" in emit("docker", 4 * GB, need=known)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("size", [GB, 4 * GB + 4096, 1234567890123 * 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_comments_fit_80_columns_and_change_nothing(
    kind: str, size: int, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak(language)
    for known in (NEED, None):
        text = emit(kind, size, need=known, gpus=8)
        for line in text.splitlines():
            is_setting = line.lstrip().startswith("# - {")  # a line to be taken as it stands
            if "# " in line and not is_setting:
                assert cells(line) <= 80, line
        with monkeypatch.context() as wide:
            wide.setattr("legroom.advice.config_snippets_for_shm_size._COLUMNS", 10_000)
            whole = emit(kind, size, need=known, gpus=8)
        if kind in ("compose", "kubernetes", "kubernetes-warm"):
            parsed, before = yaml.safe_load(text), yaml.safe_load(whole)
            if kind == "kubernetes-warm":  # a comment in a script
                (script,) = parsed["spec"]["template"]["spec"]["containers"][0].pop("args")
                (unwrapped,) = before["spec"]["template"]["spec"]["containers"][0].pop("args")
                assert shlex.split(script, comments=True) == shlex.split(unwrapped, comments=True)
            assert parsed == before
        else:
            assert _commands(text) == _commands(whole)


def test_fstab() -> None:
    fields = emit("fstab", GB).split()
    assert fields == ["tmpfs", "/dev/shm", "tmpfs", "defaults,size=1G", "0", "0"]


def test_slurm() -> None:
    text = emit("slurm", GB, need=NEED, gpus=8)
    assert "#SBATCH --mem=5888M" in text and "#SBATCH --gpus-per-node=8" in text
    assert text.splitlines()[0] == "#!/bin/bash"
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    assert subprocess.run([bash, "-n"], input=text, text=True, capture_output=True).stderr == ""
    # As a node with a full and one with an empty /dev/shm would run it.
    for free, status in (("1", 1), (str(NEED.shm), 0)):
        stub = f"df() {{ printf 'Avail\\n{free}\\n'; }}\n"
        done = subprocess.run([bash, "-c", stub + text], capture_output=True, text=True)
        assert done.returncode == status, done.stderr


@given(st.integers(0, 1 << 44).map(lambda n: n * 4096))
def test_every_size_survives(size: int) -> None:
    (command,) = _commands(emit("docker", size))
    assert parse_size(shlex.split(command)[2].split("=")[1]) == size
    assert parse_size(yaml.safe_load(emit("compose", size))["services"]["training"]["shm_size"]) == size
    pod = yaml.safe_load(emit("kubernetes", size))
    quantity = str(pod["spec"]["volumes"][0]["emptyDir"]["sizeLimit"])
    assert parse_size(quantity + "B" if quantity.endswith("i") else quantity) == size
    assert parse_size(emit("fstab", size).split("size=")[1].split()[0]) == size


def test_the_daemonset_counts_the_pages_it_writes() -> None:
    found = yaml.safe_load(emit("kubernetes-warm", 8 * GB))
    assert found["kind"] == "DaemonSet"
    pod = found["spec"]["template"]
    assert pod["metadata"]["labels"] == found["spec"]["selector"]["matchLabels"]
    [container] = pod["spec"]["containers"]
    limits = container["resources"]
    assert limits["limits"] == limits["requests"] == {"memory": "9Gi"}  # /dev/shm and the process
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert pod["spec"]["volumes"] == [{"name": "shm", "hostPath": {"path": "/dev/shm", "type": "Directory"}}]
    assert "legroom cache load" in container["args"][0]
