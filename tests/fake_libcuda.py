"""A fake of NVIDIA's driver library: it writes down the calls, and fails where a test wants it to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GRAIN = 2 << 20


class FakeLibrary:
    """libcuda: ``missing`` functions do not exist, ``failing`` ones return a code, ``attributes`` are the device's."""

    def __init__(
        self, *missing: str, failing: dict[str, int] | None = None, attributes: dict[int, int] | None = None
    ) -> None:
        self.missing, self.failing = set(missing), failing or {}
        self.attributes = {102: 1, 103: 1} if attributes is None else attributes
        self.calls: list[str] = []
        self.context = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in self.missing or not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.failing:
                return self.failing[name]
            return int(getattr(FakeLibrary, f"_{name.lower()}", FakeLibrary._does_nothing)(self, *arguments) or 0)

        return call

    def _does_nothing(self, *_: Any) -> None:
        return

    def _cuctxgetcurrent(self, found: Any) -> None:
        found._obj.value = self.context

    def _cudeviceprimaryctxretain(self, found: Any, _: Any) -> None:
        found._obj.value = 77

    def _cuctxsetcurrent(self, context: Any) -> None:
        self.context = context.value

    def _cudevicegetattribute(self, found: Any, number: Any, _: Any) -> int:
        if number.value not in self.attributes:
            return 1
        found._obj.value = self.attributes[number.value]
        return 0

    def _cudevicegetuuid(self, found: Any, _: Any) -> None:
        found._obj[:] = list(range(16))

    _cudevicegetuuid_v2 = _cudevicegetuuid

    def _cumemgetallocationgranularity(self, found: Any, *_: Any) -> None:
        found._obj.value = GRAIN

    def _cumemcreate(self, found: Any, *_: Any) -> None:
        found._obj.value = 5

    def _cumemexporttoshareablehandle(self, found: Any, *_: Any) -> None:
        found._obj.value = 9

    def _cumemimportfromshareablehandle(self, found: Any, *_: Any) -> None:
        found._obj.value = 6

    def _cumemaddressreserve(self, found: Any, *_: Any) -> None:
        found._obj.value = 1 << 40

    def _cugeterrorstring(self, code: Any, found: Any) -> None:
        found._obj.value = {2: b"out of memory", 801: b"operation not supported"}.get(code.value)
