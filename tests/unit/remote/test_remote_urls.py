"""URLs without credentials, and stamps from what stores say."""

from __future__ import annotations

import base64
import datetime
import pickle

import pytest

from legroom.remote.remote_object import (
    ObjectStamp,
    is_url,
    local_path,
    object_url,
    redacted,
    stamp_from_json,
    stamp_of_info,
    without_credentials,
)

MD5 = "0cc175b9c0f1b6a831c399e269772661"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://bucket/a/b.npy", "s3://bucket/a/b.npy"),
        ("https://me:secret@host/x.npy", "https://host/x.npy"),
        ("https://token@host/x.npy", "https://host/x.npy"),
        ("sftp://me:secret@host/x.npy", "sftp://host/x.npy"),
        ("sftp://me@host/x.npy", "sftp://me@host/x.npy"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("https://b.s3.amazonaws.com/k?X-Amz-Signature=abc&X-Amz-Credential=AKIA", "https://b.s3.amazonaws.com/k"),
        (
            "https://storage.googleapis.com/b/k?GoogleAccessId=a&Expires=1&Signature=s",
            "https://storage.googleapis.com/b/k",
        ),
        ("https://a.blob.core.windows.net/c/k?sv=2020&sig=abc&se=2030", "https://a.blob.core.windows.net/c/k"),
        ("https://host/file?id=17&access_token=abc", "https://host/file?id=…"),
        ("https://host/file?apikey=abc", "https://host/file?apikey=…"),
        ("s3://bucket/k?versionId=v1", "s3://bucket/k?versionId=v1"),
        ("HTTPS://Host/x#part", "https://Host/x"),
    ],
)
def test_text_has_no_credentials(url: str, text: str) -> None:
    found = object_url(url)
    assert str(found) == found.__fspath__() == text
    assert "secret" not in repr(found) and "abc" not in repr(found)
    assert pickle.loads(pickle.dumps(found)).url == url


def test_identity_ignores_signatures_and_counts_other_parameters() -> None:
    signed = object_url("https://host/k?X-Amz-Signature=1&X-Amz-Date=2")
    assert (
        signed.identity
        == object_url("https://host/k?X-Amz-Signature=3").identity
        == object_url("https://host/k").identity
    )
    assert object_url("https://host/k?id=1").identity != object_url("https://host/k?id=2").identity


def test_urls_in_messages_are_redacted() -> None:
    said = "404, message='Not Found', url='https://me:pw@host/x?X-Amz-Signature=abc'"
    assert redacted(said) == "404, message='Not Found', url='https://host/x'"


def test_what_is_a_url() -> None:
    assert (
        is_url("s3://b/k")
        and is_url("memory://x")
        and not is_url("C:/x")
        and not is_url("/a/b")
        and not is_url("a://"[:1])
    )
    assert local_path("file:///data/x%20.npy") == "/data/x%20.npy" and local_path("s3://b/k") is None
    assert without_credentials("/plain/path") == "/plain/path"


def test_below_keeps_the_credentials() -> None:
    inner = object_url("https://me:pw@host/model?token=t").below("index.json")
    assert inner.url == "https://me:pw@host/model/index.json?token=t" and str(inner) == "https://host/model/index.json"


@pytest.mark.parametrize(
    ("protocol", "info", "kind", "tag"),
    [
        ("s3", {"size": 3, "ETag": f'"{MD5}"'}, "etag", MD5),
        ("s3", {"size": 3, "ETag": f'"{MD5}-4"', "VersionId": "null"}, "etag", f"{MD5}-4"),
        ("s3", {"size": 3, "ETag": f'"{MD5}"', "VersionId": "v7"}, "version", "v7"),
        (
            "gs",
            {"size": 3, "generation": "17", "etag": "x", "md5Hash": base64.b64encode(bytes.fromhex(MD5)).decode()},
            "version",
            "17",
        ),
        ("hf", {"size": 3, "lfs": {"sha256": "a" * 64}, "blob_id": "b"}, "sha256", "a" * 64),
        ("hf", {"size": 3, "lfs": None, "blob_id": "b" * 40}, "version", "b" * 40),
        (
            "https",
            {"size": 3, "ETag": 'W/"weak"', "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"},
            "modified",
            "1445412480000000000",
        ),
        ("https", {"size": 3}, "none", ""),
        (
            "memory",
            {"size": 3, "created": datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)},
            "modified",
            "1577836800000000000",
        ),
    ],
)
def test_stamps(protocol: str, info: dict, kind: str, tag: str) -> None:
    stamp = stamp_of_info(protocol, info)
    assert (stamp.kind, stamp.tag, stamp.size) == (kind, tag, 3)
    assert stamp_from_json(stamp.as_json()) == stamp


def test_a_multipart_etag_is_a_version_and_no_hash() -> None:
    assert stamp_of_info("s3", {"size": 3, "ETag": f'"{MD5}-4"'}).expected == {}
    single = stamp_of_info("s3", {"size": 3, "ETag": f'"{MD5}"'})
    assert single.expected == {"md5": MD5} and not single.is_sure("md5")
    stated = stamp_of_info("gs", {"size": 3, "md5Hash": base64.b64encode(bytes.fromhex(MD5)).decode()})
    assert stated.expected == {"md5": MD5} and stated.is_sure("md5")
    assert stamp_of_info("https", {"size": 3, "ETag": f'"{MD5}"'}).expected == {}  # any text may be an ETag there


def test_only_a_strong_stamp_is_remembered_at_once() -> None:
    assert ObjectStamp(3, "etag", "x").changed_ns == 0
    assert ObjectStamp(3, "modified", "5", modified_ns=5).changed_ns == 5
    assert ObjectStamp(3, "none").changed_ns > 1 << 60
    assert not ObjectStamp(None, "etag", "x").by_ranges and not ObjectStamp(3, "modified", "5").by_ranges
