"""legroom.weights: the same tensors as their own libraries read, on the host and on a fake GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import legroom
from legroom.cache import write_entry_files
from legroom.errors import MissingKey, NoRoom, UnknownFormat, UnreadableSource, UnsupportedData, UsageError
from legroom.loader import shared_model_weights

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from cuda_fake import FakeDriver  # noqa: E402

from fake_libcuda import FakeLibrary  # noqa: E402
from legroom.gpu.cuda_driver_api import CudaRefused, DriverApi  # noqa: E402


@pytest.fixture(autouse=True)
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEGROOM_SHM", "LEGROOM_DIR"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, os.fspath(folder))


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "embed.weight": torch.randn(31, 8).bfloat16(),
        "layer.0.weight": torch.randn(8, 8, dtype=torch.float16),
        "layer.0.bias": torch.randn(8),
        "scale": torch.tensor(2.5),
        "ids": torch.arange(7),
        "mask": torch.ones(3, 2, dtype=torch.bool),
        "f8": torch.randn(16).to(torch.float8_e4m3fn),
        "nothing": torch.empty(0, 4),
    }


def same(found: Any, expected: dict[str, Any]) -> None:
    assert set(found) == set(expected) and len(found) == len(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert not found[name].requires_grad
        left, right = found[name].detach().cpu().contiguous(), tensor.detach().contiguous()
        assert left.numel() == 0 or torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def sharded(folder: Path, expected: dict[str, Any]) -> Path:
    folder.mkdir()
    names = sorted(expected)
    places = {}
    for number, part in enumerate((names[:3], names[3:])):
        file = f"model-{number}.safetensors"
        safetensors.save_file({name: expected[name] for name in part}, folder / file)
        places.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def written(tmp_path: Path, kind: str, expected: dict[str, Any]) -> Path:
    if kind == "sharded":
        return sharded(tmp_path / "model", expected)
    if kind == "checkpoint":
        torch.save(expected, tmp_path / "model.pt")
        return tmp_path / "model.pt"
    folder = tmp_path / "single"
    folder.mkdir()
    safetensors.save_file(expected, folder / "model.safetensors")
    return folder if kind == "directory" else folder / "model.safetensors"


KINDS = ["file", "directory", "sharded", "checkpoint"]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_what_their_library_reads(tmp_path: Path, kind: str) -> None:
    expected = state()
    path = written(tmp_path, kind, expected)
    with legroom.weights(path) as found:
        same(found, expected)
        kept = found["layer.0.bias"]
    assert torch.equal(kept, expected["layer.0.bias"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True])
def test_on_a_gpu(tmp_path: Path, kind: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(shared_model_weights, "open_driver", lambda device: driver)
    monkeypatch.setattr("legroom.loader.batches.cuda_upload.CHUNK", 100)
    expected = state()
    found = legroom.weights(written(tmp_path, kind, expected), "cuda", shared=shared)
    same(found, expected)
    assert len(driver.shared_memory.maps) == shared and not driver.registered
    assert ("copied to the GPU here" in found.why) == shared
    found.close()
    assert not driver.shared_memory.maps


@pytest.mark.parametrize("shared", [False, True])
def test_floating_point_tensors_are_converted(tmp_path: Path, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_model_weights, "open_driver", lambda device: FakeDriver())
    monkeypatch.setattr(shared_model_weights, "_MOST_STAGED", 200)  # several groups
    expected = state()
    path = written(tmp_path, "file", expected)
    right = {
        name: tensor.to(torch.float32) if tensor.is_floating_point() else tensor for name, tensor in expected.items()
    }
    same(legroom.weights(path, dtype=torch.float32), right)
    with legroom.weights(path, "cuda", shared=shared, dtype=torch.float32) as found:
        same(found, right)


def test_a_model_takes_them_without_a_copy(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    found = legroom.weights(tmp_path / "model.pt")
    other.load_state_dict(found, assign=True)
    assert other[0].weight.data_ptr() == found["0.weight"].data_ptr()
    inputs = torch.randn(3, 8)
    assert torch.equal(model(inputs), other(inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_only_some_tensors(tmp_path: Path, kind: str) -> None:
    expected = state()
    path = written(tmp_path, kind, expected)
    same(legroom.weights(path, keys=["ids", "scale"]), {name: expected[name] for name in ("ids", "scale")})
    with pytest.raises(MissingKey):
        legroom.weights(path, keys=["ids", "missing"])


def test_memory_that_cannot_be_shared_is_copied_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_model_weights, "open_driver", lambda device: FakeDriver("api"))
    expected = state()
    found = legroom.weights(written(tmp_path, "file", expected), "cuda", shared=True)
    assert "own copy: libcuda.so.1 cannot be loaded" in found.why
    same(found, expected)


def test_weights_larger_than_gpu_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_model_weights, "open_driver", lambda device: FakeDriver(free=100))
    with pytest.raises(NoRoom, match="do not fit"):
        legroom.weights(written(tmp_path, "file", state()), "cuda", shared=True)


def test_memory_for_the_conversion_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(1 << 16)
    safetensors.save_file({"a": tensor}, tmp_path / "model.safetensors")
    half = tensor.nbytes // 2
    for free, fits in ((half + tensor.nbytes - 1, False), (half + tensor.nbytes, True)):
        driver = FakeDriver(free=free)
        monkeypatch.setattr(shared_model_weights, "open_driver", lambda device, driver=driver: driver)
        if fits:
            legroom.weights(tmp_path / "model.safetensors", "cuda", shared=True, dtype=torch.float16).close()
        else:
            with pytest.raises(NoRoom, match="do not fit"):
                legroom.weights(tmp_path / "model.safetensors", "cuda", shared=True, dtype=torch.float16)
        assert not driver.shared_memory.maps


def test_memory_that_another_process_took_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(shared_model_weights, "open_driver", lambda device: driver)
    path = written(tmp_path, "file", state())

    empty = torch.empty

    def refuse(shape: tuple[int, ...], **options: Any) -> Any:
        if 0 not in shape:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 MiB.\nMore words")
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(NoRoom, match="CUDA out of memory"):
        legroom.weights(path, "cuda", shared=True, dtype=torch.float32)
    assert not driver.shared_memory.maps


@pytest.mark.parametrize("made", [False, True])
def test_a_copy_that_torch_cannot_use_is_closed(tmp_path: Path, made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legroom.cache.source_digest_records.QUIET_NS", 0)  # the files are young
    driver = FakeDriver()
    monkeypatch.setattr(shared_model_weights, "open_driver", lambda device: driver)
    expected = state()
    path = written(tmp_path, "file", expected)
    other = legroom.weights(path, "cuda", shared=True) if made else None
    seen = []
    views = shared_model_weights._views

    def refuse(*given: Any) -> Any:
        seen.append(given)
        if len(seen) == 1 and other is None:  # to fill it
            return views(*given)
        raise CudaRefused("torch copies GPU memory instead of using it in place")

    monkeypatch.setattr(shared_model_weights, "_views", refuse)
    found = legroom.weights(path, "cuda", shared=True)
    assert "own copy: torch copies GPU memory" in found.why
    same(found, expected)
    if other is not None:
        other.close()
    assert not driver.shared_memory.maps


def test_wrong_arguments(tmp_path: Path) -> None:
    path = written(tmp_path, "file", state())
    with pytest.raises(UsageError, match="shared=True needs a device"):
        legroom.weights(path, shared=True)
    with pytest.raises(UsageError, match="dtype"):
        legroom.weights(path, dtype=torch.int8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableSource, match="no weights in"):
        legroom.weights(tmp_path / "empty")
    (tmp_path / "broken").mkdir()
    for text in ("{", "[]", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "{}"):
        (tmp_path / "broken" / "model.safetensors.index.json").write_text(text)
        with pytest.raises(UnreadableSource):
            legroom.weights(tmp_path / "broken")


def test_an_index_that_names_what_its_shard_lacks_and_tensors_that_are_there_twice(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model", state())
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**places, "lost.weight": "model-1.safetensors"}}))
    with pytest.raises(UnreadableSource, match="is not complete") as caught:
        legroom.weights(folder)
    assert "lost.weight" in caught.value.why
    del places["ids"]
    index.write_text(json.dumps({"weight_map": places}))
    assert set(legroom.weights(folder)) == set(places)  # what the index does not name is left out
    index.unlink()
    safetensors.save_file({"ids": torch.zeros(3)}, folder / "more.safetensors")
    with pytest.raises(UnreadableSource, match="twice"):
        legroom.weights(folder)


def test_shards_in_a_directory_below_the_index(tmp_path: Path) -> None:
    # By its last name alone, a shard was another file of that name.
    (tmp_path / "part").mkdir()
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "part" / "x.safetensors")
    safetensors.save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "x.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "./part/x.safetensors", "b": "part/../x.safetensors"}}))
    found = legroom.weights(tmp_path)
    assert (found["a"].tolist(), found["b"].tolist()) == ([1, 1], [0, 0])
    for outside in ("../x.safetensors", str(tmp_path / "x.safetensors")):
        index.write_text(json.dumps({"weight_map": {"a": outside}}))
        with pytest.raises(UnreadableSource, match="not below its directory"):
            legroom.weights(tmp_path)


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/legroom-attack",)


def test_no_pickled_code_runs(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": Attack()}, tmp_path / "model.pt")
    with pytest.raises(UnsupportedData, match=r"needs posix\.system"):
        legroom.weights(tmp_path / "model.pt")
    assert not os.path.exists("/tmp/legroom-attack")


def test_views_and_tied_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    values = {
        "t": base.t(),
        "part": base[1:3],
        "column": base[:, 2],
        "wide": base[0].expand(3, 6),
        "same": base,
        "again": base,
    }
    torch.save({"model": values, "epoch": 3, "list": [base[2]]}, tmp_path / "model.pt")
    found = legroom.weights(tmp_path / "model.pt")
    for name, tensor in {**{f"model/{k}": v for k, v in values.items()}, "list/0": base[2]}.items():
        assert torch.equal(found[name], tensor), name
    data = bytearray((tmp_path / "model.pt").read_bytes())
    at = data.index(np.arange(24.0, dtype=np.float32).tobytes()) + 17
    data[at] ^= 1
    (tmp_path / "damaged.pt").write_bytes(data)
    with pytest.raises(legroom.LegroomError, match="damaged"):
        legroom.weights(tmp_path / "damaged.pt")


def test_the_error_of_the_thread_that_failed_is_raised_when_the_others_end_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = write_entry_files.ArrayWriter._run

    def slow_to_fail(self: Any, *arguments: Any) -> Any:
        try:
            return run(self, *arguments)
        except legroom.LegroomError:
            time.sleep(0.5)  # the others are told to stop already
            raise

    monkeypatch.setattr(write_entry_files.ArrayWriter, "_run", slow_to_fail)
    base = torch.arange(24.0).view(4, 6)
    torch.save({f"t{number}": base[:, number] for number in range(6)}, tmp_path / "model.pt")
    data = bytearray((tmp_path / "model.pt").read_bytes())
    data[data.index(np.arange(24.0, dtype=np.float32).tobytes()) + 17] ^= 1
    (tmp_path / "model.pt").write_bytes(data)
    with pytest.raises(legroom.LegroomError, match="damaged"):
        legroom.weights(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (FakeLibrary("cuMemCreate"), "the driver has no virtual memory management"),  # an old driver
        (FakeLibrary(attributes={102: 1, 103: 0}), "cannot export GPU memory as a file descriptor"),  # WSL
        (FakeLibrary(failing={"cuMemCreate": 801}), "cuMemCreate: operation not supported"),  # some MIG profiles
    ],
)
def test_devices_that_cannot_share_keep_a_copy_each(
    tmp_path: Path, library: FakeLibrary, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(driver, "api", lambda: DriverApi(0, library))
    monkeypatch.setattr(shared_model_weights, "open_driver", lambda device: driver)
    expected = state()
    found = legroom.weights(written(tmp_path, "file", expected), "cuda", shared=True)
    assert found.why.startswith("this process's own copy: ") and words in found.why
    same(found, expected)


def test_a_store_that_others_may_use_is_not_shared_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_model_weights, "open_driver", lambda device: FakeDriver())
    expected = state()
    path = written(tmp_path, "file", expected)
    legroom.weights(path)
    (store,) = (tmp_path / "legroom_shm").glob("legroom-*")
    (store / "gpu").mkdir()
    (store / "gpu").chmod(0o755)
    found = legroom.weights(path, "cuda", shared=True)
    assert "own copy" in found.why and "others may use it" in found.why
    same(found, expected)


def test_files_that_were_removed_meanwhile_are_read_from_their_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_model_weights, "open_driver", lambda device: FakeDriver())
    monkeypatch.setattr("legroom.loader.batches.cuda_upload.CHUNK", 100)
    expected = state()
    path = written(tmp_path, "file", expected)
    legroom.weights(path)

    class Opened(shared_model_weights._Opened):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            for file in (tmp_path / "legroom_shm").glob("legroom-*/*/*.npy"):
                file.unlink()

    monkeypatch.setattr(shared_model_weights, "_Opened", Opened)
    same(legroom.weights(path, "cuda"), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_copy_that_exists_is_attached_by_the_manifests_alone(
    tmp_path: Path, kind: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("legroom.cache.source_digest_records.QUIET_NS", 0)  # the files are young
    driver = FakeDriver()
    monkeypatch.setattr(shared_model_weights, "open_driver", lambda device: driver)
    expected = state()
    path = written(tmp_path, kind, expected)
    first = legroom.weights(path, "cuda", shared=True, dtype=dtype)
    monkeypatch.setattr(shared_model_weights, "_Opened", lambda *_, **__: pytest.fail("the files were attached"))
    again = legroom.weights(path, "cuda", shared=True, dtype=dtype)
    right = (
        expected
        if dtype is None
        else {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in expected.items()}
    )
    same(again, right)
    first.close()
    same(again, right)  # it has a use of its own
    again.close()
    assert not driver.shared_memory.maps
    with pytest.raises(pytest.fail.Exception):
        legroom.weights(path, "cuda", shared=True, dtype=dtype)


CHILD = """
import sys, torch, legroom
found = legroom.weights(sys.argv[1])
print(sum(int(tensor.view(torch.uint8).sum()) for tensor in found.values()), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's")
def test_four_processes_have_one_copy_in_ram(tmp_path: Path) -> None:
    torch.save({f"layer.{n}": torch.randn(1024, 1024) for n in range(8)}, tmp_path / "model.pt")
    size = 8 << 22
    command = [sys.executable, "-c", CHILD, os.fspath(tmp_path / "model.pt")]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        sums = {process.stdout.readline() for process in started if process.stdout is not None}
        assert len(sums) == 1 and sums != {""}
        total = sum(_store_pss(process.pid, tmp_path) for process in started)
    finally:
        for process in started:
            process.communicate("")
    assert 0.98 * size <= total <= 1.02 * size, total / size


def _store_pss(pid: int, folder: Path) -> int:
    """PSS of the mapped files below a folder."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            inside = line.endswith(".npy") and os.fspath(folder) in line
        elif inside and words[0] == "Pss:":
            total += int(words[1]) * 1024
    return total


def test_what_is_not_weights_is_not_to_be_converted_to_a_format_of_datasets(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UnknownFormat) as caught:
        legroom.weights(path)
    assert "CSV" in caught.value.why and "safetensors" in caught.value.fix[0] and len(caught.value.fix) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pointer_of_git_lfs_keeps_its_own_advice(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
    )
    with pytest.raises((UnknownFormat, UnreadableSource), match="git lfs pull"):
        legroom.weights(tmp_path)


def test_a_broken_link_to_the_weights_is_named(tmp_path: Path) -> None:
    """As in a cache of Hugging Face whose blobs were deleted: the directory seemed to have no weights."""
    (tmp_path / "model.safetensors").symlink_to("../../blobs/12ab")
    with pytest.raises(UnreadableSource, match="which does not exist"):
        legroom.weights(tmp_path)
