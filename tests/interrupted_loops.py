"""What the tests of interrupted loops share: an exception, like Ctrl-C, at the n-th line that some files run."""

from __future__ import annotations

import linecache
import sys
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    pass


class InterruptedAt:
    """Raises at the n-th line that these files run; not at a return, where no signal can be delivered either."""

    def __init__(self, number: int, *files: str) -> None:
        self.left, self.files = number, files

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and line not in ("return batch", "return loop"):
            self.left -= 1
            if not self.left:
                raise Interrupted
        return self._trace
