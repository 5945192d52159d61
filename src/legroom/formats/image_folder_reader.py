"""Read folders of images in the layout of torchvision's ImageFolder: one directory per class, images below it.

``image`` is the files' bytes as they are, ``label`` the number of the class in sorted order, ``path`` the file's path
below the root. The order of the rows is ImageFolder's, so that row i is its sample i: classes sorted, in each class the
directories sorted by their whole path, in each directory the files sorted. Links are followed. Two differences: files
``._1.jpg``, which macOS adds on other file systems, are skipped. ImageFolder lists them and fails when it decodes one.
Directories that begin with a dot, such as ``.git`` and ``.ipynb_checkpoints``, are skipped; there they are classes.

A directory whose subdirectories are splits (``train/``, ``val/``) or have no images is refused when it is recognized.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from legroom.errors import UnreadableSource, UnsupportedData
from legroom.formats.base_reader import ArraySpec, Description, Selection, Slab
from legroom.formats.detect import NAMES_READ, is_folder, names_in, not_a_dataset
from legroom.formats.file_reads_and_errors import STAMP_BYTES, FolderFile, FolderRoot, are_among, packed_stamp, sizes_in
from legroom.formats.fill_output_arrays import Array
from legroom.formats.gather_byte_ranges import (
    SLAB_MEMORY,
    GrowingMemory,
    SlabReader,
    ragged_specs,
    rows_between,
    slabs_of_rows,
)
from legroom.messages import listed, say

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision has them
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"})
# How names begin that may stand beside the directories of the classes.
_BESIDE_CLASSES = (".", "readme", "license", "thumbs.db", "desktop.ini")
_APPLE_DOUBLE = "._"
_ADDED_BY_MACOS = "__MACOSX"  # its files are named as images, but have none
_CLASSES_LOOKED_INTO = 3
_READ = 1 << 20
_NAME = 150  # bytes of a name, and of its place in a list, while its directory is listed
_ROW = STAMP_BYTES + 40  # bytes of a row in the index, without its path
_MOST_DEPTH = 64  # directories within each other; more is a link to a parent
_MOST_CLASSES = 1 << 20


def is_image(name: str) -> bool:
    """Whether a file of that name is an image. ``._1.jpg`` is not: macOS keeps what it knows of 1.jpg there."""
    return name.lower().endswith(IMAGES) and not name.startswith(_APPLE_DOUBLE)


def is_hidden(folder: str) -> bool:
    """Whether a directory of that name is passed over: programs keep their own files in it."""
    return folder.startswith(".")


def require_classes(path: Path, names: Mapping[str, bool]) -> None:
    """Refuse a directory that may not be one directory of images per class."""
    classes = [name for name in sorted(names) if names[name] and not is_hidden(name)]
    beside = [name for name in sorted(names) if not names[name]]
    if all(name.lower() in _SPLITS for name in classes):
        example = path / classes[0]
        why = say("its subdirectories are splits, not classes: {names}", names=listed(classes))
        raise not_a_dataset(path, why, say("pass one of them: {example}", example=example))
    if not any(_has_image(path / name) for name in classes[:_CLASSES_LOOKED_INTO]):
        why = say("it is a directory without data files, and its subdirectories have no images")
        raise not_a_dataset(
            path, why, say("pass a file in it, or a directory with one subdirectory of images per class")
        )
    if files := [name for name in beside if not name.lower().startswith(_BESIDE_CLASSES)]:
        why = say("it has subdirectories and the file {name!r} beside them: it is unclear what to read", name=files[0])
        raise not_a_dataset(
            path, why,
            say("pass the file or the subdirectory that you mean, for example {example}", example=path / classes[0]),
            say("for images by class, pass a directory that has nothing but one subdirectory per class"),
        )  # fmt: skip


def folders_with_images(path: Path, names: Mapping[str, bool]) -> list[str]:
    """Which of the first directories in it have images."""
    folders = [name for name in sorted(names) if names[name] and not is_hidden(name)]
    return [name for name in folders[:_CLASSES_LOOKED_INTO] if _has_image(path / name)]


def refuse_images_without_classes(path: Path, names: Iterable[str]) -> None:
    """Raise if these names in a directory without subdirectories have images among them."""
    if not any(map(is_image, names)):
        return
    raise UnreadableSource(
        say("cannot read {path}", path=path),
        why=say("it has images, but no subdirectory for each class"),
        fix=(
            say("if it is one of the classes, pass the directory above it: {above}", above=path.absolute().parent),
            say("without classes, move the images into one subdirectory: {folder}", folder=path / "all"),
        ),
    )


def _has_image(path: Path) -> bool:
    """Whether one of the first names below a directory is that of an image."""
    waiting, looked = [path], 0
    while waiting and looked <= NAMES_READ:
        folder = waiting.pop()
        try:
            names = names_in(folder)
        except UnreadableSource:  # below /dev and /proc directories come and go; others may be private
            looked += 1
            continue
        looked += 1 + len(names)
        if any(is_image(name) for name, below in names.items() if not below):
            return True
        waiting += [folder / name for name, below in names.items() if below and not is_hidden(name)]
    return False


class ImageFolderReader(SlabReader):
    """A directory of one directory per class."""

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        self._root = FolderRoot(path)
        self._begin()

    def _begin(self) -> None:
        self._classes: list[str] = []
        self._labels = array("q")
        self._paths, self._path_offsets = bytearray(), array("q", [0])
        self._stamps = bytearray()  # of the images, in the order of their rows
        self._folders = bytearray()  # stamps of the directories
        self._offsets: Array = np.zeros(1, np.int64)

    def _describe(self) -> Description:
        what = say("the list of files in {path}", path=self.path)
        counted = GrowingMemory(self.memory, what)
        self._begin()  # what an attempt that was refused has found
        self._classes = sorted(self._listed("", counted)[0])
        if not self._classes or len(self._classes) > _MOST_CLASSES:
            raise self._refused(say("it has {count} subdirectories", count=len(self._classes)))
        if _ADDED_BY_MACOS in self._classes:
            fix = say("remove the directory if it is not a class: {folder}", folder=self.path / _ADDED_BY_MACOS)
            raise self._refused(
                say("{name} is what macOS adds to a zip archive, not a class", name=_ADDED_BY_MACOS), fix
            )
        for number, name in enumerate(self._classes):
            self._add_class(number, name, counted)
        counted.add(24 * len(self._labels))
        self._offsets = np.zeros(len(self._labels) + 1, np.int64)
        np.cumsum(sizes_in(self._stamps), out=self._offsets[1:])
        rows = len(self._labels)
        specs = [
            *ragged_specs("image", rows, int(self._offsets[-1])),
            ArraySpec("label", (rows,), np.dtype(np.int64), meaning={"classes": self._classes}),
            *ragged_specs("path", rows, len(self._paths), text=True),
        ]
        chosen = set(self.selection.choose([spec.name for spec in specs], self.path))
        taken = [spec for spec in specs if spec.name in chosen]
        return Description("imagefolder", tuple(taken), {"classes": self._classes}, (self.path,))

    def _add_class(self, number: int, name: str, counted: GrowingMemory) -> None:
        before = len(self._labels)
        listings = dict(self._below(name, counted))
        for folder in sorted(listings):
            for file in sorted(listings[folder]):
                if is_image(file):
                    self._add_image(number, f"{folder}/{file}", counted)
        if len(self._labels) == before:
            fix = say("remove the directory if it is not a class: {folder}", folder=self.path / name)
            raise self._refused(say("class {name!r} has no image", name=name), fix)

    def _add_image(self, label: int, path: str, counted: GrowingMemory) -> None:
        text = _utf8(self.path, path)
        counted.add(_ROW + len(text) * 9 // 8)
        self._labels.append(label)
        self._paths += text
        self._path_offsets.append(len(self._paths))
        self._stamps += packed_stamp(self._root.stat(path))

    def _below(self, name: str, counted: GrowingMemory) -> Iterator[tuple[str, list[str]]]:
        """Each directory below that one, and the names of its files."""
        waiting = [(name, 0)]
        while waiting:
            folder, depth = waiting.pop()
            if depth == _MOST_DEPTH:
                raise self._refused(say("{folder!r} is {depth} directories deep", folder=folder, depth=depth))
            folders, files = self._listed(folder, counted)
            yield folder, files
            waiting += [(f"{folder}/{one}", depth + 1) for one in folders]

    def _listed(self, folder: str, counted: GrowingMemory) -> tuple[list[str], list[str]]:
        """The directories and the other names in a directory."""
        fd = self._root.open_folder(folder)
        folders: list[str] = []
        files: list[str] = []
        try:
            counted.add(STAMP_BYTES)
            self._folders += packed_stamp(os.fstat(fd))
            with os.scandir(fd) as found:
                for one in found:
                    counted.add(_NAME + len(one.name))
                    if not is_folder(one):
                        files.append(one.name)
                    elif not is_hidden(one.name):
                        folders.append(one.name)
        except OSError as problem:
            raise self._root.gone(folder, problem) from problem
        finally:
            os.close(fd)
        return folders, files

    def is_listed_among(self, stamps: bytes) -> bool:
        """Whether every image and directory that was found has one of these stamps."""
        return are_among(self._folders, stamps) and are_among(self._stamps, stamps)

    def _slabs(self, spec: ArraySpec) -> Sequence[Slab] | None:
        return slabs_of_rows(self._offsets, self._decode) if spec.name == "image/values" else None

    def _decode(self, start: int, end: int) -> Iterator[memoryview]:
        with self.memory.take(SLAB_MEMORY, say("{name!r} of {path}", name="image/values", path=self.path)):
            first, skip, lengths = rows_between(self._offsets, start, end)
            for row, (begin, length) in enumerate(zip(skip.tolist(), lengths.tolist(), strict=True), first):
                if length:
                    yield from self._file_bytes(row, begin, length)

    def _file_bytes(self, row: int, begin: int, length: int) -> Iterator[memoryview]:
        path = bytes(self._paths[self._path_offsets[row] : self._path_offsets[row + 1]]).decode()
        stamp = self._stamps[row * STAMP_BYTES : (row + 1) * STAMP_BYTES]
        with FolderFile(self._root, path, stamp) as file:
            for at in range(begin, begin + length, _READ):
                yield memoryview(file.read_at(at, min(_READ, begin + length - at)))

    def _small(self, spec: ArraySpec) -> Array:
        if spec.name == "image/offsets":
            return self._offsets
        if spec.name == "path/values":
            return np.frombuffer(self._paths, np.uint8)
        return np.frombuffer(self._labels if spec.name == "label" else self._path_offsets, np.int64)

    def descriptors(self) -> list[int]:
        """File descriptor of the directory."""
        return [self._root.fd]

    def _close(self) -> None:
        self._root.close()

    def _refused(self, why: str, *fix: str) -> UnreadableSource:
        return UnreadableSource(
            say("cannot read {path} as a folder of images", path=self.path),
            why=why,
            fix=(
                *fix,
                say("pass a directory in which every subdirectory is a class with images: DIRECTORY/CLASS/1.jpg"),
            ),
        )


def _utf8(root: Path, path: str) -> bytes:
    try:
        return path.encode()
    except UnicodeEncodeError as problem:
        raise UnsupportedData(
            say("{path} has a file name that is not text", path=root),
            why=say("the name {name!r} is not UTF-8", name=path),
            fix=(say("rename the file"),),
        ) from problem
