"""What is in /dev/shm, who holds it, and what has no name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_host import NAMES, TREES
from fake_machine import DEVICE, MB, NOW, TMPFS, FakeMachine, area
from hypothesis import given
from hypothesis import strategies as st

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.shm import kind_of, maker_of, shm, shm_pool
from legroom.probe.shm_segments import MappedSegment, maps_device, parse_maps, parse_smaps

SMAPS = "7f0000000000-7f0000100000 rw-s 00000000 00:1a 41 /dev/shm/x (deleted)\nSize: 1024 kB\nRss: {rss} kB\nSwap: {swap} kB\n"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


# The mount.


def test_size_used_free_and_rights(machine: FakeMachine) -> None:
    machine.used = 10 * MB
    found = shm(machine.host)
    assert (found.mounted, found.size, found.used, found.free) == (True, 64 * MB, 10 * MB, 54 * MB)
    assert (found.mode, found.owner, found.writable) == (0o1777, 0, True)
    pool = shm_pool(found)
    assert (pool.name, pool.size, pool.used, pool.free, pool.reason) == ("shm", 64 * MB, 10 * MB, 54 * MB, None)


def test_a_plain_directory_is_not_mounted_and_its_use_is_not_ours_to_explain(machine: FakeMachine) -> None:
    machine.mountinfo = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    machine.used = 10 * MB
    found = shm(machine.host)
    assert not found.mounted
    assert found.hidden is None
    assert "a directory, not a mount" in found.source


def test_a_disk_mounted_over_the_tmpfs_is_what_is_seen(machine: FakeMachine) -> None:
    machine.mountinfo = f"{TMPFS}\n29 28 8:1 /scratch /dev/shm rw - ext4 /dev/sda1 rw\n"
    found = shm(machine.host)
    assert not found.mounted
    assert "ext4" in found.source


def test_segments_in_a_plain_directory_are_known_by_their_path(machine: FakeMachine) -> None:
    machine.mountinfo = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    machine.file("psm_1", 41, MB)
    lines = [area(41, "/dev/shm/psm_1", device="08:01"), area(7, "/usr/lib/libc.so", device="08:01")]
    machine.process(7, shmem=8, maps=lines)
    found = shm(machine.host)
    assert [file.mapped for file in found.files] == [True]
    assert found.unlinked == 0  # the library on the same disk is not a segment


@pytest.mark.parametrize(
    ("mode", "uid", "options", "writable"),
    [
        (0o1777, 1000, "rw", True),
        (0o755, 1000, "rw", False),
        (0o755, 0, "rw", True),
        (0o1777, 0, "ro", False),
        (0o1777, 1000, "ro", False),
    ],
)
def test_writable(machine: FakeMachine, mode: int, uid: int, options: str, writable: bool) -> None:
    machine.mode, machine.uid = mode, uid
    machine.mountinfo = f"28 25 0:26 / /dev/shm {options} - tmpfs tmpfs rw\n"
    assert shm(machine.host).writable is writable


def test_no_size_limit_is_unknown_not_zero(machine: FakeMachine) -> None:
    machine.size = 0
    found = shm(machine.host)
    assert (found.size, found.used, found.free, found.hidden) == (None, None, None, None)
    assert "no size limit" in str(shm_pool(found).reason)


def test_a_machine_without_one(tmp_path: Path) -> None:
    (tmp_path / "recording.json").write_text("{}")
    found = shm(Host.at(tmp_path))
    assert (found.size, found.mounted, found.writable) == (None, False, None)
    assert found.reason == "/dev/shm does not exist"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_it_is_unknown_with_a_reason(machine: FakeMachine, platform: str) -> None:
    machine.platform = platform
    found = shm(machine.host)
    assert found.size is None
    assert platform in str(found.reason)


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_machine_can_be_read(name: str) -> None:
    host = Host.at(TREES / name)
    found = shm(host)
    room = host.disk_space("/dev/shm")
    assert (found.size, found.free) == (room[:2] if room and room.size else (None, None))
    assert (found.size is None) == (found.reason is not None)


def test_recorded_names_are_recognised() -> None:
    found = shm(Host.at(TREES / "bare-v2"))
    kinds = {file.name.partition("_")[0].partition("-")[0]: file.kind for file in found.files}
    assert kinds == {"torch": "torch", "psm": "python", "sem.mp": "semaphore", "nccl": "nccl"}


# Files with names.


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("torch_123_456_0", "torch"),
        ("psm_1f0e9a77", "python"),
        ("wnsm_1f0e9a77", "python"),
        ("sem.mp-7k2x9q1a", "semaphore"),
        ("sem.loky-12-ab", "semaphore"),
        ("nccl-Xk81Qz", "nccl"),
        ("legroom-1000/abc/images.npy", "legroom"),
        ("legroom-1000", "other"),  # a file that has taken a store's name
        ("plasmaXy12", "other"),
        ("vineyard-bulk-1", "other"),
        ("mytorch_1", "other"),
        ("sub/torch_1_2_3", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_size_is_by_blocks_and_age_by_the_last_write(machine: FakeMachine) -> None:
    machine.file("torch_1_2_3", 5, 3 * 4096, age=90.0, uid=1001)
    (file,) = shm(machine.host).files
    assert (file.name, file.kind, file.size, file.age, file.owner) == ("torch_1_2_3", "torch", 12288, 90.0, 1001)


def test_a_written_time_in_the_future_is_no_negative_age(machine: FakeMachine) -> None:
    machine.file("torch_1_2_3", 5, 4096, age=-30.0)
    assert shm(machine.host).files[0].age == 0.0


def test_the_largest_comes_first(machine: FakeMachine) -> None:
    for inode, size in enumerate((4096, 3 * MB, MB)):
        machine.file(f"psm_{inode}", inode + 1, size)
    assert [file.size for file in shm(machine.host).files] == [3 * MB, MB, 4096]


def test_one_store_of_legroom_is_one_line(machine: FakeMachine) -> None:
    machine.used = 3 * MB
    machine.file("legroom-1000/ab/images.npy", 5, 2 * MB, age=100, uid=1000)
    machine.file("legroom-1000/ab/labels.npy", 6, MB, age=50, uid=1000)
    machine.file("legroom-1000/locks/ab.lock", 7, 0, age=300, uid=1000)
    machine.process(7, shmem=8, maps=[area(5, "/dev/shm/legroom-1000/ab/images.npy")])
    found = shm(machine.host)
    (store,) = found.files
    assert (store.name, store.kind, store.size, store.age) == ("legroom-1000", "legroom", 3 * MB, 50.0)
    assert (store.mapped, store.owner, found.hidden) == (True, 1000, 0)


def test_names_are_shown_without_what_a_terminal_obeys(machine: FakeMachine) -> None:
    machine.file("psm_\x1b[31m", 5, 4096)
    assert "\x1b" not in shm(machine.host).files[0].name


@given(st.text(max_size=30))
def test_any_name_has_a_kind(name: str) -> None:
    assert kind_of(name) in {"torch", "python", "semaphore", "nccl", "legroom", "other"}
    maker = maker_of(name)
    assert maker is None or name.startswith("torch_")


# Who uses them.


def test_mapped_by_a_living_process(machine: FakeMachine) -> None:
    machine.file("psm_1", 41, MB)
    machine.process(7, shmem=8, maps=[area(41, "/dev/shm/psm_1")])
    assert shm(machine.host).files[0].mapped is True


def test_the_same_inode_on_another_device_is_another_containers(machine: FakeMachine) -> None:
    machine.file("psm_1", 41, MB)
    machine.process(7, shmem=8, maps=[area(41, "/dev/shm/psm_1", device="00:4f")])
    assert shm(machine.host).files[0].mapped is False


def test_open_but_not_mapped_by_a_process_without_shared_pages(machine: FakeMachine) -> None:
    machine.file("psm_1", 41, MB)
    machine.process(7, fds={0: "/dev/null", 3: "/dev/shm/psm_1"})
    assert shm(machine.host).files[0].mapped is True


def test_mapped_but_never_touched(machine: FakeMachine) -> None:
    machine.file("psm_1", 41, MB)
    machine.process(7, shmem=0, maps=[area(41, "/dev/shm/psm_1")])
    assert shm(machine.host).files[0].mapped is True


def test_used_by_no_process(machine: FakeMachine) -> None:
    machine.file("psm_1", 41, MB)
    machine.process(7, maps=["7f0000000000-7f0000001000 rw-p 00000000 00:00 0 [heap]"])
    found = shm(machine.host)
    assert (found.files[0].mapped, found.unreadable_processes) == (False, 0)


def test_not_found_while_a_process_may_not_be_read(machine: FakeMachine) -> None:
    machine.file("psm_1", 41, MB)
    machine.file("psm_2", 42, MB)
    machine.process(7, shmem=8, maps=[area(42, "/dev/shm/psm_2")])
    machine.process(8, uid=0, maps=None)
    found = shm(machine.host)
    assert {file.name: file.mapped for file in found.files} == {"psm_1": None, "psm_2": True}
    assert found.unreadable_processes == 1


def test_a_batch_in_transit_is_used_though_no_process_holds_it(machine: FakeMachine) -> None:
    machine.file("torch_70_123_0", 41, MB, age=10)
    machine.process(70, started=NOW - 600)
    assert shm(machine.host).files[0].mapped is True


def test_a_maker_younger_than_its_file_only_has_the_same_id(machine: FakeMachine) -> None:
    machine.file("torch_70_123_0", 41, MB, age=1000)
    machine.process(70, started=NOW - 600)
    assert shm(machine.host).files[0].mapped is False


def test_while_torchs_manager_lives_it_is_unknown(machine: FakeMachine) -> None:
    machine.file("torch_70_123_0", 41, MB, uid=1000)
    machine.file("torch_71_123_0", 42, MB, uid=1001)
    machine.process(90, command=("torch_shm_manager",), uid=1000)
    found = {file.name: file.mapped for file in shm(machine.host).files}
    assert found == {"torch_70_123_0": None, "torch_71_123_0": False}


@pytest.mark.parametrize(("age", "device", "mapped"), [(60, "0:26", None), (7200, "0:26", False), (60, "0:99", False)])
def test_a_manager_of_another_time_or_another_shm_does_not_count(
    machine: FakeMachine, age: float, device: str, mapped: bool | None
) -> None:
    machine.file("torch_70_123_0", 41, MB, uid=1000, age=age)
    machine.process(90, command=("torch_shm_manager",), started=NOW - 3600)
    machine.text("/proc/90/mountinfo", TMPFS.replace("0:26", device))
    assert shm(machine.host).files[0].mapped is mapped


def test_no_process_is_read_where_no_segment_is(machine: FakeMachine) -> None:
    machine.process(7, shmem=8, maps=None)
    assert shm(machine.host).unreadable_processes == 0


def test_processes_without_shared_pages_are_not_read_once_all_is_explained(machine: FakeMachine) -> None:
    machine.used = MB
    machine.file("psm_1", 41, MB)
    machine.process(7, shmem=8, fds={3: "/dev/shm/psm_1"})
    machine.process(8, shmem=0, maps=None)
    found = shm(machine.host)
    assert (found.files[0].mapped, found.unreadable_processes) == (True, 0)


# What has no name.


def test_deleted_and_mapped_by_two_counts_once(machine: FakeMachine) -> None:
    machine.used = 3 * MB
    machine.file("/proc/7/fd/3", 41, 2 * MB)
    line = area(41, "/dev/shm/torch_7_1_0 (deleted)", 2 * MB)
    machine.process(7, shmem=8, maps=[line], fds={3: "/dev/shm/torch_7_1_0 (deleted)"})
    machine.process(8, 7, shmem=8, maps=[line])
    found = shm(machine.host)
    assert (found.unlinked, found.hidden, found.files) == (2 * MB, MB, ())


def test_deleted_and_only_open(machine: FakeMachine) -> None:
    machine.used = 2 * MB
    machine.file("/proc/7/fd/3", 41, 2 * MB)
    machine.process(7, fds={3: "/dev/shm/torch_7_1_0 (deleted)"})
    found = shm(machine.host)
    assert (found.unlinked, found.hidden) == (2 * MB, 0)


def test_a_deleted_name_whose_file_still_has_another_is_not_counted_twice(machine: FakeMachine) -> None:
    # sem_open makes a temporary name, links the real one to it and deletes the first.
    machine.used = 4096
    machine.file("sem.mp-1", 41, 4096)
    machine.process(7, shmem=4, maps=[area(41, "/dev/shm/sem.Xa81kQ (deleted)", 4096)])
    found = shm(machine.host)
    assert (found.files[0].mapped, found.unlinked, found.hidden) == (True, 0, 0)


@pytest.mark.parametrize("touched", [((256, 0), (700, 68)), ((700, 68), (256, 0))])
def test_size_from_pages_where_no_inode_can_be_reached(
    machine: FakeMachine, touched: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    machine.used = MB
    line = area(41, "/dev/shm/x (deleted)")
    for pid, (rss, swap) in enumerate(touched, start=7):
        machine.process(pid, shmem=8, maps=[line], smaps=SMAPS.format(rss=rss, swap=swap))
    found = shm(machine.host)
    assert (found.unlinked, found.hidden) == (768 << 10, 256 << 10)  # whoever has touched most tells most


def test_a_semaphore_takes_its_page_though_no_process_touched_it(machine: FakeMachine) -> None:
    machine.used = 4096
    machine.process(7, shmem=8, maps=[area(41, "/dev/shm/sem.Xa81kQ (deleted)", 4096)])
    found = shm(machine.host)
    assert (found.unlinked, found.hidden) == (4096, 0)


def test_a_size_that_cannot_be_had_makes_the_rest_unknown(machine: FakeMachine) -> None:
    machine.used = MB
    machine.process(7, shmem=8, maps=[area(41, "/dev/shm/x (deleted)")])
    found = shm(machine.host)
    assert (found.unlinked, found.hidden) == (None, None)


def test_what_no_process_explains_is_hidden(machine: FakeMachine) -> None:
    machine.used = 5 * MB
    machine.file("psm_1", 41, MB)
    machine.process(7, maps=None)
    assert shm(machine.host).hidden == 4 * MB


def test_hard_links_take_room_once(machine: FakeMachine) -> None:
    machine.used = MB
    machine.file("a", 41, MB)
    machine.file("b", 41, MB)
    assert shm(machine.host).hidden == 0


def test_given_processes_are_the_ones_looked_at(machine: FakeMachine) -> None:
    machine.file("psm_1", 41, MB)
    machine.process(7, shmem=8, maps=[area(41, "/dev/shm/psm_1")])
    assert shm(machine.host, []).files[0].mapped is False


# maps and smaps.


def test_maps_device_is_hexadecimal() -> None:
    assert (maps_device("0:27"), maps_device("259:300"), maps_device("x")) == ("00:1b", "103:12c", None)


spans = st.tuples(st.integers(1, 1 << 34), st.integers(1, 1 << 20), st.integers(1, 50))


@given(st.lists(spans, max_size=20))
def test_areas_come_back_by_inode(rows: list[tuple[int, int, int]]) -> None:
    lines = [area(inode, "/dev/shm/x y (deleted)", pages << 12, start=at << 12) for at, pages, inode in rows]
    text = "\n".join([*lines, "7f00-7f10 r-xp 00000000 fd:01 41 /usr/lib/libc.so", area(0, "", device=DEVICE)])
    found = parse_maps(text, DEVICE, "/dev/shm")
    assert sum(item.size for item in found.values()) == sum(pages << 12 for _, pages, _ in rows)
    assert set(found) == {inode for _, _, inode in rows}
    assert {item.path for item in found.values()} <= {"/dev/shm/x y"}


@given(st.text())
def test_any_maps_and_smaps_are_survived(text: str) -> None:
    found = parse_maps(text + f" {DEVICE} ", DEVICE, "/dev/shm")
    assert parse_smaps(text, found) is not None


def test_the_same_part_mapped_twice_is_there_once() -> None:
    spans = ("7f0000000000-7f0000100000", "7f1000000000-7f1000100000", "7f2000000000-7f2000100000")
    offsets = ("00000000", "00000000", "00100000")
    text = "".join(
        f"{span} rw-s {offset} 00:1a 41 /dev/shm/x\nRss: 100 kB\nPss: 50 kB\nSwap: 4 kB\n"
        for span, offset in zip(spans, offsets, strict=True)
    )
    assert parse_smaps(text, {41: MappedSegment("/dev/shm/x", 3 * MB, spans)}) == {41: 208 << 10}


def test_a_link_to_run_shm_is_followed(machine: FakeMachine) -> None:
    (machine.root / "dev").mkdir()
    (machine.root / "dev/shm").symlink_to("/run/shm")
    machine.mountinfo = TMPFS.replace("/dev/shm", "/run/shm")
    machine.files["/run/shm/psm_1"] = {"inode": 41, "blocks": 8, "uid": 1000, "mtime": NOW}
    machine.process(7, shmem=8, maps=[area(41, "/run/shm/psm_1")])
    host = machine.host
    assert host.recording is not None
    host = replace(host, recording={**host.recording, "statvfs": {"/run/shm": [64 * MB, 63 * MB]}})
    found = shm(host)
    assert (found.path, found.mounted, found.size) == ("/dev/shm", True, 64 * MB)
    assert [(file.name, file.mapped) for file in found.files] == [("psm_1", True)]
