"""``legroom.open`` of objects on a server: bytes, identity, keys, resume, faults, errors, credentials."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import pickle
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import legroom
from legroom import errors
from legroom.cache import drop_and_gc, list_and_verify, source_digest_records
from legroom.cache.download import PIECE
from legroom.remote import object_store, remote_errors_and_retries
from object_server import Objects, faulty_proxy, object_server

Encode = Callable[[Any], bytes]
ROWS = np.arange(2_000_000, dtype=np.float32).reshape(-1, 8)  # 8 MB: eight pieces


def _work(shm: Path) -> list[str]:
    return [
        name
        for root in (shm, shm.parent.parent / "disk" / shm.name)
        for name in os.listdir(root / "work")
        if name != "used"
    ]


def _written(shm: Path, pieces: int) -> None:
    """Wait until a download has written so many pieces."""
    deadline = time.monotonic() + 60
    while sum(path.stat().st_size // 16 for path in shm.glob("work/download-*/pieces")) < pieces:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _first_byte_asked_for(server: Objects, since: int) -> int:
    """Of the requests after the first ``since``. What was sent is no measure: the server may still be answering a
    request of the attempt before."""
    return min(int(span.removeprefix("bytes=").partition("-")[0]) for _, span in server.requests[since:] if span)


def test_open_gives_the_bytes_and_leaves_no_download(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS)) as server:
        with legroom.open(server.url("x.npy")) as data:
            assert np.array_equal(data["array"], ROWS) and data.info.sources == (server.url("x.npy"),)
            key = data.info.key
        assert server.sent == len(server.data["x.npy"])
        asked = len(server.requests)
        with legroom.open(server.url("x.npy")) as again:
            assert again.info.key == key
        assert len(server.requests) == asked  # known for a while without asking
        legroom.open(server.url("x.npy"), revalidate=True).close()
        assert server.requests[asked:] == [("HEAD", "")]
    assert _work(shm) == []


def test_the_same_bytes_on_disk_and_remote_are_one_entry(shm: Path, npy: Encode, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(npy(ROWS))
    with (
        object_server(x__npy=npy(ROWS)) as server,
        legroom.open(server.url("x.npy")) as remote,
        legroom.open(tmp_path / "x.npy") as local,
    ):
        assert local.info.key == remote.info.key


def test_a_replaced_object_is_noticed(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS)) as server:
        legroom.open(server.url("x.npy")).close()
        server.data["x.npy"] = npy(ROWS + 1)
        with legroom.open(server.url("x.npy")) as stale:
            assert stale["array"][0, 0] == 0  # within LEGROOM_REMOTE_FRESH
        with legroom.open(server.url("x.npy"), revalidate=True) as fresh:
            assert fresh["array"][0, 0] == 1
        with legroom.open(server.url("x.npy")) as now:
            assert now["array"][0, 0] == 1


def test_no_fresh_time_asks_each_time(shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGROOM_REMOTE_FRESH", "0")
    with object_server(x__npy=npy(ROWS)) as server:
        legroom.open(server.url("x.npy")).close()
        server.data["x.npy"] = npy(ROWS + 1)
        with legroom.open(server.url("x.npy")) as fresh:
            assert fresh["array"][0, 0] == 1


@pytest.mark.parametrize("missing", ["etags", "ranges", "lengths"])
def test_servers_that_offer_less(shm: Path, npy: Encode, missing: str) -> None:
    """No version: hashed each time. No ranges or no length: one request."""
    with object_server(x__npy=npy(ROWS[:1000])) as server:
        setattr(server, missing, False)
        for _ in range(2):
            with legroom.open(server.url("x.npy"), revalidate=True) as data:
                assert np.array_equal(data["array"], ROWS[:1000])
        reads = [span for method, span in server.requests if method == "GET"]
        assert all(span == "" for span in reads)
        if missing != "lengths":  # fsspec asks by GET for a length that HEAD does not give
            assert len(reads) == (2 if missing == "etags" else 1)
    assert _work(shm) == []


def test_an_object_in_one_request_is_asked_for_again_as_often_and_with_the_pauses_of_any_request(
    shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_errors_and_retries, "ATTEMPTS", 3)
    monkeypatch.setattr(remote_errors_and_retries, "_FIRST_PAUSE", 1.0)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    pauses: list[float] = []
    usual = object_store.RemoteObject.__init__

    def without_sleep(self: Any, url: Any) -> None:
        usual(self, url)
        self.slept = pauses.append

    monkeypatch.setattr(object_store.RemoteObject, "__init__", without_sleep)
    with object_server(x__npy=npy(ROWS[:1000])) as server:
        server.ranges, server.busy = False, 2
        with legroom.open(server.url("x.npy")) as data:
            assert np.array_equal(data["array"], ROWS[:1000])
        assert pauses == [1.0, 2.0]
        server.data["y.npy"], server.busy = server.data["x.npy"], 3
        with pytest.raises(errors.RemoteError, match="503"):
            legroom.open(server.url("y.npy"))
        assert pauses == [1.0, 2.0] * 2


def test_an_object_in_one_request_that_is_cut_begins_again(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS)) as server, faulty_proxy(server.port) as faults:
        server.ranges = False
        faults.cut_after = lambda number: 100_000 if number < 3 else None
        with legroom.open(f"http://127.0.0.1:{faults.port}/x.npy") as data:
            assert np.array_equal(data["array"], ROWS)


def test_shards_are_joined_in_order(shm: Path, npy: Encode) -> None:
    with object_server(a__npy=npy(ROWS[:100]), b__npy=npy(ROWS[100:300])) as server:
        with legroom.open([server.url("a.npy"), server.url("b.npy")]) as data:
            assert np.array_equal(data["array"], ROWS[:300])
        with legroom.open([server.url("b.npy"), server.url("a.npy")]) as data:
            assert np.array_equal(data["array"][200:], ROWS[:100])


def test_memory_protocol_and_patterns(shm: Path, npy: Encode) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for number in range(3):
        memory.pipe_file(f"/shards/{number}.npy", npy(ROWS[number * 10 : number * 10 + 10]))
    try:
        with legroom.open("memory://shards/*.npy") as data:
            assert np.array_equal(data["array"], ROWS[:30])
        with pytest.raises(errors.NoSuchObject, match="nothing matches"):
            legroom.open("memory://shards/*.h5")
        with pytest.raises(errors.UnsupportedData, match="directory of objects"):
            legroom.open("memory://shards")
    finally:
        memory.rm("/shards", recursive=True)


# Only what keys= needs.


def _hdf5() -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as h5:
        h5["small"] = ROWS[:100]
        h5["large"] = np.arange(6 << 20, dtype=np.uint8)
        h5.create_dataset("packed", data=ROWS[:5000], chunks=(500, 8), compression="gzip")
    return file.getvalue()


def _npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, small=ROWS[:100], large=np.arange(6 << 20, dtype=np.uint8), packed=ROWS[:5000])
    return file.getvalue()


def _safetensors() -> bytes:
    from safetensors.numpy import save

    return save({"small": ROWS[:100], "large": np.arange(6 << 20, dtype=np.uint8), "packed": ROWS[:5000]})


def _parquet() -> bytes:
    file = io.BytesIO()
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "small": np.arange(400_000, dtype=np.int8),
            "large": rng.standard_normal((400_000, 2)).view("V16").ravel().view(np.complex128).real,
        }
    )
    table = table.append_column("more", pa.array(rng.integers(0, 1 << 60, 400_000))).append_column(
        "rest", pa.array(rng.integers(0, 1 << 60, 400_000))
    )
    pq.write_table(table, file)
    return file.getvalue()


@pytest.mark.parametrize("name", ["x.h5", "x.npz", "x.safetensors"])
@pytest.mark.parametrize("key", ["small", "packed"])
def test_keys_read_only_what_they_need(shm: Path, name: str, key: str) -> None:
    content = {"x.h5": _hdf5, "x.npz": _npz, "x.safetensors": _safetensors}[name]()
    want = ROWS[:100] if key == "small" else ROWS[:5000]
    with object_server() as server:
        server.data[name] = content
        with legroom.open(server.url(name), keys=key) as data:
            entry = data.info
            assert np.array_equal(data[key], want) and entry.hash == "version"
            assert data.info.versions == (f"etag {server.etag(name).strip(chr(34))} {len(content)}",)
        assert server.sent < len(content) * 0.75
        with legroom.open(server.url(name), keys=key) as again:  # attached, though nothing was hashed
            assert again.info.key == entry.key
        sent = server.sent
        with legroom.open(server.url(name)) as whole:
            entry = whole.info
            assert entry.hash == "md5" and np.array_equal(whole[key], want)
        assert server.sent - sent == len(content)
        with legroom.open(server.url(name), keys=key) as served:  # by the whole entry
            assert served.info.key == entry.key
    assert _work(shm) == []


def test_keys_of_parquet(shm: Path) -> None:
    content = _parquet()
    want = pq.read_table(io.BytesIO(content), columns=["small"])["small"].to_numpy()
    with object_server() as server:
        server.data["x.parquet"] = content
        with legroom.open(server.url("x.parquet"), keys="small") as data:
            assert np.array_equal(data["small"], want) and data.info.hash == "version"
        assert server.sent < len(content) * 0.75


def test_an_hdf5_file_that_refers_to_others_is_refused(shm: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as h5:
        h5["x"] = ROWS[:10]
    with h5py.File(tmp_path / "links.h5", "w") as h5:
        h5["x"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")
    with object_server() as server:
        server.data["links.h5"] = (tmp_path / "links.h5").read_bytes()
        for keys in (None, "x"):
            with pytest.raises(errors.SourceError, match=r"refers to other files|other\.h5"):
                legroom.open(server.url("links.h5"), keys=keys)


# Broken connections, kills, resume.


def test_cut_connections_are_resumed(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS)) as server, faulty_proxy(server.port) as faults:
        faults.cut_after = lambda number: 200_000 if number < 12 else None  # of 8 MB
        with legroom.open(f"http://127.0.0.1:{faults.port}/x.npy") as data:
            assert np.array_equal(data["array"], ROWS)
        assert faults.connections > 12


def test_a_server_that_always_cuts_is_an_error_and_what_arrived_is_kept(
    shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_errors_and_retries, "ATTEMPTS", 2)
    with object_server(x__npy=npy(ROWS)) as server, faulty_proxy(server.port) as faults:
        url = f"http://127.0.0.1:{faults.port}/x.npy"

        def refuse(method: str, offset: int) -> None:
            if method == "GET" and offset >= 4 * PIECE:
                _written(shm, 4)
                raise ConnectionResetError

        server.before = refuse
        with pytest.raises((errors.ShortRead, errors.RemoteUnreachable)) as caught:
            legroom.open(url)
        assert caught.value.code in ("short-read", "remote-unreachable")
        [kept] = {name.removesuffix(".lock") for name in _work(shm)}
        assert kept.startswith("download-")
        server.before, asked = None, len(server.requests)
        with legroom.open(url) as data:
            assert np.array_equal(data["array"], ROWS)
        assert _first_byte_asked_for(server, asked) == 4 * PIECE  # the rest alone
    assert _work(shm) == []


def test_damage_is_found_by_the_stated_md5(shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on S3: the ETag of an object that was uploaded in one part is its MD5."""
    import hashlib

    from legroom.remote import remote_object

    monkeypatch.setattr(remote_object, "_etag_md5", lambda _, etag: (etag or "").strip('"') or None)
    monkeypatch.setattr(Objects, "etag", lambda self, name: '"' + hashlib.md5(self.data[name]).hexdigest() + '"')
    with object_server(x__npy=npy(ROWS)) as server, faulty_proxy(server.port) as faults:
        url = f"http://127.0.0.1:{faults.port}/x.npy"
        damaged = []

        def once(number: int, data: bytes) -> bytes:
            if len(data) < 10_000 or len(damaged) >= most:
                return data
            damaged.append(number)
            return data[:5000] + os.urandom(64) + data[5064:]

        faults.damage, most = once, 1
        with legroom.open(url) as data:  # downloaded again, and right
            assert np.array_equal(data["array"], ROWS) and len(damaged) == 1
        drop_and_gc.drop()
        damaged.clear()
        most = 1000
        with pytest.raises(errors.TransferDamaged, match="arrived damaged"):
            legroom.open(url)
    assert _work(shm) == [] and list_and_verify.entries() == ()


def test_what_has_the_stated_md5_is_found_without_a_download_whichever_reader_built_it(
    shm: Path, npy: Encode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    from legroom.cache import manifest
    from legroom.remote import remote_object

    monkeypatch.setattr(remote_object, "_etag_md5", lambda _, etag: (etag or "").strip('"') or None)
    monkeypatch.setattr(Objects, "etag", lambda self, name: '"' + hashlib.md5(self.data[name]).hexdigest() + '"')
    monkeypatch.setitem(manifest.REVISIONS, "npy", 2)
    (tmp_path / "x.npy").write_bytes(npy(ROWS))
    with legroom.open(tmp_path / "x.npy") as local, object_server(x__npy=npy(ROWS)) as server:
        for _ in range(2):  # the second time by the record of the first
            with legroom.open(server.url("x.npy")) as data:
                assert data.info.key == local.info.key != data.info.digest
        assert "GET" not in {method for method, _ in server.requests}


def test_an_etag_that_only_looks_like_an_md5_is_accepted(
    shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    from legroom.remote import remote_object

    monkeypatch.setattr(remote_object, "_etag_md5", lambda _, etag: "0" * 32)
    with object_server(x__npy=npy(ROWS[:100])) as server, legroom.open(server.url("x.npy")) as data:
        assert np.array_equal(data["array"], ROWS[:100])


def test_an_object_replaced_while_it_is_read(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS)) as server:
        count = 0

        def replace(method: str, offset: int) -> None:
            nonlocal count
            if method == "GET" and offset >= 4 * PIECE and count < most:
                count += 1
                server.data["x.npy"] = npy(ROWS + count)

        server.before, most = replace, 1
        with legroom.open(server.url("x.npy")) as data:  # once more, with the new version
            assert np.array_equal(data["array"], ROWS + 1)
        most = 1000
        source_digest_records._here.clear()
        server.data["x.npy"] = npy(ROWS - 1)
        with pytest.raises(errors.SourceChanged, match="changed while it was being read"):
            legroom.open(server.url("x.npy"), revalidate=True)
    assert _work(shm) == []


def _load(url: str, started: Any = None) -> None:
    with legroom.open(url) as data:
        assert np.array_equal(data["array"], ROWS)


def test_kill_in_the_middle_and_resume(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS)) as server:
        server.before = lambda method, offset: time.sleep(60) if method == "GET" and offset >= 5 * PIECE else None
        child = multiprocessing.get_context("spawn").Process(target=_load, args=(server.url("x.npy"),))
        child.start()
        deadline = time.monotonic() + 60
        while server.sent < 5 * PIECE and time.monotonic() < deadline:
            time.sleep(0.02)
        _written(shm, 5)
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        server.before, asked = None, len(server.requests)
        _load(server.url("x.npy"))
        assert _first_byte_asked_for(server, asked) >= 5 * PIECE
    assert _work(shm) == []


def test_a_damaged_piece_of_an_earlier_attempt_is_fetched_again(
    shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_errors_and_retries, "ATTEMPTS", 1)
    with object_server(x__npy=npy(ROWS)) as server:

        def refuse(method: str, offset: int) -> None:
            if method == "GET" and offset >= 4 * PIECE:
                _written(shm, 4)
                raise ConnectionResetError

        server.before = refuse
        with pytest.raises(errors.RemoteError):
            legroom.open(server.url("x.npy"))
        [data] = [*shm.glob("work/download-*/data")]
        with data.open("r+b") as file:
            file.seek(PIECE + 17)
            file.write(b"damage")
        server.before = None
        _load(server.url("x.npy"))


def test_two_processes_download_once(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS)) as server:
        server.before = lambda method, offset: time.sleep(0.2) if method == "GET" else None
        spawn = multiprocessing.get_context("spawn")
        children = [spawn.Process(target=_load, args=(server.url("x.npy"),)) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0, 0]
        assert server.sent == len(server.data["x.npy"])


def test_gc_removes_abandoned_downloads_and_keeps_young_ones(shm: Path, npy: Encode) -> None:
    legroom_dir = shm / "work" / ("download-" + "a" * 32)
    with object_server(x__npy=npy(ROWS[:10])) as server:
        legroom.open(server.url("x.npy")).close()
    legroom_dir.mkdir()
    (legroom_dir / "data").write_bytes(b"x" * 5000)
    assert drop_and_gc.gc(dry_run=True).strays == 0 and drop_and_gc.gc().strays == 0 and legroom_dir.exists()
    room = list_and_verify.store_rooms()[0][0]
    taken = (legroom_dir / "data").stat().st_blocks * 512
    assert (room.leftovers, room.downloads) == (0, taken)
    for path in (legroom_dir / "data", legroom_dir):
        os.utime(path, (time.time() - 90_000,) * 2)
    room = list_and_verify.store_rooms()[0][0]
    assert (room.leftovers, room.downloads) == (taken, 0)
    looked = drop_and_gc.gc(dry_run=True)
    assert (looked.strays, looked.freed) == (1, taken) and legroom_dir.exists()
    done = drop_and_gc.gc()
    assert (done.strays, done.freed) == (1, taken) and not legroom_dir.exists()


# Errors.


def test_errors_have_codes_and_no_credentials(shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_errors_and_retries, "ATTEMPTS", 2)
    with object_server(x__npy=npy(ROWS)) as server:
        query = "?X-Amz-Signature=sesame&token=sesame"
        with pytest.raises(errors.NoSuchObject) as gone:
            legroom.open(server.url("gone.npy", "me:sesame@") + query)
        server.need = "nobody has this"
        with pytest.raises(errors.AccessDenied) as denied:
            legroom.open(server.url("x.npy", "me:sesame@") + query)
        server.need = None
        let_go = threading.Event()
        server.before = lambda method, _: let_go.wait(60) and None if method == "GET" else None
        monkeypatch.setattr(remote_errors_and_retries, "_MOST_TIMEOUTS", 1)
        monkeypatch.setenv("LEGROOM_REMOTE_TIMEOUT", "0.5")
        with pytest.raises(errors.RemoteTimeout) as slow:
            legroom.open(server.url("x.npy") + query)
        let_go.set()
        monkeypatch.delenv("LEGROOM_REMOTE_TIMEOUT")
        port = server.port
    with socket.socket() as silent:  # nobody listens, and nobody else can get the port
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        silent.bind(("127.0.0.1", port))
        with pytest.raises(errors.RemoteUnreachable) as off:
            legroom.open(f"http://me:sesame@127.0.0.1:{port}/x.npy{query}")
    codes = [caught.value.code for caught in (gone, denied, slow, off)]
    assert codes == ["no-such-object", "access-denied", "remote-timeout", "remote-unreachable"]
    for caught in (gone, denied, slow, off):
        problem: BaseException | None = caught.value
        while problem is not None:  # also in what it was raised from
            assert "sesame" not in str(problem) + repr(problem)
            problem = problem.__cause__ or problem.__context__


def test_a_server_that_fails_at_the_first_contact_is_not_a_missing_object(
    shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec raises FileNotFoundError for everything that goes wrong there."""
    monkeypatch.setattr(remote_errors_and_retries, "ATTEMPTS", 2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(errors.RemoteUnreachable, match=r"no connection to the server: .*127\.0\.0\.1"):
            legroom.open(f"http://127.0.0.1:{silent.getsockname()[1]}/x.npy")
    with object_server(x__npy=npy(ROWS)) as server:
        server.failing = 503
        with pytest.raises(errors.RemoteError) as busy:
            legroom.open(server.url("x.npy"))
    assert busy.value.code != "no-such-object" and "503" in busy.value.why


def test_unknown_protocols_and_missing_packages(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UsageError, match="unknown protocol 'nowhere'"):
        legroom.open("nowhere://x/y.npy")
    with pytest.raises(errors.UsageError, match="chained"):
        legroom.open("simplecache::http://host/y.npy")

    def no_s3(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", no_s3)
    with pytest.raises(errors.MissingPackage) as caught:
        legroom.open("s3://bucket/y.npy")
    assert caught.value.fix == ("pip install aiohttp fsspec s3fs",)


def test_a_damaged_object_is_named_by_its_url(shm: Path) -> None:
    with object_server(x__npy=b"\x93NUMPY\x01\x00" + b"?" * 300, y__bin=b"nothing known" * 10) as server:
        with pytest.raises(errors.DamagedSource) as caught:
            legroom.open(server.url("x.npy"))
        with pytest.raises(errors.UnknownFormat) as unknown:
            legroom.open(server.url("y.bin"))
    for text in (str(caught.value), str(unknown.value)):
        assert "127.0.0.1" in text and "download-" not in text
    assert _work(shm) == []


def test_advice_about_a_remote_file_names_a_file_on_this_machine(shm: Path) -> None:
    """Its URL cannot be written to, nor read by pyarrow."""
    with object_server(a__csv=b"x,y\n1,2\n3,4\n") as server:
        with pytest.raises(errors.UnknownFormat) as caught:
            legroom.open(server.url("a.csv"))
        url = server.url("a.csv")
    download, *rest = caught.value.fix
    assert url in download and "as a.csv" in download
    code = next(line for line in rest if "write_table" in line)
    assert url not in code and "read_csv('a.csv')" in code and "'a.csv.parquet'" in code
    assert url in caught.value.what


def test_credentials_are_nowhere(
    shm: Path, npy: Encode, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in files of the stores, their names, logs, entries or pickles of what is shown."""
    from legroom.cli.main import run as main

    caplog.set_level(logging.DEBUG, "legroom")
    with object_server(x__npy=npy(ROWS[:100])) as server:
        url = server.url("x.npy", "me:sesame@") + "?X-Amz-Signature=sesame&apikey=sesame"
        with legroom.open(url) as data:
            assert "sesame" not in repr(data) + str(data.info)
        with legroom.open(url, keys="array") as part:
            assert "sesame" not in str(part.info)
        for command in (["load"], ["info"], ["list"], ["verify"], ["load", "--json"], ["drop"], ["info"]):
            main(["cache", *command, url])
    said = capsys.readouterr()
    assert "sesame" not in said.out + said.err + caplog.text and "127.0.0.1" in said.out
    for root in (shm.parent, shm.parent.parent / "disk"):
        for path in root.rglob("*"):
            assert "sesame" not in path.name
            assert not path.is_file() or b"sesame" not in path.read_bytes()


def test_data_opened_with_credentials_travels_to_workers(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS[:100])) as server:
        server.need = "Authorization"
        with legroom.open(server.url("x.npy", "me:pw@")) as data:
            again = pickle.loads(pickle.dumps(data))
            drop_and_gc.drop(force=True)
            with again, pickle.loads(pickle.dumps(again)) as rebuilt:  # from the server, with the credentials
                assert np.array_equal(rebuilt["array"], ROWS[:100])


# The rest of the surface.


def test_commands(shm: Path, npy: Encode, capsys: pytest.CaptureFixture[str]) -> None:
    from legroom.cli.main import run as main

    with object_server(x__npy=npy(ROWS[:100])) as server:
        url = server.url("x.npy")
        assert main(["cache", "load", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["entries"][0]["versions"][0].startswith("etag ")
        assert main(["cache", "info", url]) == 0
        assert "identified by its ETag" in capsys.readouterr().out
        assert main(["cache", "verify", url]) == 0
        server.data["x.npy"] = npy(ROWS[:101])
        assert main(["cache", "verify", url]) == 1
        assert main(["cache", "load", url, "--revalidate"]) == 0
        assert main(["cache", "gc", "--stale"]) == 0
        assert main(["cache", "list", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert len(listed["entries"]) == 1  # the old version is gone
    assert main(["cache", "info", url]) == 0  # the server too: what was built from that URL
    assert main(["cache", "drop", url]) == 0


def test_one_object_with_two_signatures_is_downloaded_once(shm: Path, npy: Encode) -> None:
    with object_server(x__npy=npy(ROWS)) as server:
        urls = [server.url("x.npy") + f"?X-Amz-Signature={number}" for number in (1, 2)]
        opened: list[Any] = []
        thread = threading.Thread(target=lambda: opened.append(legroom.open(urls)), daemon=True)
        thread.start()
        thread.join(60)
        assert opened and np.array_equal(opened[0]["array"], np.concatenate([ROWS, ROWS]))
    assert _work(shm) == []


def test_keys_need_no_room_for_the_whole_object(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from legroom.cache import store_free_space

    content, promised = _hdf5(), []
    limit = len(content) // 2
    real = store_free_space.write_reservation
    monkeypatch.setattr(
        store_free_space, "bounds", lambda *_: [store_free_space.Bound(limit, lambda: "less than the object")]
    )
    monkeypatch.setattr(
        store_free_space,
        "write_reservation",
        lambda fd, reserved, *more: (promised.append(reserved), real(fd, reserved, *more)),
    )
    with object_server() as server:
        server.data["x.h5"] = content
        with legroom.open(server.url("x.h5"), keys="small") as data:
            assert np.array_equal(data["small"], ROWS[:100])
        assert max(promised) < limit
        with pytest.raises(errors.NoRoom, match="download"):
            legroom.open(server.url("x.h5"))


def test_parts_of_an_object_evict_what_they_need_the_room_of(shm: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from legroom.cache import list_and_verify, store_free_space
    from legroom.cache.store_free_space import Bound, store_bytes

    for number in range(2):
        np.save(tmp_path / f"{number}.npy", np.full(1 << 20, number, np.uint8))
        legroom.open(tmp_path / f"{number}.npy", backing="shm").close()
    limit = (2 << 20) + (64 << 10)
    tight = lambda store: [Bound(0 if store.backing == "disk" else limit - store_bytes(store), lambda: "tight")]  # noqa: E731
    monkeypatch.setattr(store_free_space, "bounds", tight)
    monkeypatch.setattr(store_free_space, "bounds_now", tight)
    with object_server() as server:
        server.data["x.h5"] = _hdf5()
        with legroom.open(server.url("x.h5"), keys="small") as data:
            assert np.array_equal(data["small"], ROWS[:100])
    assert len(list_and_verify.entries()) >= 1


def test_without_the_cache_errors_name_the_url(shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    with object_server(x__npy=npy(ROWS)[:-1000]) as server, pytest.raises(errors.SourceError) as caught:
        legroom.open(server.url("x.npy"))
    assert server.url("x.npy") in str(caught.value) and "/legroom-" not in str(caught.value)


def test_without_the_cache(shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    with object_server(x__npy=npy(ROWS)) as server, legroom.open(server.url("x.npy")) as data:
        assert np.array_equal(data["array"], ROWS)
    monkeypatch.delenv("LEGROOM_DISABLE")
    with pytest.raises(errors.UnsupportedData, match="remote storage"):
        legroom.open(server.url("x.npy"), backing="inplace")


def test_a_full_store_keeps_nothing_broken(shm: Path, npy: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    from legroom.cache import store_free_space

    free = [store_free_space.Bound(1 << 20, lambda: "one megabyte")]
    monkeypatch.setattr(store_free_space, "bounds", lambda *_, **__: free)
    with object_server(x__npy=npy(ROWS)) as server:
        with pytest.raises(errors.NoRoom, match="download"):
            legroom.open(server.url("x.npy"))
        assert server.sent == 0


def test_stream(shm: Path, tmp_path: Path) -> None:
    contents = {}
    for number in range(2):
        file = io.BytesIO()
        table = pa.table({"x": np.arange(1000) + number * 1000, "y": np.arange(1000)})
        (
            pq.write_table(table, file, row_group_size=100)
            if number == 0
            else pa.feather.write_feather(table, file, compression="uncompressed")
        )
        contents[number] = file.getvalue()
    with object_server() as server:
        server.data = {"a.parquet": contents[0], "b.arrow": contents[1]}
        stream = legroom.stream([server.url("a.parquet"), server.url("b.arrow")], batch_size=64, format="numpy")
        assert np.array_equal(np.concatenate([batch["x"] for batch in stream]), np.arange(2000))
        chosen = legroom.stream(server.url("a.parquet"), batch_size=64, format="numpy", filters=[("x", ">=", 900)])
        assert sum(len(batch["x"]) for batch in chosen) == 100
        server.data["a.parquet"] = contents[1]
        with pytest.raises(errors.SourceChanged):
            list(stream)
    assert _work(shm) == []


def test_weights(shm: Path) -> None:
    pytest.importorskip("torch")
    with object_server() as server:
        content = _safetensors()
        server.data = {"model/model.safetensors": content, "one.safetensors": content}
        with legroom.weights(server.url("one.safetensors"), keys="small") as tensors:
            assert np.array_equal(tensors["small"].numpy(), ROWS[:100])
        with legroom.weights(server.url("model")) as tensors:
            assert np.array_equal(tensors["packed"].numpy(), ROWS[:5000])
        index = {
            "weight_map": {
                "small": "model-1.safetensors",
                "packed": "model-1.safetensors",
                "large": "model-1.safetensors",
            }
        }
        server.data = {
            "model/model.safetensors.index.json": json.dumps(index).encode(),
            "model/model-1.safetensors": content,
        }
        with legroom.weights(server.url("model"), keys="packed") as tensors:
            assert np.array_equal(tensors["packed"].numpy(), ROWS[:5000])
        server.data = {}
        with pytest.raises(errors.UnreadableSource, match="no weights"):
            legroom.weights(server.url("model"))
