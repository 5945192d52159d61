"""Sources that change under a load, or between two: the entry of one version never holds another's data."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from cache_scenario_process import BUILD_STEPS
from format_samples import megatron_index

import legroom
from legroom.cache import drop_and_gc, list_and_verify, source_stamps_and_digests
from legroom.cache import store_directories as store_module
from legroom.errors import LegroomError, SourceChanged

ROWS = 300


def write_npy(path: Path, number: int) -> None:
    with path.open("wb") as file:
        np.save(file, np.full((ROWS, 100), number))


def write_npz(path: Path, number: int) -> None:
    with path.open("wb") as file:
        np.savez(file, array=np.full((ROWS, 100), number))


def write_zipped(path: Path, number: int) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, array=np.full((ROWS, 100), number))


def write_hdf5(path: Path, number: int) -> None:
    with h5py.File(path, "w") as file:
        file["array"] = np.full((ROWS, 100), number)


def write_gzip(path: Path, number: int) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("array", data=np.full((ROWS, 100), number), chunks=(50, 100), compression="gzip")


def write_odd(path: Path, number: int) -> None:
    """Read through HDF5, slab by slab."""
    with h5py.File(path, "w") as file:
        file.create_dataset("array", data=np.full((ROWS, 100), number), chunks=(50, 100), scaleoffset=0)


def write_linked(path: Path, number: int) -> None:
    path.mkdir()
    write_hdf5(path / "far.h5", number)
    with h5py.File(path / "near.h5", "w") as file:
        file["array"] = h5py.ExternalLink("far.h5", "array")


def write_virtual(path: Path, number: int) -> None:
    path.mkdir()
    write_hdf5(path / "far.h5", number)
    layout = h5py.VirtualLayout((ROWS, 100), np.int64)
    layout[...] = h5py.VirtualSource("far.h5", "array", shape=(ROWS, 100))
    with h5py.File(path / "near.h5", "w") as file:
        file.create_virtual_dataset("array", layout)


def write_storage(path: Path, number: int) -> None:
    """With storage that is found by way of the link."""
    path.mkdir()
    np.full((ROWS, 100), number).tofile(path / "far.raw")
    raw = str(path.with_name("link") / "far.raw")
    with h5py.File(path / "near.h5", "w") as file:
        file.create_dataset("array", (ROWS, 100), np.int64, external=[(raw, 0, ROWS * 800)])


def write_zarr(path: Path, number: int) -> None:
    zarr.create_array(store=str(path), data=np.full((ROWS, 100), number), chunks=(50, 100))


def write_parquet(path: Path, number: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"array": np.full(ROWS * 100, number)}), path)


def write_arrow(path: Path, number: int) -> None:
    import pyarrow as pa

    table = pa.table({"array": np.full(ROWS * 100, number)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def write_safetensors(path: Path, number: int) -> None:
    from safetensors.numpy import save_file

    save_file({"array": np.full((ROWS, 100), number)}, path)


def write_megatron(path: Path, number: int) -> None:
    """The index is the same in both versions."""
    path.mkdir()
    np.full(ROWS * 100, number, np.uint16).tofile(path / "near.bin")
    (path / "near.idx").write_bytes(megatron_index([100] * ROWS, [0, ROWS]))


WRITERS: dict[str, Callable[[Path, int], None]] = {
    name.removeprefix("write_"): writer for name, writer in globals().items() if name.startswith("write_")
}
INSIDE = {**dict.fromkeys(("linked", "virtual", "storage"), "near.h5"), "megatron": "near.idx"}


class Flip:
    """Two versions of a source and a symbolic link that leads to one of them."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.versions = [folder / "v0", folder / "v1"]
        for number, version in enumerate(self.versions):
            WRITERS[kind](version, number + 1)  # zeros would be chunks that are not written
        self.link = folder / "link"
        self.path = self.link / INSIDE[kind] if kind in INSIDE else self.link
        self.spare = folder / "spare"
        self.to(0)

    def to(self, number: int) -> None:
        os.symlink(self.versions[number], self.spare)
        os.rename(self.spare, self.link)


def value(data: Any) -> set[int]:
    return set(np.unique(np.asarray(data["array" if "array" in data else "sequences/values"])).tolist())


def looked_at(shm: Path, flip: Flip) -> None:
    """Each version, by whatever entry it has now, is itself."""
    for number in (0, 1):
        flip.to(number)
        with legroom.open(flip.path) as data:
            assert value(data) == {number + 1}


# Flipped to the other version at the first point, and back at the second. "opening" and "opened" are before and after
# the reader is made.
WAYS = [
    ("opening", "opened"),
    ("opening", "work"),
    ("opening", "read"),
    ("elected", "opened"),
    ("elected", "manifest"),
    ("opened", "read"),
    ("opened", "written"),
    ("read", "allocate"),
    ("read", "written"),
    ("allocate", "write"),
    ("allocate", "written"),
    ("write", "manifest"),
]


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("kind", WRITERS)
def test_a_link_flipped_and_flipped_back_poisons_no_entry(
    shm: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from legroom.cache import elect_builder_and_publish

    flip = Flip(tmp_path, kind)
    opens = elect_builder_and_publish.open_source
    for there, back in WAYS:
        flip.to(0)
        done: list[str] = []

        def take(name: str, there: str = there, back: str = back, done: list[str] = done) -> None:
            if name in (there, back) and name not in done:
                done.append(name)
                flip.to(int(name == there))

        def opened(*arguments: Any, take: Callable[[str], None] = take, **more: Any) -> Any:
            take("opening")
            reader = opens(*arguments, **more)
            take("opened")
            return reader

        monkeypatch.setattr(store_module, "step_hook", take)
        monkeypatch.setattr(elect_builder_and_publish, "open_source", opened)
        try:
            with legroom.open(flip.path) as data:
                assert len(value(data)) == 1
        except SourceChanged:
            pass
        monkeypatch.setattr(store_module, "step_hook", None)
        monkeypatch.setattr(elect_builder_and_publish, "open_source", opens)
        looked_at(shm, flip)
        for version in list_and_verify.verify():
            assert version.whole

        drop_and_gc.drop(force=True)


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("kind", ["npy", "gzip", "zarr", "virtual", "megatron"])
def test_a_storm_of_flips_poisons_no_entry(shm: Path, tmp_path: Path, kind: str) -> None:
    flips(shm, tmp_path, kind, seconds=1)


@pytest.mark.soak
@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("kind", WRITERS)
def test_a_long_storm_of_flips_poisons_no_entry(shm: Path, tmp_path: Path, kind: str) -> None:
    flips(shm, tmp_path, kind, seconds=10)


def flips(shm: Path, tmp_path: Path, kind: str, seconds: float) -> None:
    """Load for so long, and until a load worked, while a thread flips the link at random moments."""
    flip = Flip(tmp_path, kind)
    digests = {}
    for number in (0, 1):
        flip.to(number)
        with legroom.open(flip.path) as data:
            digests[data.info.digest] = number + 1
    stop = threading.Event()
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)

    def storm() -> None:
        while not stop.is_set():
            flip.to(rng.randrange(2))
            time.sleep(rng.random() * 0.004)

    thread = threading.Thread(target=storm)
    thread.start()
    tried = loaded = 0
    try:
        start = time.monotonic()
        while (passed := time.monotonic() - start) < seconds or (not loaded and passed < 60):
            tried += 1
            try:
                with legroom.open(flip.path) as data:
                    loaded += 1
                    assert value(data) == {digests[data.info.digest]}, (seed, tried)
            except SourceChanged:
                pass
            shutil.rmtree(shm / "sources")
            (shm / "sources").mkdir(mode=0o700)
            for entry in os.listdir(shm):
                if len(entry) == 32:
                    shutil.rmtree(shm / entry)
    finally:
        stop.set()
        thread.join()
    assert loaded, tried


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("kind", INSIDE)
def test_data_in_another_file_that_is_rewritten_under_the_load_poison_no_entry(
    shm: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in place: the file keeps its name and its inode, and the file that refers to it stays as it is."""

    flip = Flip(tmp_path, kind)
    (far,) = flip.versions[0].glob("near.bin" if kind == "megatron" else "far.*")
    contents = [far.read_bytes(), (flip.versions[1] / far.name).read_bytes()]
    digests = []
    for content in contents:
        far.write_bytes(content)
        with legroom.open(flip.path) as data:
            digests.append(data.info.digest)
    for step in BUILD_STEPS[:10]:
        drop_and_gc.drop(force=True)
        far.write_bytes(contents[0])
        done: list[str] = []

        def rewrite(name: str, step: str = step, done: list[str] = done) -> None:
            if name == step and not done:
                done.append(name)
                with far.open("r+b") as file:  # at no moment is it empty
                    file.write(contents[1])

        monkeypatch.setattr(store_module, "step_hook", rewrite)
        try:
            with legroom.open(flip.path) as data:
                assert value(data) == {digests.index(data.info.digest) + 1}, step
        except SourceChanged:
            pass
        monkeypatch.setattr(store_module, "step_hook", None)
        assert done
        with legroom.open(flip.path) as data:
            assert value(data) == {2} and data.info.digest == digests[1], step


class TestZarr:
    @pytest.fixture
    def linked(self, tmp_path: Path) -> Path:
        """A store whose array's chunks lie behind a symbolic link."""
        store = tmp_path / "store"
        write_zarr(store, 1)
        shutil.move(store / "c", tmp_path / "chunks")
        (store / "c").symlink_to(tmp_path / "chunks")
        return store

    @pytest.mark.usefixtures("old_files")
    def test_a_chunk_that_changes_behind_a_link_is_noticed(self, shm: Path, tmp_path: Path, linked: Path) -> None:
        with legroom.open(linked) as data:
            assert value(data) == {1}
        write_zarr(tmp_path / "other", 2)
        shutil.copytree(tmp_path / "other" / "c", tmp_path / "chunks", dirs_exist_ok=True)
        (found,) = list_and_verify.verify()
        assert found.source == "changed"
        with legroom.open(linked) as data:
            assert value(data) == {2}

    @pytest.mark.parametrize("step", BUILD_STEPS[:10])
    @pytest.mark.usefixtures("old_files")
    def test_a_chunk_that_comes_under_the_load_is_not_taken_for_what_was_listed(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        store = tmp_path / "store"
        write_zarr(store, 1)
        chunk = store / "c" / "0" / "0"
        chunk.rename(tmp_path / "chunk")
        without = source_stamps_and_digests.digest_source(source_stamps_and_digests.stamp_source([store]), "md5")
        done: list[str] = []

        def come(name: str) -> None:
            if name == step and not done:
                done.append(name)
                shutil.copy(tmp_path / "chunk", chunk)

        monkeypatch.setattr(store_module, "step_hook", come)
        with legroom.open(store) as data:
            assert (data.info.digest == without) == (value(data) == {0, 1}), step
        assert done

    @pytest.mark.usefixtures("old_files")
    def test_a_chunk_that_comes_and_goes_under_the_load_is_noticed(
        self, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = tmp_path / "store"
        write_zarr(store, 1)
        chunk = store / "c" / "0" / "0"
        chunk.rename(tmp_path / "chunk")
        done: list[str] = []

        def come_and_go(name: str) -> None:
            if name == "elected" and not done:
                shutil.copy(tmp_path / "chunk", chunk)
            if name == "manifest" and not done:
                chunk.unlink()
                done.append(name)

        monkeypatch.setattr(store_module, "step_hook", come_and_go)
        with legroom.open(store) as data:
            assert value(data) == {0, 1}
        assert done


class TestHdf5:
    """Data that lie in other files: searched again whenever they are opened."""

    pytestmark = pytest.mark.usefixtures("old_files")
    KINDS = ("virtual", "storage", "link")

    @pytest.fixture
    def places(self, tmp_path: Path) -> Path:
        """The same file name in several directories, with other data in each."""
        for number, name in enumerate(("main", "work", "first", "second")):
            folder = tmp_path / name
            folder.mkdir()
            if name != "main":
                write_hdf5(folder / "far.h5", number)
                np.full((ROWS, 100), number).tofile(folder / "far.raw")
        layout = h5py.VirtualLayout((ROWS, 100), np.int64)
        layout[...] = h5py.VirtualSource("far.h5", "array", shape=(ROWS, 100))
        with h5py.File(tmp_path / "main" / "link.h5", "w") as file:
            file["array"] = h5py.ExternalLink("far.h5", "array")
        with h5py.File(tmp_path / "main" / "virtual.h5", "w") as file:
            file.create_virtual_dataset("array", layout)
        with h5py.File(tmp_path / "main" / "storage.h5", "w") as file:
            file.create_dataset("array", (ROWS, 100), np.int64, external=[("far.raw", 0, h5py.h5f.UNLIMITED)])
        return tmp_path

    def same_as_hdf5(self, path: Path) -> set[int]:
        with legroom.open(path) as data, h5py.File(path) as file:
            assert value(data) == value(file)
            return value(data)

    @pytest.mark.parametrize("kind", ["link", "virtual", "storage"])
    def test_the_working_directory(self, shm: Path, places: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        path = places / "main" / f"{kind}.h5"
        for number, name in enumerate(("work", "first", "second", "work"), 1):
            monkeypatch.chdir(places / name)
            assert self.same_as_hdf5(path) == {number if number < 4 else 1}

    @pytest.mark.parametrize(("kind", "variable"), [("link", "HDF5_EXT_PREFIX"), ("virtual", "HDF5_VDS_PREFIX")])
    def test_the_prefixes(
        self, shm: Path, places: Path, monkeypatch: pytest.MonkeyPatch, kind: str, variable: str
    ) -> None:
        path = places / "main" / f"{kind}.h5"
        monkeypatch.chdir(places / "work")
        assert self.same_as_hdf5(path) == {1}
        for prefix, number in (
            (f"{places}/first", 2),
            (f"{places}/second:{places}/first", 3),
            (f"{places}/nowhere:{places}/first", 2),
            ("../second", 3),
            ("${ORIGIN}/../second", 1),
            ("", 1),
        ):
            monkeypatch.setenv(variable, prefix)
            assert self.same_as_hdf5(path) == {number}, prefix

    @pytest.mark.parametrize(
        ("prefix", "kinds", "loaded"),
        [
            ("first", KINDS, True),
            ("no:second", KINDS, True),
            ("${ORIGIN}/../second", KINDS, True),
            # Only the first file of a process is opened before the library is loaded.
            *(("x${ORIGIN}/../second", (kind,), False) for kind in KINDS),
        ],
    )
    def test_the_prefixes_that_the_library_was_loaded_with(
        self, shm: Path, places: Path, prefix: str, kinds: tuple[str, ...], loaded: bool
    ) -> None:
        """In processes of their own, with the variables set before, and changed after."""
        names = ("HDF5_EXT_PREFIX", "HDF5_VDS_PREFIX", "HDF5_EXTFILE_PREFIX")
        code = f"""
import os, sys
{"import h5py" if loaded else ""}
import legroom, numpy as np
os.chdir({str(places / "work")!r})
def shown(path):
    try:
        ours = int(legroom.open(path)["array"][0, 0])
    except legroom.LegroomError as problem:
        ours = problem.code
    import h5py
    with h5py.File(path) as file:
        try:
            return ours, int(file["array"][0, 0])
        except (OSError, KeyError):
            return ours, "unreadable-source"
for names in ((), {names!r}):
    os.environ.update(dict.fromkeys(names, {str(places / "first")!r}))
    for path in sys.argv[1:]:
        ours, theirs = shown(path)
        assert ours == theirs, (path, names, ours, theirs)
"""
        place = prefix.replace("first", str(places / "first")).replace("no:second", f"no:{places / 'second'}")
        env = {**os.environ, **dict.fromkeys(names, place)}
        paths = [str(places / "main" / f"{kind}.h5") for kind in kinds]
        for _ in range(2):
            done = subprocess.run([sys.executable, "-c", code, *paths], env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize("kind", ["link", "virtual"])
    def test_a_file_that_comes_earlier_in_the_search(
        self, shm: Path, places: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        monkeypatch.chdir(places / "work")
        path = places / "main" / f"{kind}.h5"
        assert self.same_as_hdf5(path) == {1}
        write_hdf5(places / "main" / "far.h5", 7)
        assert self.same_as_hdf5(path) == {7}
        (places / "main" / "far.h5").unlink()
        assert self.same_as_hdf5(path) == {1}

    def test_every_hop_of_a_chain(self, shm: Path, tmp_path: Path) -> None:
        write_hdf5(tmp_path / "d.h5", 4)
        write_hdf5(tmp_path / "e.h5", 5)
        for name, target in (("c", "d"), ("b", "c"), ("a", "b")):
            with h5py.File(tmp_path / f"{name}.h5", "w") as file:
                file["array"] = h5py.ExternalLink(f"{target}.h5", "array")
        path = tmp_path / "a.h5"
        assert self.same_as_hdf5(path) == {4}
        for hop in ("c", "b"):
            for target, number in (("e", 5), ("d", 4)):
                (tmp_path / f"{hop}.h5").unlink()
                with h5py.File(tmp_path / f"{hop}.h5", "w") as file:
                    file["array"] = h5py.ExternalLink(f"{target}.h5", "array")
                assert self.same_as_hdf5(path) == {number}, (hop, target)

    @pytest.mark.parametrize("kind", ["soft", "virtual"])
    def test_a_hop_inside_another_file(self, shm: Path, tmp_path: Path, kind: str) -> None:
        """A group of the middle file is itself a link, and is passed through on the way to a dataset below it."""
        for number in (4, 5):
            with h5py.File(tmp_path / f"far{number}.h5", "w") as file:
                file["below/array"] = np.full((ROWS, 100), number)

        def middle(number: int) -> None:
            with h5py.File(tmp_path / "middle.h5", "w") as file:
                file["group"] = h5py.ExternalLink(f"far{number}.h5", "/")
                file["short"] = h5py.SoftLink("/group/below")

        middle(4)
        path = tmp_path / "a.h5"
        with h5py.File(path, "w") as file:
            if kind == "soft":
                file["array"] = h5py.ExternalLink("middle.h5", "/short/array")
            else:
                layout = h5py.VirtualLayout((ROWS, 100), np.int64)
                layout[...] = h5py.VirtualSource("middle.h5", "short/array", shape=(ROWS, 100))
                file.create_virtual_dataset("array", layout)
        assert self.same_as_hdf5(path) == {4}
        with h5py.File(tmp_path / "far4.h5", "r+") as file:
            file["below/array"][...] = 6
        assert self.same_as_hdf5(path) == {6}
        middle(5)
        assert self.same_as_hdf5(path) == {5}

    def test_a_further_numbered_file(self, shm: Path, tmp_path: Path) -> None:
        from h5py import h5d, h5p, h5s, h5t

        space = h5s.create_simple((10,), (h5s.UNLIMITED,))
        space.select_hyperslab((0,), (h5s.UNLIMITED,), stride=(5,), block=(5,))
        options = h5p.create(h5p.DATASET_CREATE)
        options.set_virtual(space, b"part%b.h5", b"data", h5s.create_simple((5,)))
        with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
            h5d.create(file.id, b"array", h5t.NATIVE_INT32, h5s.create_simple((10,), (h5s.UNLIMITED,)), options)
        for number in range(3):
            with h5py.File(tmp_path / f"part{number}.h5", "w") as file:
                file["data"] = np.full(5, number, np.int32)
            assert self.same_as_hdf5(tmp_path / "a.h5") == set(range(number + 1))

    def test_attributes_of_a_linked_group(self, shm: Path, tmp_path: Path) -> None:
        write_hdf5(tmp_path / "a.h5", 1)
        with h5py.File(tmp_path / "b.h5", "w") as file:
            file.attrs["made"] = "first"
        with h5py.File(tmp_path / "a.h5", "r+") as file:
            file["more"] = h5py.ExternalLink("b.h5", "/")
        assert legroom.open(tmp_path / "a.h5").attributes["more/made"] == "first"
        with h5py.File(tmp_path / "b.h5", "r+") as file:
            file.attrs["made"] = "later"
        assert legroom.open(tmp_path / "a.h5").attributes["more/made"] == "later"

    def test_the_same_file_under_another_name_is_searched_from_there(
        self, shm: Path, places: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(places)
        write_hdf5(places / "main" / "far.h5", 8)
        assert self.same_as_hdf5(places / "main" / "link.h5") == {8}
        os.link(places / "main" / "link.h5", places / "first" / "other.h5")
        assert self.same_as_hdf5(places / "first" / "other.h5") == {2}
        assert self.same_as_hdf5(places / "main" / "link.h5") == {8}


@pytest.fixture
def on_a_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory whose file system writes to a device."""
    for folder in (tmp_path, Path("/var/tmp"), Path.cwd()):
        if os.stat(folder).st_dev != os.stat("/dev/shm").st_dev and _kind(folder) != "tmpfs":
            with tempfile.TemporaryDirectory(dir=folder) as own:
                yield Path(own)
            return
    pytest.skip("no file system on a device")


def _kind(folder: Path) -> str | None:
    from legroom.probe.filesystems_and_cgroups import filesystem_of
    from legroom.probe.host_files_and_syscalls import Host

    mount = filesystem_of(Host(), str(folder))
    return None if mount is None else mount.kind


def test_a_file_that_is_rewritten_through_a_map_is_noticed(shm: Path, on_a_disk: Path) -> None:
    path = on_a_disk / "a.npy"
    np.save(path, np.ones(4000, np.uint8))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[200] = 2  # the page is dirty from here on
        time.sleep(2.2)  # quiet for long enough that what is recorded is believed
        with legroom.open(path) as data:
            assert data["array"][72] == 2
        before = os.stat(path)
        mapped[200] = 3
        with legroom.open(path) as data:
            assert data["array"][72] == 3
        assert os.stat(path).st_ino == before.st_ino


@pytest.mark.parametrize("linked", [False, True])
def test_no_entry_has_other_data_than_its_digest_says(shm: Path, on_a_disk: Path, linked: bool) -> None:
    """A file in memory keeps its times when it is changed through a mapping: its record says nothing for a build."""
    if _kind(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is not in memory")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "a.npy")
        np.save(path, np.ones(4000, np.uint8))
        if linked:
            path = on_a_disk / "a.npy"
            path.symlink_to(Path(folder, "a.npy"))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            mapped[200] = 2
            time.sleep(2.2)
            with legroom.open(path) as data:
                assert data["array"][72] == 2
                first = data.info.key
            mapped[200] = 3
        drop_and_gc.drop([first])
        with legroom.open(path) as data:
            assert data["array"][72] == 3 and data.info.key.startswith(hashlib.md5(path.read_bytes()).hexdigest())
            assert data.info.key != first


@pytest.mark.parametrize("kind", ["npy", "hdf5", "safetensors"])
def test_a_map_in_place_is_of_the_file_whose_header_was_read(
    shm: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from legroom.cache import open_without_cache

    flip = Flip(tmp_path, kind)
    plans = open_without_cache.plan_files

    def flipped(*arguments: Any) -> Any:
        flip.to(1)
        return plans(*arguments)

    with legroom.open(flip.path, backing="inplace") as data:
        assert value(data) == {1}
    monkeypatch.setattr(open_without_cache, "plan_files", flipped)
    with pytest.raises(SourceChanged):
        legroom.open(flip.path, backing="inplace")


@pytest.mark.usefixtures("old_files")
def test_damage_of_a_file_that_is_being_replaced_is_looked_at_once_more(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from legroom.cache import elect_builder_and_publish

    path = tmp_path / "a.h5"
    write_hdf5(path, 1)
    whole, opens, times = path.read_bytes(), elect_builder_and_publish.open_source, []

    def halves(*arguments: Any, **more: Any) -> Any:
        times.append(1)
        path.write_bytes(whole if len(times) > 1 else whole[:300])
        return opens(*arguments, **more)

    monkeypatch.setattr(elect_builder_and_publish, "open_source", halves)
    with pytest.raises(SourceChanged):  # the second time it was still being written
        legroom.open(path)
    monkeypatch.setattr(elect_builder_and_publish, "open_source", opens)
    with legroom.open(path) as data:
        assert value(data) == {1}
    assert len(times) == 2


def test_errors_of_a_search_are_words(shm: Path, tmp_path: Path) -> None:
    write_linked(tmp_path / "x", 1)
    (tmp_path / "x" / "far.h5").unlink()
    with pytest.raises(LegroomError, match=r"far\.h5 is missing"):
        legroom.open(tmp_path / "x" / "near.h5")
