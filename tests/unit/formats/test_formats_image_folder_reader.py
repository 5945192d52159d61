"""Folders of images: the samples of ImageFolder in its order, what is recognized, and changes that must be noticed."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import legroom
from legroom.cache import source_stamps_and_digests
from legroom.errors import LegroomError, NoRoom, SourceChanged, UnreadableSource, UnsupportedData
from legroom.formats.base_reader import Description
from legroom.formats.decoding_memory_budget import Allowed, DecodingMemory
from legroom.formats.detect import open_source
from legroom.formats.image_folder_reader import IMAGES, ImageFolderReader

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))
from archive_samples import TORCHVISION_EXTENSIONS, image_folder, read_image_folder, torchvision_samples


def read(path: Path) -> dict[str, Any]:
    with open_source(path) as reader:
        found = {}
        for spec in reader.describe().items:
            out: Any = np.empty(spec.shape, spec.dtype)  # type: ignore[union-attr]
            reader.read_into(spec.name, out)
            found[spec.name] = out
    return found


def write(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def same_as_torchvision(root: Path) -> None:
    found = read(root)
    for name, array in read_image_folder(root).items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


# What ImageFolder does.


def test_the_extensions_are_torchvisions() -> None:
    assert IMAGES == TORCHVISION_EXTENSIONS


def test_the_samples_and_their_order_are_image_folders(tmp_path: Path) -> None:
    root = image_folder(tmp_path)
    same_as_torchvision(root)
    with legroom.open(root) as data:
        assert data.attributes["classes"] == ["Dog", "bird", "cat"]
        expected = torchvision_samples(root)
        assert list(data["path"]) == [os.path.relpath(path, root) for path, _ in expected]
        assert data["label"].tolist() == [label for _, label in expected]
        assert [row.tobytes() for row in data["image"]] == [Path(path).read_bytes() for path, _ in expected]


def test_links_to_files_and_directories_are_followed(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", "a/1.jpg", "a/b/2.jpg", "3.jpg")
    root = write(tmp_path / "x", "cat/0.jpg", "dog/9.png")
    (root / "cat" / "linked").symlink_to(outside / "a")
    (root / "dog" / "one.jpg").symlink_to(outside / "3.jpg")
    (root / "emu").symlink_to(outside / "a")
    same_as_torchvision(root)


def test_a_link_to_a_parent_directory_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "x", "cat/0.jpg")
    (root / "cat" / "again").symlink_to(root)
    with pytest.raises(UnreadableSource, match="deep"):
        read(root)
    with pytest.raises(UnreadableSource, match="parent"):
        legroom.open(root)


@pytest.mark.parametrize("files", [("cat/0.jpg", "dog/notes.txt"), ("cat/0.jpg", "dog/0.gif")])
def test_a_class_without_images_is_refused_as_image_folder_does(tmp_path: Path, files: tuple[str, ...]) -> None:
    with pytest.raises(UnreadableSource, match="class 'dog' has no image"):
        read(write(tmp_path / "x", *files))


# What is recognized.


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (("1.jpg", "2.jpg"), "no subdirectory for each class"),
        (("cat/1.jpg", "2.jpg"), "unclear"),
        (("cat/1.jpg", "labels.csv"), "unclear"),
        (("cat/1.jpg", "a.npy"), r"\*\.npy"),
        (("cat/1.jpg", "a-0.tar", "a-1.tar"), r"\*\.tar"),
        (("train/cat/1.jpg", "val/cat/2.jpg"), "splits"),
        (("Train/cat/1.jpg",), "splits"),
        (("cat/1.txt", "dog/2.txt"), "no images"),
        ((), "none of these: .*Zarr"),
        (("cat/1.jpg", "index.json", "zarr.json"), "several formats: MosaicML MDS, Zarr"),
    ],
)
def test_what_is_unclear_is_refused(tmp_path: Path, files: tuple[str, ...], why: str) -> None:
    root = write(tmp_path / "x", *files)
    root.mkdir(exist_ok=True)
    for open_it in (read, legroom.open):
        with pytest.raises(LegroomError, match=why):
            open_it(root)  # type: ignore[operator]


def test_a_readme_and_hidden_files_may_stand_beside_the_classes(tmp_path: Path) -> None:
    root = write(tmp_path / "x", "cat/1.jpg", ".DS_Store", "README.md", "LICENSE")
    same_as_torchvision(root)


def test_names_that_are_not_text_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "x", "cat/1.jpg")
    os.close(os.open(os.fsencode(root / "cat") + b"/\xff.jpg", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(UnsupportedData, match="not text"):
        read(root)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "x", "cat/1.jpg")
    os.mkfifo(root / "cat" / "2.jpg")
    with pytest.raises(LegroomError):
        legroom.open(root)
    (root / "cat" / "2.jpg").unlink()
    (root / "cat" / "3.jpg").symlink_to("nowhere")
    with pytest.raises(UnreadableSource, match="link"):
        legroom.open(root)


def test_folders_of_the_same_classes_are_joined_and_others_are_not(tmp_path: Path) -> None:
    one = write(tmp_path / "one", "cat/1.jpg", "dog/2.jpg")
    two = write(tmp_path / "two", "cat/3.jpg", "dog/4.jpg")
    with legroom.open([one, two]) as data:
        assert list(data["path"]) == ["cat/1.jpg", "dog/2.jpg", "cat/3.jpg", "dog/4.jpg"]
        assert data["label"].tolist() == [0, 1, 0, 1]
    write(two, "ant/5.jpg")
    with pytest.raises(UnsupportedData, match="different classes"):
        legroom.open([one, two])


# Changes.


def opened(root: Path) -> list[str]:
    with legroom.open(root) as data:
        return [row.tobytes().decode() for row in data["image"]]


def test_added_removed_changed_and_renamed_files_are_noticed(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", "1.jpg")
    root = write(tmp_path / "x", "cat/1.jpg", "cat/deep/2.jpg", "dog/3.jpg")
    (root / "dog" / "4.jpg").symlink_to(outside / "1.jpg")
    (root / "emu").symlink_to(outside)
    assert opened(root) == ["cat/1.jpg", "cat/deep/2.jpg", "dog/3.jpg", "1.jpg", "1.jpg"]
    write(root, "cat/deep/5.jpg")
    assert opened(root)[2] == "cat/deep/5.jpg"
    (root / "cat" / "1.jpg").unlink()
    assert opened(root)[0] == "cat/deep/2.jpg"
    (root / "dog" / "3.jpg").write_bytes(b"other")
    assert opened(root)[2] == "other"
    (outside / "1.jpg").write_bytes(b"behind links")
    assert opened(root)[3:] == ["behind links"] * 2
    write(outside, "0.jpg")
    assert opened(root)[4] == "0.jpg"
    (root / "dog").rename(root / "zebra")
    with legroom.open(root) as data:
        assert data.attributes["classes"] == ["cat", "emu", "zebra"]
        key = data.info.key
    shutil.copytree(root, tmp_path / "copy", symlinks=True)
    with legroom.open(tmp_path / "copy") as data:
        assert data.info.key == key  # the same names and bytes


def test_classes_renamed_while_they_are_listed_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path / "x", "cat/1.jpg", "dog/2.jpg")
    describe, swapped = ImageFolderReader._describe, []

    def swap() -> None:
        for one, other in (("cat", "aside"), ("dog", "cat"), ("aside", "dog")):
            (root / one).rename(root / other)

    def describe_swapped(reader: ImageFolderReader) -> Description:
        if swapped:
            return describe(reader)
        swapped.append(True)
        swap()
        try:
            return describe(reader)
        finally:
            swap()  # as if nothing had happened

    monkeypatch.setattr(ImageFolderReader, "_describe", describe_swapped)
    assert opened(root) == ["cat/1.jpg", "dog/2.jpg"]  # the second attempt
    assert swapped


def test_a_link_above_that_is_switched_while_loading_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("v1", "v2"):
        write(tmp_path / version, "cat/1.jpg")
        (tmp_path / version / "cat" / "1.jpg").write_bytes(version.encode())
    current = tmp_path / "current"
    current.symlink_to("v1")
    root = write(tmp_path / "x", "dog/2.jpg")
    (root / "cat").symlink_to(current / "cat")
    describe, times = ImageFolderReader._describe, []

    def point_to(version: str) -> None:
        current.unlink()
        current.symlink_to(version)

    def describe_switched(reader: ImageFolderReader) -> Description:
        times.append(True)
        if len(times) > 1:
            return describe(reader)
        point_to("v2")
        try:
            return describe(reader)
        finally:
            point_to("v1")

    monkeypatch.setattr(ImageFolderReader, "_describe", describe_switched)
    assert opened(root)[0] == "v1"
    assert len(times) == 2  # the first listing was of other files than were stamped


def test_a_file_replaced_after_it_was_listed_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "x", "cat/1.jpg", "dog/2.jpg")
    with open_source(root) as reader:
        spec: Any = next(one for one in reader.describe().items if one.name == "image/values")
        time.sleep(0.02)
        (root / "cat" / "1.jpg").write_bytes(b"CAT/1.JPG")
        with pytest.raises(SourceChanged):
            reader.read_into("image/values", np.empty(spec.shape, spec.dtype))
        (root / "cat" / "1.jpg").unlink()
        with pytest.raises(SourceChanged):
            reader.read_into("image/values", np.empty(spec.shape, spec.dtype))


def test_the_digest_is_that_of_the_sorted_names_and_digests(tmp_path: Path) -> None:
    root = write(tmp_path / "x", "a/1.jpg", "a-b/1.jpg", "a.b/1.jpg", "a/b/1.jpg", "a/b-c/1.jpg", "a/b.jpg", "B/é.jpg")
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.jpg"))
    source = source_stamps_and_digests.stamp_source((root,))
    assert [file.name for file in source.files] == names
    assert [file.path for file in source.files] == [root / name for name in names]
    total = hashlib.md5()
    for name in names:
        total.update(f"{name}\0{hashlib.md5(name.encode()).hexdigest()}\n".encode())
    assert source_stamps_and_digests.digest_source(source, "md5") == total.hexdigest()
    assert source.size == sum(len(name.encode()) for name in names)
    assert source == source_stamps_and_digests.stamp_source((root,)) and source_stamps_and_digests.is_unchanged(source)


# Memory.


def test_stamps_take_little_memory(tmp_path: Path) -> None:
    root = tmp_path / "x"
    count = 3000
    for number in range(3):
        (root / f"class {number}").mkdir(parents=True)
        for file in range(count // 3):
            (root / f"class {number}" / f"image_{file:06d}.jpg").touch()
    source_stamps_and_digests.stamp_source((root,))
    tracemalloc.start()
    try:
        source = source_stamps_and_digests.stamp_source((root,))
        taken, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(source.files) == count
    assert taken < 130 * count
    assert peak < 500 * count


def test_the_list_of_files_is_counted_before_it_is_taken(tmp_path: Path) -> None:
    root = write(tmp_path / "x", "cat/1.jpg")
    with (
        pytest.raises(NoRoom, match="the list of files"),
        open_source(root, memory=DecodingMemory(lambda: Allowed(1 << 20, "a small machine"))) as reader,
    ):
        reader.describe()


def test_a_large_file_is_read_in_parts(tmp_path: Path) -> None:
    root = write(tmp_path / "x", "cat/1.jpg", "cat/3.jpg")
    data = np.random.default_rng(0).bytes((9 << 20) + 5)
    (root / "cat" / "2.jpg").write_bytes(data)
    same_as_torchvision(root)


def test_what_macos_adds_is_no_image(tmp_path: Path) -> None:
    """ImageFolder lists ``._1.jpg``, and PIL fails on it; other hidden names are images to both."""
    root = write(tmp_path / "x", "cat/1.jpg", "cat/._1.jpg", "cat/.2.jpg", "dog/._3.jpg", "dog/3.jpg")
    with open_source(root) as reader:
        assert reader.describe().items[2].shape == (3,)  # type: ignore[union-attr]
    assert bytes(read(root)["path/values"]) == b"cat/.2.jpgcat/1.jpgdog/3.jpg"
    (root / "dog/3.jpg").unlink()
    with pytest.raises(UnreadableSource, match="'dog' has no image"):
        read(root)


def test_hidden_directories_are_no_classes_and_have_no_images(tmp_path: Path) -> None:
    root = write(tmp_path / "x", ".ipynb_checkpoints/1.jpg", "cat/1.jpg", "cat/.ipynb_checkpoints/1.jpg", "dog/2.jpg")
    (root / ".git").mkdir()  # empty
    with legroom.open(root) as data:
        assert data.attributes["classes"] == ["cat", "dog"]
        assert data["label"].tolist() == [0, 1] and list(data["path"]) == ["cat/1.jpg", "dog/2.jpg"]
    for files, why in (
        ((".git/1.jpg", "1.jpg"), "no subdirectory for each class"),
        ((".git/1.jpg", "cat/.git/1.jpg"), "no images"),
        ((".git/1.jpg", "train/cat/1.jpg"), "splits"),
        ((".git/1.jpg",), "none of these"),
    ):
        with pytest.raises(UnreadableSource, match=why):
            legroom.open(write(tmp_path / why[:6], *files))


def test_links_that_lead_nowhere_are_no_directories(tmp_path: Path) -> None:
    root = write(tmp_path / "x", "cat/1.jpg", "dog/2.jpg")
    (root / "cat/loop").symlink_to("loop")
    same_as_torchvision(root)
    (root / ".loop").symlink_to(".loop")  # where ImageFolder itself raises an error
    assert read(root)["label"].tolist() == [0, 1]


def test_describing_again_after_an_error_finds_each_image_once(tmp_path: Path) -> None:
    root = write(tmp_path / "x", "cat/1.jpg", "dog/2.jpg")
    (root / "fox").mkdir()
    with open_source(root) as reader:
        with pytest.raises(UnreadableSource, match="'fox' has no image"):
            reader.describe()
        write(root, "fox/3.jpg")
        out: Any = np.empty(3, np.int64)
        reader.read_into("label", out)
        assert out.tolist() == [0, 1, 2]
