"""Objects on S3: moto's server over HTTP on loopback, with s3fs."""

from __future__ import annotations

import hashlib
import io
import logging
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import legroom
from legroom import errors
from legroom.cache import drop_and_gc, source_digest_records
from object_server import faulty_proxy

# aiobotocore and moto use what newer Pythons and libraries have deprecated.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

ROWS = np.arange(3_000_000, dtype=np.float32).reshape(-1, 8)  # 12 MB


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.fixture(scope="module")
def boto3() -> Any:
    """Imported here, which takes seconds, and not by every process that only looks for tests."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'legroom[test]'")
    return pytest.importorskip("boto3", reason="boto3 is not installed: pip install 'legroom[test]'")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    moto = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'legroom[test]'")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


@pytest.fixture
def s3(shm: Path, boto3: Any, port: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the server with a bucket; s3fs finds the server and credentials as it does everywhere."""
    import fsspec

    for name, value in (("KEY_ID", "testing"), ("SECRET", "testing")):
        monkeypatch.setenv({"KEY_ID": "AWS_ACCESS_KEY_ID", "SECRET": "AWS_SECRET_ACCESS_KEY"}[name], value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    _endpoint(monkeypatch, port)
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
    client.create_bucket(Bucket="data")
    yield client
    for found in client.list_object_versions(Bucket="data").get("Versions", []):
        client.delete_object(Bucket="data", Key=found["Key"], VersionId=found["VersionId"])
    client.delete_bucket(Bucket="data")
    fsspec.filesystem("s3").clear_instance_cache()


def _endpoint(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


def _open(url: str = "s3://data/x.npy", **options: Any) -> Any:
    return legroom.open(url, **options)


def test_one_part(s3: Any) -> None:
    content = _npy(ROWS)
    s3.put_object(Bucket="data", Key="x.npy", Body=content)
    with _open() as data:
        assert np.array_equal(data["array"], ROWS)
        assert data.info.digest == hashlib.md5(content).hexdigest() and data.info.sources == ("s3://data/x.npy",)
        assert data.info.versions[0].startswith(f"etag {data.info.digest} ")  # it was compared with what arrived


def test_known_by_its_etag_before_anything_is_read(s3: Any, boto3: Any, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(_npy(ROWS))
    with legroom.open(tmp_path / "x.npy") as local:
        s3.upload_file(
            str(tmp_path / "x.npy"),
            "data",
            "copy.npy",
            Config=boto3.s3.transfer.TransferConfig(multipart_threshold=1 << 30),
        )
        moved: list[int] = []
        with _open("s3://data/copy.npy", progress=lambda done, total: moved.append(done)) as remote:
            assert remote.info.key == local.info.key and not moved


def test_several_parts(s3: Any, boto3: Any, tmp_path: Path) -> None:
    """The ETag is no hash of the content then, but it changes with the object."""
    (tmp_path / "x.npy").write_bytes(_npy(ROWS))
    config = boto3.s3.transfer.TransferConfig(multipart_threshold=1 << 20, multipart_chunksize=5 << 20)
    s3.upload_file(str(tmp_path / "x.npy"), "data", "x.npy", Config=config)
    assert "-" in s3.head_object(Bucket="data", Key="x.npy")["ETag"]
    with _open() as data:
        assert np.array_equal(data["array"], ROWS) and data.info.hash == "md5"
    s3.put_object(Bucket="data", Key="x.npy", Body=_npy(ROWS + 1))
    with _open(revalidate=True) as data:
        assert data["array"][0, 0] == 1


def test_versions(s3: Any) -> None:
    s3.put_bucket_versioning(Bucket="data", VersioningConfiguration={"Status": "Enabled"})
    first = s3.put_object(Bucket="data", Key="x.npy", Body=_npy(ROWS[:10]))["VersionId"]
    s3.put_object(Bucket="data", Key="x.npy", Body=_npy(ROWS[:20]))
    with _open() as data, _open(f"s3://data/x.npy?versionId={first}") as old:
        assert len(data["array"]) == 20 and len(old["array"]) == 10
        assert data.info.versions[0].startswith("version ")


def test_patterns(s3: Any) -> None:
    for number in range(3):
        s3.put_object(Bucket="data", Key=f"shards/{number}.npy", Body=_npy(ROWS[number * 10 : number * 10 + 10]))
    with _open("s3://data/shards/*.npy") as data:
        assert np.array_equal(data["array"], ROWS[:30])


def test_cut_connections(s3: Any, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put_object(Bucket="data", Key="x.npy", Body=_npy(ROWS))
    with faulty_proxy(port) as faults:
        _endpoint(monkeypatch, faults.port)
        faults.cut_after = lambda number: 300_000 if number < 10 else None  # of 12 MB
        with _open() as data:
            assert np.array_equal(data["array"], ROWS)
    assert faults.connections > 10


def test_damage_on_the_way(s3: Any, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put_object(Bucket="data", Key="x.npy", Body=_npy(ROWS))
    with faulty_proxy(port) as faults:
        _endpoint(monkeypatch, faults.port)
        faults.damage = lambda _, data: data[:9000] + b"?" + data[9001:] if len(data) > 10_000 else data
        with pytest.raises(errors.TransferDamaged):
            _open()


def test_replaced_while_it_is_read(s3: Any, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put_object(Bucket="data", Key="x.npy", Body=_npy(ROWS))
    with faulty_proxy(port) as faults:
        _endpoint(monkeypatch, faults.port)
        seen = []

        def replace(number: int, data: bytes) -> bytes:
            if len(data) > 10_000 and not seen:
                seen.append(number)
                s3.put_object(Bucket="data", Key="x.npy", Body=_npy(ROWS + 1))
            return data

        faults.damage = replace
        with _open() as data:
            assert np.array_equal(data["array"], ROWS + 1) or np.array_equal(data["array"], ROWS)
            assert len(np.unique(data["array"].ravel() - ROWS.ravel())) == 1  # one version, never a mix


def test_errors(s3: Any, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.NoSuchObject):
        _open("s3://data/gone.npy")
    with pytest.raises(errors.NoSuchObject):
        _open("s3://no-such-bucket-here/x.npy")
    s3.put_object(Bucket="data", Key="x.npy", Body=_npy(ROWS[:10]))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    _endpoint(monkeypatch, port)
    source_digest_records._here.clear()
    with pytest.raises(errors.NoCredentials) as caught:
        _open()
    assert caught.value.code == "no-credentials" and "aws configure" in caught.value.fix


def test_planted_credentials_are_nowhere(
    s3: Any, boto3: Any, port: int, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    """Of the environment and of a presigned URL: not in stores, logs, output, reports, errors, names of threads."""
    from legroom.cli.main import run as main

    s3.put_object(Bucket="data", Key="x.npy", Body=_npy(ROWS[:1000]))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "sesame" + name[4:])
    _endpoint(monkeypatch, port)
    caplog.set_level(logging.DEBUG, "legroom")
    signer = boto3.session.Session().client("s3", endpoint_url=f"http://127.0.0.1:{port}")
    signed = signer.generate_presigned_url("get_object", Params={"Bucket": "data", "Key": "x.npy"})
    assert "sesame" in signed
    found: list[str] = []
    for url in ("s3://data/x.npy", signed):
        with _open(url, revalidate=True) as data:
            assert np.array_equal(data["array"], ROWS[:1000])
            found += [repr(data), str(data.info)]
        titles = [Path(f"/proc/self/{name}").read_text() for name in ("comm", "cmdline")]
        found += [*titles, *(one.name for one in threading.enumerate())]
        for command in (["load"], ["info"], ["list", "--json"], ["verify"], ["drop"]):
            main(["cache", *command, url])
        for missing in (url.replace("x.npy", "gone.npy"),):
            with pytest.raises(errors.RemoteError) as caught:
                _open(missing)
            problem: BaseException | None = caught.value
            while problem is not None:
                found.append(str(problem) + repr(problem))
                problem = problem.__cause__ or problem.__context__
    main(["report", "--show", "--out", str(tmp_path / "report.zip")])
    said = capsys.readouterr()
    with zipfile.ZipFile(tmp_path / "report.zip") as bundle:
        found += [bundle.read(name).decode(errors="replace") for name in bundle.namelist()]
    assert "s3://data/x.npy" in said.out
    found += [one.getMessage() for one in caplog.records if one.name.startswith("legroom")]  # not the server's
    assert "sesame" not in "".join(found) + said.out + said.err
    for root in (shm.parent, shm.parent.parent / "disk"):
        for path in root.rglob("*"):
            assert "sesame" not in path.name and (not path.is_file() or b"sesame" not in path.read_bytes())


def test_keys(s3: Any) -> None:
    from safetensors.numpy import save

    content = save({"large": np.arange(10 << 20, dtype=np.uint8), "small": ROWS[:100]})
    s3.put_object(Bucket="data", Key="m.safetensors", Body=content)
    with _open("s3://data/m.safetensors", keys="small") as data:
        assert np.array_equal(data["small"], ROWS[:100]) and data.info.hash == "version"
    drop_and_gc.drop()
