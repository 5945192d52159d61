"""One copy in GPU memory for every process: who makes it, who hands it on, and what is left when processes are killed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from legroom.cache import list_gpu_copies
from legroom.cache.list_gpu_copies import FOLDER
from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.loader import shared_gpu_memory
from legroom.loader.shared_gpu_memory import SharedCopy, share
from open_descriptors import open_descriptors, opened_since

from .fake_gpu_memory import GRAIN, FakeMemory, content

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="GPU memory is shared on Linux only")
SIZE = 3 * GRAIN + 17
CHILD = Path(__file__).with_name("fake_gpu_memory.py")


@pytest.fixture(autouse=True)
def _long_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process that is not stopped may take seconds to answer, or to make its copy."""
    monkeypatch.setattr(list_gpu_copies, "PATIENCE_S", 60.0)
    monkeypatch.setattr(shared_gpu_memory, "_LOCK_S", 120.0)


def holders(store: Path) -> list[dict[str, Any]]:
    return list_gpu_copies.holders(store, 60.0)


def take(api: FakeMemory, store: Path, name: str = "a", **options: Any) -> SharedCopy:
    def fill(address: int) -> None:
        ctypes.memmove(address, content(name, SIZE), SIZE)

    options.setdefault("check_room", lambda: None)
    return share(api, store, name, SIZE, options.pop("fill", fill), **options)


def read(copy: SharedCopy) -> bytes:
    return ctypes.string_at(copy.address, SIZE)


@contextmanager
def process(store: Path, names: str = "a", slow: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, os.fspath(CHILD), os.fspath(store), names, str(SIZE), str(slow)]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        for pipe in (started.stdin, started.stdout):
            assert pipe is not None
            pipe.close()


def line(started: subprocess.Popen[str]) -> list[str]:
    assert started.stdout is not None
    return started.stdout.readline().split()


def stop(pid: int) -> None:
    """Stop a process; its threads stop one after the other."""
    os.kill(pid, signal.SIGSTOP)
    while any(
        task.read_text().rpartition(")")[2].split()[0] != "T" for task in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        time.sleep(0.001)


def wait_for_maker(store: Path) -> None:
    """Wait until a process makes a copy: it holds the lock."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for path in store.glob(f"{FOLDER}/*.lock"):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return
        time.sleep(0.01)
    pytest.fail("no process makes a copy")


def sockets() -> set[str]:
    """The sockets that this process has open."""
    descriptors = [f"/proc/self/fd/{fd}" for fd in range(3, 1000) if os.path.lexists(f"/proc/self/fd/{fd}")]
    return {name for name in map(os.readlink, descriptors) if name.startswith("socket")}


def left(store: Path) -> list[str]:
    return sorted(os.listdir(store / FOLDER))


def test_a_second_process_gets_the_copy_of_the_first(tmp_path: Path) -> None:
    with process(tmp_path) as first:
        assert line(first)[:3] == ["made", "a", "right"]
        api = FakeMemory()
        copy = take(api, tmp_path, fill=lambda address: pytest.fail("made again"))
        assert not copy.made_here and read(copy) == content("a", SIZE)
        assert {one["pid"] for one in holders(tmp_path)} == {first.pid, os.getpid()}
        copy.close()
        copy.close()
        assert not api.maps and not api.handles
    take(api, tmp_path).close()  # the first is gone, so it is made again; its socket is removed
    assert left(tmp_path) == []


def test_a_process_maps_a_copy_once(tmp_path: Path) -> None:
    api = FakeMemory()
    first, second = take(api, tmp_path), take(api, tmp_path, fill=lambda address: pytest.fail("made again"))
    assert first is second and len(api.maps) == 1
    first.close()
    assert read(second) == content("a", SIZE) and holders(tmp_path)
    second.close()
    second.close()
    assert not api.maps and not holders(tmp_path) and left(tmp_path) == []


def test_a_survivor_hands_on_the_copy_of_a_killed_process(tmp_path: Path) -> None:
    with process(tmp_path) as first:
        assert line(first)[0] == "made"
        with process(tmp_path) as second:
            assert line(second)[0] == "got"
            first.kill()
            first.wait()
            with process(tmp_path) as third:
                assert line(third)[:3] == ["got", "a", "right"]


def test_processes_that_start_together_make_one_copy(tmp_path: Path) -> None:
    with process(tmp_path, slow=0.3) as one, process(tmp_path, slow=0.3) as two, process(tmp_path, slow=0.3) as three:
        said = [line(started) for started in (one, two, three)]
    assert sorted(words[0] for words in said) == ["got", "got", "made"]
    assert all(words[2] == "right" for words in said)


def test_a_process_killed_while_it_copies_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    with process(tmp_path, slow=30) as first:
        wait_for_maker(tmp_path)
        first.kill()
        first.wait()
    copy = take(FakeMemory(), tmp_path)
    assert copy.made_here and read(copy) == content("a", SIZE)
    copy.close()
    assert left(tmp_path) == []


def test_a_stopped_process_holds_nobody_up_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_gpu_copies, "PATIENCE_S", 0.2)
    monkeypatch.setattr(shared_gpu_memory, "_LOCK_S", 0.2)
    with process(tmp_path) as first:
        assert line(first)[0] == "made"
        stop(first.pid)
        copy = take(FakeMemory(), tmp_path)  # a second copy, which is right too
        assert copy.made_here and read(copy) == content("a", SIZE)
        copy.close()
        os.kill(first.pid, signal.SIGCONT)
    with process(tmp_path, slow=60) as first:
        wait_for_maker(tmp_path)
        with pytest.raises(CudaRefused, match="does not finish"):
            take(FakeMemory(), tmp_path)


def test_a_forked_child_does_not_keep_the_memory(tmp_path: Path) -> None:
    before = sockets()
    copy = take(FakeMemory(), tmp_path)
    reader, writer = os.pipe()
    exported = copy.fd
    child = os.fork()
    if child == 0:
        kept = os.path.exists(f"/proc/self/fd/{exported}") or bool(sockets() - before)
        copy.close()  # does nothing here
        os.write(writer, b"kept" if kept else b"closed")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"closed"
    assert holders(tmp_path) and read(copy) == content("a", SIZE)
    copy.close()
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("refuse", ["create", "map", "export"])
def test_a_driver_that_refuses_leaves_nothing(tmp_path: Path, refuse: str) -> None:
    api = FakeMemory(refuse)
    with pytest.raises(CudaRefused, match="refused"):
        take(api, tmp_path)
    assert not api.maps and not api.handles and left(tmp_path) == []


def test_an_error_while_copying_leaves_nothing(tmp_path: Path) -> None:
    api = FakeMemory()

    def fail(address: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take(api, tmp_path, fill=fail)
    with pytest.raises(MemoryError):
        take(api, tmp_path, check_room=lambda: (_ for _ in ()).throw(MemoryError))
    assert not api.maps and not api.handles and left(tmp_path) == []


def test_drivers_without_read_only_maps_or_imports(tmp_path: Path) -> None:
    with process(tmp_path) as first:
        assert line(first)[0] == "made"
        writable = take(FakeMemory("map read-only", "set_access"), tmp_path)
        assert not writable.made_here and read(writable) == content("a", SIZE)
        writable.close()
        own = take(FakeMemory("adopt"), tmp_path)
        assert own.made_here and read(own) == content("a", SIZE)
        own.close()
    with pytest.raises(CudaRefused, match="cannot export"):
        take(FakeMemory("share"), tmp_path)


def test_other_gpus_and_other_names_are_other_copies(tmp_path: Path) -> None:
    with process(tmp_path, "a,b") as first:
        assert [line(first)[1], line(first)[1]] == ["a", "b"]
        for api, name in ((FakeMemory(uuid="gpu-1"), "a"), (FakeMemory(), "c")):
            copy = take(api, tmp_path, name)
            assert copy.made_here
            copy.close()
        assert len(holders(tmp_path)[0]["copies"]) == 2


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir(0o755)
    (tmp_path / FOLDER).chmod(0o755)
    with pytest.raises(CudaRefused, match="others may use it"):
        take(FakeMemory(), tmp_path)


def test_sockets_that_answer_nonsense_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir(0o700)
    (tmp_path / FOLDER / "1-a.sock").write_text("a file")
    odd = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    odd.bind(os.fspath(tmp_path / FOLDER / "2-b.sock"))
    odd.listen(4)

    def answer() -> None:
        for words in (b"[]", b"{", b'{"size": 5}', b""):  # each copy asks before and after it has the lock
            there, _ = odd.accept()
            with there:
                there.recv(1000)
                if words:
                    there.send(words)

    answering = threading.Thread(target=answer)
    answering.start()
    for _ in range(2):
        copy = take(FakeMemory(), tmp_path)
        assert copy.made_here
        copy.close()
    answering.join()
    odd.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC])
def test_a_copy_that_cannot_be_handed_on_is_used_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(shared_gpu_memory, "listen", refuse)
    api = FakeMemory()
    copy = take(api, tmp_path)
    assert copy.made_here and read(copy) == content("a", SIZE)
    copy.close()
    assert not api.maps and not api.handles and left(tmp_path) == []


@pytest.mark.parametrize("adopted", [False, True])
def test_an_error_while_it_is_offered_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adopted: bool
) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    with process(tmp_path) as other:
        if adopted:
            assert line(other)[0] == "made"
        monkeypatch.setattr(shared_gpu_memory._Server, "_listen", fail)
        before, api = open_descriptors(), FakeMemory()
        with pytest.raises(MemoryError):
            take(api, tmp_path, "a" if adopted else "b")
        assert not api.maps and not api.handles and not opened_since(before)


def test_a_lock_that_cannot_be_made_is_a_reason_not_to_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_gpu_memory.locks, "acquire", refuse)
    with pytest.raises(CudaRefused, match="No space left"):
        take(FakeMemory(), tmp_path)


def test_questions_that_are_no_questions_and_too_many_open_files_do_not_end_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, refused = socket.socket.accept, []

    def once_refused(one: socket.socket) -> Any:
        if not refused:
            refused.append(one)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(one)

    monkeypatch.setattr(socket.socket, "accept", once_refused)
    copy = take(FakeMemory(), tmp_path)
    (name,) = [name for name in left(tmp_path) if name.endswith(".sock")]
    for words in (b"[]", b"5", b'"version"'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as there:
            there.connect(os.fspath(tmp_path / FOLDER / name))
            there.send(words)
            assert there.recv(100) == b""
    assert refused and holders(tmp_path)
    copy.close()


def test_a_list_of_copies_with_long_names_fits_in_an_answer(tmp_path: Path) -> None:
    copies = [take(FakeMemory(), tmp_path, f"{number}", title="模型" * 100) for number in range(100)]
    assert len(holders(tmp_path)[0]["copies"]) == 100
    for copy in copies:
        copy.close()


def test_random_kills(tmp_path: Path) -> None:
    """Makers and holders are killed at random times; every process that answers has every byte right."""
    command = [sys.executable, os.fspath(CHILD), os.fspath(tmp_path), "a,b", str(SIZE), "0.01", "120"]
    answers = [words.split() for words in subprocess.check_output(command, text=True, timeout=240).splitlines()]
    assert {words[0] for words in answers} == {"made", "got"} and len(answers) > 40, answers
    assert all(words[2] == "right" for words in answers)
    for name in ("a", "b"):
        take(FakeMemory(), tmp_path, name).close()
    assert [name for name in left(tmp_path) if not name.endswith(".new")] == []
