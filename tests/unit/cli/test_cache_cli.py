"""`legroom cache` as a person and a program use it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import legroom
from legroom.cli.cache import load as load_command
from legroom.cli.main import run
from legroom.cli.options import translated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the shared cache is Linux's")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of one's own and a file to load."""
    for name in ("shm", "disk"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("LEGROOM_SHM", str(tmp_path / "shm"))
    monkeypatch.setenv("LEGROOM_DIR", str(tmp_path / "disk"))
    monkeypatch.chdir(tmp_path)
    np.save("train.npy", np.arange(24, dtype=np.float32).reshape(6, 4))
    old = 1_600_000_000
    os.utime("train.npy", (old, old))
    return tmp_path


def _json(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, object]:
    assert run(["cache", *arguments, "--json"]) == status
    shown = json.loads(capsys.readouterr().out)
    assert shown["schema"] == f"legroom.cache.{arguments[0]}/1"
    return shown


def _text(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert run(["cache", *arguments]) == status
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_load_list_drop_as_text(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "train.npy: not loaded" in _text(capsys, "list", "train.npy")
    assert "loaded in" in _text(capsys, "load", "train.npy")
    shown = _text(capsys, "list")
    digest = subprocess.run(["md5sum", "train.npy"], capture_output=True, text=True).stdout.split()[0]
    assert f"MD5     {digest}" in shown
    assert "6×4 float32" in shown and "not in use" in shown and "free (limited by" in shown
    assert "copy intact, source unchanged" in _text(capsys, "verify")
    assert "removed 1 entry" in _text(capsys, "drop", "train.npy")
    assert "the cache is empty" in _text(capsys, "list")


def test_a_load_with_the_cache_switched_off_says_that_nothing_stays(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    assert run(["cache", "load", "train.npy", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["entries"][0]["source"]
    assert "LEGROOM_DISABLE is set" in shown.err and "nothing stays in the cache" in shown.err
    monkeypatch.delenv("LEGROOM_DISABLE")
    assert "LEGROOM_DISABLE" not in _text(capsys, "load", "train.npy")


def test_drop_all_says_what_it_removes_and_can_be_tried(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usage = " ".join(_text(capsys, "drop", "--help").split())
    assert "whichever program loaded it" in usage and "--dry-run" in usage
    with legroom.open("train.npy"):
        assert "kept" in _text(capsys, "drop", "--all", "--dry-run", status=1)
    key = legroom.open("train.npy").info.key
    shown = _text(capsys, "drop", "--all", "--dry-run")
    assert "would remove 1 entry" in shown and "train.npy" in shown
    assert _json(capsys, "drop", "train.npy", "--dry-run")["dry_run"] is True
    assert [entry.key for entry in legroom.cache.list_and_verify.entries()] == [key]
    assert "removed 1 entry" in _text(capsys, "drop", "--all")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_drop_all_asks_on_a_terminal_and_nowhere_else(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop(answer: str, *options: str, status: int = 0) -> str:
        if not legroom.cache.list_and_verify.entries():
            legroom.open("train.npy").close()
        monkeypatch.setattr(sys, "stdin", _Terminal(answer))
        return _text(capsys, "drop", "--all", *options, status=status)

    assert "?" not in drop("n\n")  # standard output is no terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for no in ("n\n", "\n", "what\n", ""):
        shown = drop(no, status=1)
        assert shown.startswith("Remove 1 entry (") and shown.endswith(")? [y/N] nothing was removed\n")
    assert "would remove 1 entry" in drop("n\n", "--dry-run")
    assert legroom.cache.list_and_verify.entries()
    assert "? [y/N] removed" in drop("y\n") and not legroom.cache.list_and_verify.entries()
    assert "removed 1 entry" in drop("YES\n")
    for options in (("--yes",), ("--json",)):
        assert "?" not in drop("n\n", *options) and not legroom.cache.list_and_verify.entries()
    assert "?" not in _text(capsys, "drop", "--all")  # there is nothing to remove
    legroom.open("train.npy").close()
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert "?" not in _text(capsys, "drop", "--all") and not legroom.cache.list_and_verify.entries()
    assert "--yes needs --all" in _text(capsys, "drop", "train.npy", "--yes", status=2)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("load only what you need: keys=[…]", "load only what you need: --keys NAME,…"),
        ("keys=[a, b]", "--keys a,b"),
        ("omit keys= to load everything", "omit --keys to load everything"),
        ("不带 keys= 则全部加载", "不带 --keys 则全部加载"),
        ("use hash='md5', which needs no package", "use --hash md5, which needs no package"),
        ("backing='auto'", "--backing auto"),
        ("wait=False was given", "--no-wait was given"),
        ("/data/keys=3/x and hash=1/y", "/data/keys=3/x and hash=1/y"),
        ("https://host/a?hash=1&keys=", "https://host/a?hash=1&keys="),
    ],
)
def test_errors_name_options_instead_of_arguments(text: str, shown: str) -> None:
    assert translated(load_command, text, text, (text,)) == (shown, shown, (shown,))


def test_of_several_files_those_that_can_be_loaded_are(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("more.npz", other=np.zeros(3))
    files = ("nope.npy", "train.npy", "none.npy", "more.npz")
    shown = _text(capsys, "load", *files, status=2)
    assert "loaded 2 of 4 files" in shown and shown.count("loaded in") == 2
    assert shown.count("nope.npy [unreadable-source]") == shown.count("none.npy [unreadable-source]") == 1
    whole = _json(capsys, "load", *files, status=2)
    assert len(whole["entries"]) == 2 and whole["error"]["code"] == "unreadable-source"  # type: ignore[arg-type,index]
    assert [error["source"] for error in whole["errors"]] == ["nope.npy", "none.npy"]  # type: ignore[attr-defined]
    assert "--keys to load everything" in _text(capsys, "load", *files, "--keys", "other", status=2)  # as typed


def test_errors_of_load_can_be_typed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _text(capsys, "load", "train.npy", "--dtype", "uint16", status=2)
    assert "--dtype uint16 cannot be used" in shown and "omit --dtype" in shown and "<u2" not in shown
    assert "its format, npy, states" in shown
    shown = _text(capsys, "load", "train.npy", "--keys", "nope", status=2)
    assert "omit --keys to load everything" in shown
    Path("tokens").write_bytes(b"\xfe\x01\x02\x03")
    assert "pass their type: --dtype uint16" in _text(capsys, "load", "tokens", status=2)
    np.savez("other.npz", x=np.arange(3))
    shown = _text(capsys, "load", "--join", "train.npy", "other.npz", status=2)
    assert f"only {home}/train.npy has array; only {home}/other.npz has x" in shown and "--keys" not in shown
    np.savez("more.npz", x=np.arange(3), y=np.arange(3))
    shown = _text(capsys, "load", "--join", "more.npz", "other.npz", status=2)
    assert f"only {home}/more.npz has y" in shown and "with --keys" in shown
    whole = _json(capsys, "load", "train.npy", "--keys", "nope", status=2)
    assert whole["error"]["fix"] == ["omit --keys to load everything"]  # type: ignore[index]


def test_sizes_are_explained(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "224 B on disk" in _text(capsys, "load", "train.npy", "--backing", "disk")
    assert "224 B on disk, not in use" in _text(capsys, "list")
    assert re.search(
        r"entry and 0 leftovers, to free [\d.]+ KB$", _text(capsys, "gc", "--older", "0s", "--dry-run").strip()
    )
    assert re.search(r"removed 1 entry and 0 leftovers, [\d.]+ KB freed$", _text(capsys, "drop", "train.npy").strip())


@pytest.fixture
def shards(home: Path) -> list[str]:
    """What a shell makes of shard-*.npy, and what is not loaded beside them."""
    for number in range(3):
        np.save(f"shard-{number}.npy", np.full((4, 2), number))
    return ["shard-0.npy", "shard-1.npy", "shard-2.npy"]


def test_several_files_are_listed_shown_verified_and_removed(
    shards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _text(capsys, "load", *shards[:2], "train.npy")
    listed = _json(capsys, "list", *shards)
    assert [Path(one["source"]).name for one in listed["entries"]] == shards[:2]  # type: ignore[index, attr-defined]
    assert listed["missing"] == [shards[2]]
    shown = _text(capsys, "list", *shards)
    assert "shard-2.npy: not loaded" in shown and "shard-1.npy\n  MD5" in shown and "train.npy" not in shown
    assert "shard-2.npy is not loaded" in _text(capsys, "verify", *shards, status=1)
    assert "shard-2.npy is not loaded" in _text(capsys, "info", *shards, status=1)
    assert len(_json(capsys, "verify", *shards[:2])["entries"]) == 2  # type: ignore[arg-type]
    found = _json(capsys, "info", *shards[:2])
    assert found["entries"][0] == found["entry"] and len(found["entries"]) == 2  # type: ignore[index, arg-type]
    assert _text(capsys, "info", *shards[:2]).count("built by") == 2
    gone = _text(capsys, "drop", *shards, status=1)
    assert "removed 2 entries" in gone and "shard-2.npy: not loaded" in gone
    assert [Path(one["source"]).name for one in _json(capsys, "list")["entries"]] == ["train.npy"]  # type: ignore[attr-defined]
    assert "shard-0.npy is not loaded" in _text(capsys, "drop", *shards, status=1)


def test_several_files_also_stand_for_the_entry_of_all_of_them_joined(
    shards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _text(capsys, "load", "--join", *shards)
    assert "12×2" in _text(capsys, "list", *shards) and "12×2" in _text(capsys, "info", *shards)
    assert _json(capsys, "list", *shards)["missing"] == []
    assert _json(capsys, "list", *shards[:2])["missing"] == shards[:2]
    assert "source unchanged" in _text(capsys, "verify", *shards)
    assert "removed 1 entry" in _text(capsys, "drop", *shards)


def test_of_several_files_those_in_use_are_kept(shards: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _text(capsys, "load", *shards)
    with legroom.open(shards[1]):
        gone = _json(capsys, "drop", *shards, status=1)
        assert [len(gone[kind]) for kind in ("removed", "kept", "missing")] == [2, 1, 0]  # type: ignore[arg-type]
        assert "is in use" in _text(capsys, "drop", shards[1], status=1)


def test_a_key_and_a_file_of_one_entry_show_it_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _text(capsys, "load", "train.npy")
    (entry,) = _json(capsys, "list", "train.npy")["entries"]  # type: ignore[misc]
    assert _json(capsys, "list", entry["key"], "train.npy", "train.npy")["entries"] == [entry]


def test_json_has_the_fields_programs_rely_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _json(capsys, "load", "train.npy")
    shown = _json(capsys, "list")
    assert {"path", "size", "used", "free"} <= shown["store"].keys()
    (entry,) = shown["entries"]
    assert {
        "key",
        "source",
        "digest",
        "hash",
        "backing",
        "bytes",
        "arrays",
        "in_use",
        "users",
        "created",
        "last_used",
    } <= entry.keys()
    assert (
        entry["source"] == str(home / "train.npy") and entry["hash"] == "md5" and entry["bytes"] == 96 + 128
    )  # and the header
    (array,) = entry["arrays"].values()
    assert {"shape", "dtype", "bytes"} <= array.keys() and array["shape"] == [6, 4]
    assert _json(capsys, "info", entry["key"][:8])["entry"]["key"] == entry["key"]


def test_what_is_in_use_is_refused_and_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hold = "import legroom, sys; d = legroom.open('train.npy'); print('ready', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        (entry,) = _json(capsys, "list")["entries"]
        assert entry["in_use"] is True
        assert [user["pid"] for user in entry["users"]] == [holder.pid]
        assert entry["users"][0]["privatised"] == 0
        refused = _text(capsys, "drop", "train.npy", status=1)
        assert "[entry-in-use]" in refused and str(holder.pid) in refused and "--force" in refused
        assert "kept" in _text(capsys, "drop", "--all", status=1)
        assert "removed 1 entry" in _text(capsys, "drop", "train.npy", "--force")
    finally:
        holder.communicate(timeout=120)
    assert holder.returncode == 0


def test_saved_counts_every_user_but_the_first(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hold = "import legroom, sys; d = legroom.open('train.npy'); print('ready', flush=True); sys.stdin.read()"
    holders = [
        subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        assert _json(capsys, "list")["saved"] == 2 * (96 + 128)
    finally:
        for holder in holders:
            holder.communicate(timeout=120)


def test_gc_by_age_and_dry_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _json(capsys, "load", "train.npy")
    assert len(_json(capsys, "gc", "--older", "0s", "--dry-run")["removed"]) == 1
    assert len(_json(capsys, "list")["entries"]) == 1
    assert _json(capsys, "gc", "--older", "1d")["removed"] == []
    assert len(_json(capsys, "gc", "--older", "0s")["removed"]) == 1
    assert _json(capsys, "list")["entries"] == []


def test_room_that_is_not_reached_is_a_no(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _text(capsys, "load", "train.npy")
    shown = _text(capsys, "gc", "--free", "900T", "--dry-run", status=1)
    assert "would remove" in shown and "less than requested" in shown
    gone = _json(capsys, "gc", "--free", "900T", status=1)
    assert [one["store"] for one in gone["short"]] == [
        str(home / name / f"legroom-{os.geteuid()}") for name in ("shm", "disk")
    ]
    assert all(one["missing"] > 1 << 40 and one["bound_by"] for one in gone["short"])
    assert _json(capsys, "gc", "--free", "1B")["short"] == []


def test_a_file_that_changed_is_reported_as_changed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _text(capsys, "load", "train.npy")
    np.save("train.npy", np.zeros(7))
    assert "copy intact, source CHANGED" in _text(capsys, "verify", "train.npy", status=1)


def test_an_empty_cache_holds_nothing_in_entries(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _text(capsys, "load", "train.npy")
    _text(capsys, "drop", "--all", "--force")
    shown = " ".join(_text(capsys, "list").split())  # lines are wrapped beside a long path
    assert "the cache is empty" in shown and shown.count("0 B in entries") == 2


def test_a_new_version_makes_the_old_one_stale(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _json(capsys, "load", "train.npy")
    np.save("train.npy", np.arange(24, dtype=np.float32)[::-1].reshape(6, 4))
    _json(capsys, "load", "train.npy")
    assert len(_json(capsys, "list")["entries"]) == 2
    assert len(_json(capsys, "gc", "--stale")["removed"]) == 1
    (entry,) = _json(capsys, "list", "train.npy")["entries"]
    assert _json(capsys, "verify")["entries"][0]["whole"] is True
    assert entry["key"]


def test_the_same_bytes_are_loaded_after_touch_mv_and_cp(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = _json(capsys, "load", "train.npy")["entries"]
    for command in ("touch train.npy", "mv train.npy moved.npy", "cp moved.npy train.npy"):
        subprocess.run(command.split(), check=True)
        path = command.split()[-1]
        (entry,) = _json(capsys, "list", path)["entries"]
        assert entry["key"] == loaded[0]["key"] == _json(capsys, "info", path)["entry"]["key"], command
        assert _json(capsys, "gc", "--stale")["removed"] == [], command
        assert _json(capsys, "load", path)["entries"][0]["built"] is False
    assert len(_json(capsys, "drop", "moved.npy")["removed"]) == 1


def test_a_damaged_copy_is_found(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _json(capsys, "load", "train.npy")
    (entry,) = _json(capsys, "list")["entries"]
    (file,) = Path(entry["store"], entry["key"]).glob("*.npy")
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    file.chmod(0o400)
    assert "DAMAGED" in _text(capsys, "verify", status=1)
    assert _json(capsys, "verify", status=1)["entries"][0]["whole"] is False


def test_what_a_file_was_loaded_as_can_be_dropped_after_it_is_gone(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _json(capsys, "load", "train.npy")
    os.unlink("train.npy")
    assert len(_json(capsys, "drop", "train.npy")["removed"]) == 1


def test_shards_are_joined(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("more.npy", np.zeros((2, 4), dtype=np.float32))
    (entry,) = _json(capsys, "load", "--join", "train.npy", "more.npy")["entries"]
    (array,) = entry["arrays"].values()
    assert array["shape"] == [8, 4]
    assert "train.npy and 1 more: " in _text(capsys, "load", "--join", "train.npy", "more.npy")
    assert "train.npy and 1 more (" in _text(capsys, "verify")


def test_info_shows_the_attributes_of_arrays_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File("train.h5", "w") as file:
        file.attrs["made"] = "by hand"
        file["images"] = np.zeros((2, 4), dtype=np.uint8)
        file["images"].attrs["unit"] = "lux"
    _text(capsys, "load", "train.h5")
    shown = _text(capsys, "info", "train.h5")
    assert '    @unit: "lux"' in shown and '  @made: "by hand"' in shown
    assert "@unit" not in _text(capsys, "list", "train.h5")


def test_the_list_and_the_help_fit_eighty_columns(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _text(capsys, "load", "train.npy")
    told = _text(capsys, "list")
    assert all(len(line) <= 80 for line in told.splitlines() if " " in line.strip()), told
    assert "..." not in _text(capsys, "--help").partition("Commands:")[2]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["drop"], "--all"),
        (["drop", "train.npy", "--all"], "--all"),
        (["gc", "--free", "2 bananas"], "cannot read '2 bananas' as a size"),
        (["gc", "--older", "soon"], "cannot read 'soon' as a duration"),
        (["load"], "FILES"),
        (["load", "nowhere.h5"], "[unreadable-source]"),
        (["load", "train.npy", "--keys", "imgaes"], "[missing-key]"),
        (["load", "train.npy", "--backing", "tape"], "tape"),
        (["unpack"], "No such command"),
    ],
)
def test_the_error_for_bad_input_names_the_remedy(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert part in _text(capsys, *arguments, status=2)


def test_not_loaded_is_a_no(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _text(capsys, "info", "train.npy", status=1)
    assert "[not-loaded]" in shown and "legroom cache load train.npy" in shown
    shown = _text(capsys, "drop", "train.npy", status=1)  # whoever wants it gone need not load it
    assert "[not-loaded]" in shown and "cache load" not in shown
    assert "[not-loaded]" in _text(capsys, "verify", "deadbeef", status=1)


def test_what_is_no_file_is_not_to_be_loaded(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _text(capsys, "drop", "zzzz", status=1)
    assert "[not-loaded]" in shown and "legroom cache list" in shown and "cache load" not in shown


def test_keys_complete_in_the_shell(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _json(capsys, "load", "train.npy")
    key = _json(capsys, "list")["entries"][0]["key"]
    asked = {"_LEGROOM_COMPLETE": "bash_complete", "COMP_WORDS": f"legroom cache info {key[:4]}", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", "from legroom.cli.main import main; main()"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
    )
    assert f"plain,{key}" in done.stdout, done.stderr


def test_shards_named_with_braces_are_one_dataset(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        np.save(f"s-{number}.npy", np.full(3, number))
    assert "s-0.npy and 1 more" in _text(capsys, "load", "s-{0..1}.npy")
    assert "6 int64" in _text(capsys, "list", "s-{0..1}.npy")
    assert "s-2.npy" in _text(capsys, "load", "s-{0..2}.npy", status=2)
    assert "removed 1 entry" in _text(capsys, "drop", "s-{0..1}.npy")
    assert "s-{7..8}.npy: not loaded" in _text(capsys, "list", "s-{7..8}.npy")


def test_a_copy_of_a_loaded_file_is_named_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _text(capsys, "load", "train.npy")
    assert "same content" not in first
    shutil.copy("train.npy", "copy.npy")
    told = _text(capsys, "load", "copy.npy")
    assert (
        f"{Path.cwd()}/copy.npy (same content as {Path.cwd()}/train.npy when that was loaded): " in told
        and "already in the cache" in told
    )


def test_a_copy_is_the_file_that_is_named_and_verified(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _text(capsys, "load", "train.npy")
    shutil.copy("train.npy", "copy.npy")
    with legroom.open("copy.npy") as data:
        assert data.info.names == (f"{home}/copy.npy",) and data.info.sources == (f"{home}/train.npy",)
    np.save("train.npy", np.ones((6, 4), np.float32))
    both = f"{home}/copy.npy (same content as {home}/train.npy when that was loaded)"
    told = _text(capsys, "verify", "copy.npy")
    assert f" {both} " in told and told.endswith("copy intact, source unchanged\n")
    (checked,) = _json(capsys, "verify", "copy.npy")["entries"]
    assert (checked["source"], checked["source_state"]) == (f"{home}/copy.npy", "same")
    told = _text(capsys, "verify", "train.npy", "copy.npy", status=1).splitlines()
    assert len(told) == 2 and f" {home}/train.npy " in told[0] and "source CHANGED" in told[0]
    assert both in told[1] and "source unchanged" in told[1]
    assert _text(capsys, "list", "copy.npy").startswith(both)
    entry = _json(capsys, "info", "copy.npy")["entry"]
    assert (entry["source"], entry["sources"]) == (f"{home}/copy.npy", [f"{home}/train.npy"])
    assert both not in _text(capsys, "list")  # what the entry was built from, where no file was named
    assert f"removed {entry['key'][:12]} {both} " in _text(capsys, "drop", "copy.npy")
