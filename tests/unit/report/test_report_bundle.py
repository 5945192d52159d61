"""The bundle: what is in it, that it can be read back, that nothing private is in any byte of it."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import rigs

from legroom.advice.findings import findings
from legroom.cli.main import run
from legroom.errors import DamagedSource, UnreadableSource, UsageError
from legroom.messages import cells
from legroom.probe import process_and_limits
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.snapshot import snapshot
from legroom.report.bundle import CONTENTS, Attachments, RedactedPart, checked_path, pack, redacted, write
from legroom.report.collect import LOG_END, MACHINE, collect, identities, log_end, settings, versions
from legroom.report.redact import Redactor

TREES = sorted(path.name for path in rigs.TREES.iterdir() if (path / "recording.json").is_file())
LOG = """loading /home/zaphod/secret/heartofgold.h5 on magrathea.example.org (10.42.0.7)
login with hf_abcdefghijklmnopqrstuvwx as zaphod@beeblebrox.example
python train.py --h5 heartofgold.h5 --wandb-api-key swordfish1 --batch 16
Traceback (most recent call last):
  File "/home/zaphod/train.py", line 3, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
"""
PRIVATE = ("zaphod", "heartofgold", "magrathea", "10.42.0.7", "hf_abc", "beeblebrox", "swordfish1")


def _bundle(host: Host, asked: Attachments | None = None) -> dict[str, RedactedPart]:
    collected = collect(asked or Attachments(), host)
    return {one.name: one for one in redacted(collected, Redactor(identities(host, collected.files)))}


@pytest.mark.parametrize("tree", TREES)
def test_a_recorded_machine_comes_out_as_a_recording_of_itself(tree: str, tmp_path: Path) -> None:
    host = Host.at(rigs.TREES / tree)
    for name, one in _bundle(host).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one.text, encoding="utf-8", newline="")
    before, after = snapshot(host), snapshot(Host.at(tmp_path / MACHINE))
    assert (after.memory.total, after.memory.available) == (before.memory.total, before.memory.available)
    assert [(level.limit, level.unreclaimable) for level in after.memory.levels] == [
        (level.limit, level.unreclaimable) for level in before.memory.levels
    ]
    assert (after.memory.events.oom_kills, after.memory.peak) == (before.memory.events.oom_kills, before.memory.peak)
    assert (after.shm.size, after.shm.used, after.shm.mounted) == (before.shm.size, before.shm.used, before.shm.mounted)
    assert (after.cpu.affinity, after.cpu.quota) == (before.cpu.affinity, before.cpu.quota)
    assert (after.runtime.kind, after.runtime.root) == (before.runtime.kind, before.runtime.root)
    assert after.pressure == before.pressure or [one.some_avg10 for one in after.pressure] == [
        one.some_avg10 for one in before.pressure
    ]
    about_memory = {finding.code for finding in findings(before) if finding.code.startswith(("ram", "cgroup", "oom"))}
    assert about_memory <= {finding.code for finding in findings(after)}


def test_no_process_is_recorded_and_commands_lose_their_values() -> None:
    parts = _bundle(Host.at(rigs.TREES / "bare-v2"))
    assert not any(name.startswith(f"{MACHINE}/proc/{digit}") for name in parts for digit in "123456789")
    machine = json.loads(parts["box.json"].text)
    assert machine["schema"] == "legroom.report.box/1" and machine["processes"]
    for row in machine["processes"]:
        assert "/" not in row["command"]


@pytest.mark.skipif(sys.platform == "win32", reason="has no such sockets")
@pytest.mark.parametrize("length", [75, 76, 101, 300])
def test_only_the_length_of_the_path_for_temporary_files_is_recorded(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_and_limits, "_moves_away", lambda: False)
    root, folder = tmp_path / "root", "/vogsphere" + "/jeltz" * (length // 6)
    folder = folder[: length - 1].rstrip("/").ljust(length, "z")
    (root / folder[1:]).mkdir(parents=True)
    host = Host(root=root, env={"TMPDIR": folder}, platform="linux", recording={})
    parts = _bundle(host)
    for name, one in parts.items():
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one.text, encoding="utf-8", newline="")
    there = Host.at(tmp_path / "out" / MACHINE)
    before, after = process_and_limits.temporary(host), process_and_limits.temporary(there)
    assert before is not None and after is not None
    assert (after.source, after.socket, after.longest) == (before.source, before.socket, before.longest)
    found = {finding.code for finding in findings(snapshot(there))}
    assert ("tmpdir-too-long" in found) is (length > 75)
    recorded = [name + one.text for name, one in parts.items() if name.startswith(MACHINE)]
    assert recorded and not any("jeltz" in text or "vogsphere" in text for text in recorded)


def test_every_part_is_listed_and_has_nothing_private(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = tmp_path / "train.log", tmp_path / "report.zip"
    log.write_text(LOG)
    assert run(["report", "--log", str(log), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.index("not replaced: names of directories") < said.index("Check it before you send it.")
    assert "training.log" in said and "machine/" in said
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert os.listdir(tmp_path).count("report.zip") == 1 and len(os.listdir(tmp_path)) == 2
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    contents = texts.pop(CONTENTS)
    assert set(texts) == {line.split("  ")[0] for line in contents.split("\n\n")[0].splitlines()}
    assert json.loads(texts["explain.json"])["verdict"] == "gpu-oom"
    assert "CUDA out of memory. Tried to allocate 2 GiB" in texts["training.log"]
    files = re.findall(r"file-\d+\.h5", texts["training.log"])  # processes of this machine may have others
    assert len(files) == 2 and len(set(files)) == 1
    assert re.search(r'"/home/user-\d+/train\.py"', texts["training.log"])  # likewise: other users
    everything = "\n".join([contents, *texts, *texts.values()]).casefold()
    assert not [secret for secret in PRIVATE if secret in everything]
    assert str(tmp_path).casefold() not in everything


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_table_is_wrapped_not_cut(
    language: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["report", "--lang", language, "--out", str(tmp_path / "r.zip")]) == 0
    table = capsys.readouterr().out.split(str(tmp_path))[0]
    assert "…" not in table and all(cells(line) <= 80 for line in table.splitlines())


def test_a_tar_has_the_same_parts_and_no_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.tar.gz"
    assert run(["report", "--json", "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "legroom.report/1" and report["bytes"] == out.stat().st_size
    with tarfile.open(out) as bag:
        members = bag.getmembers()
    assert [(member.name, member.size) for member in members] == [
        (row["name"], row["bytes"]) for row in report["contents"]
    ]
    assert all((member.uname, member.gname, member.uid, member.mode) == ("", "", 0, 0o600) for member in members)


def test_show_prints_it_all_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["report", "--show"]) == 0
    assert "==> box.json <==" in capsys.readouterr().out
    assert run(["report", "--show", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["path"] is None and all("text" in row for row in report["contents"])
    assert os.listdir(tmp_path) == []


def test_no_file_is_overwritten_or_half_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "report.zip"
    there.write_text("mine")
    assert run(["report", "--out", str(there)]) == 2
    assert "already exists" in capsys.readouterr().err
    with pytest.raises(UsageError, match="already exists"):  # made by somebody in between
        write(b"new", str(there))
    assert there.read_text() == "mine" and os.listdir(tmp_path) == ["report.zip"]
    with pytest.raises(UsageError, match="cannot write"):
        write(b"new", str(tmp_path / "no" / "report.zip"))
    with pytest.raises(UsageError, match="unknown archive format"):
        checked_path("report.rar")


@pytest.mark.parametrize(("number", "full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_a_full_disk_is_not_called_a_directory_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, full: bool
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UsageError) as refused:
        write(b"new", str(tmp_path / "a.zip"))
    told = "\n".join(refused.value.fix)
    assert ("the disk is full" in told and f"df -h {tmp_path}" in told) is full
    assert ("that you can write to" in told) is not full
    assert os.listdir(tmp_path) == []


def test_no_file_is_overwritten_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    write(b"new", str(tmp_path / "a.zip"))
    assert (tmp_path / "a.zip").read_bytes() == b"new"
    with pytest.raises(UsageError, match="already exists"):
        write(b"newer", str(tmp_path / "a.zip"))
    assert os.listdir(tmp_path) == ["a.zip"]


def test_two_reports_in_one_second_have_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("legroom.cli.report.time.strftime", lambda _: "now")
    assert run(["report", "--json"]) == run(["report", "--json"]) == 0
    assert sorted(os.listdir(tmp_path)) == ["now-2.zip", "now.zip"]


def test_the_same_parts_make_the_same_archive() -> None:
    parts = [RedactedPart("a.txt", "", "ä"), RedactedPart("b/c.txt", "", "")]
    assert pack(parts, "x.zip", 1e9) == pack(parts, "y.zip", 1e9)
    with tarfile.open(fileobj=io.BytesIO(pack(parts, "x.tgz", 1e9))) as bag:
        assert bag.getnames() == ["a.txt", "b/c.txt"]


@pytest.mark.parametrize("clock", [0.0, -1.0, 1e10])
@pytest.mark.parametrize("name", ["x.zip", "x.tgz"])
def test_a_clock_outside_the_years_of_a_zip_does_not_prevent_a_report(clock: float, name: str) -> None:
    assert pack([RedactedPart("a.txt", "", "ä")], name, clock)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no fifos here")
@pytest.mark.parametrize("option", ["--log", "--run", "--watch"])
def test_a_pipe_is_refused_and_not_waited_for(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (str(tmp_path / "fifo"), "/dev/zero"):
        assert run(["report", option, path, "--show"]) == 2
        assert "not a regular file" in capsys.readouterr().err


def test_why_the_cache_was_left_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError("the store is gone")  # without a number

    monkeypatch.setattr("legroom.cache.list_and_verify.entries", refuse)
    assert collect(Attachments()).left_out == ("cache.json: the store is gone",)


def test_a_long_log_is_cut_between_lines() -> None:
    line = b"token=abcdefgh and so on\n"
    data = (line * (LOG_END // len(line) + 1))[-LOG_END:]
    text = log_end(data)
    assert text.startswith("token=") and len(text) > LOG_END - 100
    assert log_end(b"x" * LOG_END) == ""
    assert log_end(b"short") == "short"


def test_the_ends_of_a_run_report_and_a_watch_log_are_attached(tmp_path: Path) -> None:
    story = {"schema": "legroom.run/1", "command": ["python", "t.py", "--token", "abc123x"], "attempts": []}
    story["attempts"] = [{"number": 1, "readings": [{"when": at} for at in range(500)]}]
    (tmp_path / "run.json").write_text(json.dumps(story))
    alarm = {"code": "shm-level", "pool": "shm", "level": "critical", "since": 5.0, "message": "m"}
    row, idle = {"pid": 1, "command": "/x/python /y/t.py --data /z", "rss": 7}, {"pid": 1, "unchanged_since": 3.0}
    moment = {"schema": "legroom.watch/1"}
    lines = [json.dumps({**moment, "clock": float(at), "alarms": [alarm] if at > 3 else [],
                         "processes": [row if at == 3 else idle, {"pid": 2, "unchanged_since": -5.0}],
                         **({"entries": [{"bytes": 5}]} if at == 2 else {"unchanged_since": {"entries": 2.0}})})
             for at in range(9)]  # fmt: skip
    (tmp_path / "watch.jsonl").write_text("\n".join([*lines, '{"schema": "legroom.wa']))
    asked = Attachments(run=str(tmp_path / "run.json"), watch=str(tmp_path / "watch.jsonl"))
    parts = _bundle(Host.at(rigs.TREES / "docker-v2"), asked)
    ran, watched = json.loads(parts["run.json"].text), json.loads(parts["watch.json"].text)
    assert ran["command"][-1] == "<secret>" and ran["attempts"][0]["readings"][-1] == {"when": 499}
    assert len(ran["attempts"][0]["readings"]) == 60
    assert len(watched["alarms"]) == 1 and watched["last"]["clock"] == 8
    assert watched["last"]["entries"] == [{"bytes": 5}] and "unchanged_since" not in watched["last"]
    first, lost = watched["last"]["processes"]
    assert first == {**row, "command": "python t.py --data …"} and lost == {"pid": 2, "unchanged_since": -5.0}


@pytest.mark.parametrize(("option", "code"), [("--run", DamagedSource), ("--watch", DamagedSource)])
def test_attachments_of_another_kind_are_refused(
    option: str, code: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"schema": "something.else/1"}')
    assert run(["report", option, str(wrong), "--show"]) == 2
    assert f"[{code.code}]" in capsys.readouterr().err
    for missing in (option, "--log"):
        assert run(["report", missing, str(tmp_path / "no"), "--show"]) == 2
        assert f"[{UnreadableSource.code}]" in capsys.readouterr().err


def test_only_legroom_variables_are_listed_and_secrets_hidden() -> None:
    environment = {"LEGROOM_DIR": "/x", "LEGROOM_WEB_TOKEN": "abc", "HF_TOKEN": "t", "PATH": "/bin"}
    assert settings(environment) == {"LEGROOM_DIR": "/x", "LEGROOM_WEB_TOKEN": "<secret>"}


def test_versions_import_nothing() -> None:
    before = set(sys.modules)
    found = versions()
    assert found["packages"]["numpy"] and found["python"].startswith("3.")
    assert not {"torch", "lightning", "transformers"} & (set(sys.modules) - before)


def test_private_names_of_a_machine(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nzaphod:x:1000:1000::/home/zaphod:/bin/sh\nford:x:1001:1::/srv/towel:/bin/sh\n"
        "www-data:x:33:33::/var/www:/bin/sh\nbroken\n"
    )
    (tmp_path / "etc" / "hostname").write_text("magrathea.example.org\n")
    env = {
        "HF_TOKEN": "abcdefgh",
        "SSH_AUTH_SOCK": "/run/user/1000/x",
        "SUDO_USER": "trillian",
        "MASTER_ADDR": "10.0.0.1",
    }
    found = identities(Host(root=tmp_path, env=env, recording={"uid": 0}), ["/data/a b.h5", "/data/dir.zarr/"])
    assert found.users == {"root", "zaphod", "ford", "trillian"}
    assert found.homes == {"/srv/towel"}
    assert found.hosts == {"magrathea.example.org", "magrathea"}
    assert found.files == {"a b.h5", "dir.zarr"} and found.secrets == {"abcdefgh"}
