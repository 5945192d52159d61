"""GPU memory in the host's RAM on Windows: the counters' names, and pdh.dll played by a stand-in."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.probe.gpu_devices import (
    ADAPTER_COUNTER,
    PROCESS_COUNTER,
    CounterError,
    PdhCounters,
    Spill,
    _Item,
    parse_instance,
    spill,
)
from legroom.probe.host_files_and_syscalls import Host

WINDOWS = Host(platform="win32")
A, B = "luid_0x00000000_0x0000d1b4_phys_0", "luid_0x00000000_0x0000E2C5_phys_0"
LUID_A, LUID_B = "0x00000000_0x0000d1b4", "0x00000000_0x0000e2c5"


class Counters:
    def __init__(self, processes: Mapping[str, int], adapters: Mapping[str, int]) -> None:
        self.answers = {PROCESS_COUNTER: processes, ADAPTER_COUNTER: adapters}

    def read(self, path: str) -> Mapping[str, int]:
        return self.answers[path]


def test_counters_are_summed_by_process_and_adapter() -> None:
    found = spill(
        WINDOWS,
        Counters({f"pid_7_{A}": 5, f"pid_7_{A}#1": 1, f"pid_7_{B}": 2, "_Total": 99}, {A: 100, B.upper(): 7, "x": 1}),
    )
    assert found.processes == {(7, LUID_A): 6, (7, LUID_B): 2}
    assert found.adapters == {LUID_A: 100, LUID_B: 7}
    assert found.reason is None


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_elsewhere_it_is_unknown_with_a_reason(platform: str) -> None:
    found = spill(Host(platform=platform), Counters({}, {}))
    assert found.processes is None and found.adapters is None and "Windows" in (found.reason or "")
    assert found.of_card([1]) == (None, found.reason)


def test_a_recording_of_a_windows_is_not_asked() -> None:
    found = spill(Host(platform="win32", recording={}))
    assert found.processes is None and "recording" in (found.reason or "")


def test_a_windows_without_the_counters_is_unknown() -> None:
    class Broken:
        def read(self, path: str) -> Mapping[str, int]:
            raise CounterError("PdhAddEnglishCounterW returned 0xc0000bb8")

    found = spill(WINDOWS, Broken())
    assert found.processes is None and "0xc0000bb8" in (found.reason or "")


def test_without_a_pdh_library_it_is_unknown() -> None:
    if "WinDLL" in vars(ctypes):
        pytest.skip("this is Windows")
    assert "pdh.dll" in (spill(WINDOWS).reason or "")


def test_a_gpu_is_found_by_the_adapter_all_its_processes_share() -> None:
    found = Spill({(1, "a"): 10, (1, "b"): 20, (2, "b"): 5, (3, "a"): 1}, {"a": 11, "b": 30}, "")
    assert found.of_card([1, 2]) == (30, "")
    assert found.of_card([2]) == (30, "")
    assert found.of_card([2, 999]) == (30, "")  # one without counters says nothing
    assert found.of_card([1])[0] is None and found.of_card([1])[1].startswith("2 adapters")
    assert found.of_card([2, 3])[0] is None and found.of_card([])[0] is None
    assert Spill({(2, "b"): 5, (4, "b"): 6}, {}, "").of_card([2]) == (11, "")


@given(st.text())
def test_any_text_may_be_an_instances_name(name: str) -> None:
    pid, luid = parse_instance(name)
    assert pid is None or luid is not None


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 9))
def test_instances_are_read_as_windows_writes_them(pid: int, luid: int, part: int) -> None:
    adapter = f"0x{luid >> 32:08X}_0x{luid & 0xFFFFFFFF:08X}"
    assert parse_instance(f"pid_{pid}_luid_{adapter}_phys_{part}") == (pid, adapter.lower())
    assert parse_instance(f"luid_{adapter}_phys_{part}") == (None, adapter.lower())


class FakePdh:
    """pdh.dll as its documentation has it: the length first, then items with the names behind them."""

    def __init__(self, values: Mapping[str, tuple[int, int]], *, failing: dict[str, int] | None = None, grows: int = 0):
        self.values, self.failing, self.grows = dict(values), failing or {}, grows
        self.open = 0
        self.paths: list[str] = []

    def PdhOpenQueryW(self, source: None, user: object, query: object) -> int:  # noqa: N802
        if not (status := self.failing.get("open", 0)):
            self.open += 1
        return status

    def PdhAddEnglishCounterW(self, query: object, path: str, user: object, counter: object) -> int:  # noqa: N802
        self.paths.append(path)
        return self.failing.get("add", 0)

    def PdhCollectQueryData(self, query: object) -> int:  # noqa: N802
        return self.failing.get("collect", 0)

    def PdhCloseQuery(self, query: object) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def PdhGetFormattedCounterArrayW(self, counter, form, size_ref, count_ref, buffer) -> int:  # type: ignore[no-untyped-def]  # noqa: N802
        assert form.value == 0x400
        if status := self.failing.get("get", 0):
            return status
        names = [ctypes.create_unicode_buffer(name) for name in self.values]
        needed = ctypes.sizeof(_Item) * len(names) + sum(ctypes.sizeof(name) for name in names)
        size, count = size_ref._obj, count_ref._obj
        if buffer is not None and self.grows:
            self.grows -= 1
            self.values[f"new_{self.grows}"] = (0, 1)
            needed += 1 << 10
        if needed > size.value:
            size.value = needed
            return 0x800007D2 - (1 << 32)  # as a signed LONG comes back from ctypes
        count.value = len(names)
        if buffer is None:
            return 0
        items = ctypes.cast(buffer, ctypes.POINTER(_Item))
        address = ctypes.addressof(buffer) + ctypes.sizeof(_Item) * len(names)
        for number, (name, (status, value)) in enumerate(zip(names, self.values.values(), strict=True)):
            ctypes.memmove(address, name, ctypes.sizeof(name))
            items[number].name = ctypes.cast(address, ctypes.c_wchar_p)
            items[number].value.status, items[number].value.large = status, value
            address += ctypes.sizeof(name)
        return 0


def test_items_lie_as_windows_lays_them_out() -> None:
    if ctypes.sizeof(ctypes.c_void_p) == 8:
        assert ctypes.sizeof(_Item) == 24 and _Item.value.offset == 8


def test_pdh_is_read_and_closed() -> None:
    pdh = FakePdh({"pid_1_" + A: (0, 1 << 40), "pid_2_" + A: (1, 7), "pid_3_" + A: (0xC0000BC6, 9)})
    assert PdhCounters(pdh).read(PROCESS_COUNTER) == {"pid_1_" + A: 1 << 40, "pid_2_" + A: 7}
    assert pdh.paths == [r"\GPU Process Memory(*)\Non Local Usage"] and pdh.open == 0


def test_pdh_with_no_instance_gives_nothing() -> None:
    assert PdhCounters(FakePdh({})).read(ADAPTER_COUNTER) == {}


def test_pdh_is_asked_again_when_the_list_grows() -> None:
    pdh = FakePdh({"a": (0, 1)}, grows=2)
    assert set(PdhCounters(pdh).read(ADAPTER_COUNTER)) == {"a", "new_0", "new_1"}
    with pytest.raises(CounterError, match="0x800007d2"):
        PdhCounters(FakePdh({"a": (0, 1)}, grows=50)).read(ADAPTER_COUNTER)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ("open", "PdhOpenQueryW"),
        ("add", "PdhAddEnglishCounterW"),
        ("collect", "PdhCollectQueryData"),
        ("get", "PdhGetFormattedCounterArrayW"),
    ],
)
def test_every_step_of_pdh_may_fail(step: str, name: str) -> None:
    pdh = FakePdh({"a": (0, 1)}, failing={step: 0xC0000BB8 - (1 << 32)})
    with pytest.raises(CounterError, match=f"{name} returned 0xc0000bb8"):
        PdhCounters(pdh).read(PROCESS_COUNTER)
    assert pdh.open == 0
