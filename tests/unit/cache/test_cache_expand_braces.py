"""Names with braces, as WebDataset writes them: which names they stand for, and what opens."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import legroom
from legroom.cache.expand_braces import MOST_NAMES, expand_braces
from legroom.cache.find_or_build_entry import source_paths
from legroom.errors import LegroomError, UnreadableSource, UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x-{8..11}.tar", ["x-8.tar", "x-9.tar", "x-10.tar", "x-11.tar"]),
        ("{008..010}{a,}", ["008a", "008", "009a", "009", "010a", "010"]),
        ("{3..1}{a..e..2}", ["3a", "3c", "3e", "2a", "2c", "2e", "1a", "1c", "1e"]),
        ("{a,b{1,2}}", ["a", "b1", "b2"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{x{1,2}}", ["{x1}", "{x2}"]),
        (r"\{1,2\}{3,4}", ["{1,2}3", "{1,2}4"]),
        ("s3://b/{1,2}?versionId={3,4}", ["s3://b/1?versionId={3,4}", "s3://b/2?versionId={3,4}"]),
        ("https://me:{a,b}@h{1,2}/x", ["https://me:{a,b}@h1/x", "https://me:{a,b}@h2/x"]),
        ("plain.tar", None),
        ("{x}.tar", None),
        ("{1..2.tar", None),
        ("}{1..2}", None),
        ("{" * 2000 + "}" * 2000, None),
    ],
)
def test_what_a_text_with_braces_stands_for(text: str, expected: list[str] | None) -> None:
    assert expand_braces(text) == expected


def test_names_are_those_of_the_package_that_webdataset_uses() -> None:
    braceexpand = pytest.importorskip("braceexpand")
    piece = st.sampled_from(["{", "}", ",", "..", "a", "F", "0", "12", "007", "-", "\\{", "x"])

    @settings(max_examples=3000, database=None, derandomize=True)
    @given(pieces=st.lists(piece, max_size=14))
    def check(pieces: list[str]) -> None:
        text = "".join(pieces)
        found = expand_braces(text)
        if found is not None:
            assert found == list(braceexpand.braceexpand(text))

    check()


@pytest.mark.parametrize("text", ["{0..9999999999}", "{1..2}" * 30, "{1..1000}{1..1001}", "{{1..999999},{1..9}}"])
def test_too_many_names_are_refused_before_they_are_made(text: str) -> None:
    with pytest.raises(UsageError, match=f"more than {MOST_NAMES}"):
        expand_braces(text)


def test_a_range_of_shards_is_one_dataset_and_a_missing_one_is_named(tmp_path: Path) -> None:
    for number in range(3):
        np.save(tmp_path / f"s-{number:03d}.npy", np.full(2, number))
    np.save(tmp_path / "[x]-0.npy", np.full(1, 7))
    with legroom.open(f"{tmp_path}/s-{{002..000}}.npy") as data:
        assert next(iter(data.values())).tolist() == [2, 2, 1, 1, 0, 0]  # in the order of the range
    with legroom.open([f"{tmp_path}/{{[[]x]-*,s-00[12]}}.npy"]) as data:
        assert next(iter(data.values())).tolist() == [7, 1, 1, 2, 2]
    with pytest.raises(UnreadableSource, match=r"s-003\.npy") as caught:
        legroom.open(f"{tmp_path}/s-{{000..004}}.npy")
    assert "no such file" in str(caught.value)
    with pytest.raises(UnreadableSource, match=r"nothing matches .*/t-\*"):
        legroom.open(f"{tmp_path}/{{s,t}}-*.npy")
    with pytest.raises(LegroomError, match=r"s-\{0\.\.npy"):
        legroom.open(f"{tmp_path}/s-{{0..npy")


def test_a_file_of_that_name_is_opened_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("a{0,1}.npy", 5), ("a0.npy", 0), ("a1.npy", 1)):
        np.save(name, np.full(1, value))
    with legroom.open("a{0,1}.npy") as data:
        assert next(iter(data.values())).tolist() == [5]
    os.unlink("a{0,1}.npy")
    with legroom.open("a{0,1}.npy") as data:
        assert next(iter(data.values())).tolist() == [0, 1]


def test_urls_are_expanded() -> None:
    found = source_paths(["s3://b/train-{00..02}.tar", "memory://x"])
    assert list(map(str, found)) == [f"s3://b/train-0{number}.tar" for number in range(3)] + ["memory://x"]
