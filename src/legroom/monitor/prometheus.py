"""The latest moment, served to Prometheus.

Covers: ``/metrics`` on this machine's own address unless another is named. Does not cover: the metrics (metrics.py),
the dashboard and alert rules (share/).
"""

from __future__ import annotations

import threading

from legroom.model import Moment
from legroom.monitor.listen import Handler, address, handler_for, serve
from legroom.monitor.metrics import Totals, text_of

PORT = 9464
_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class Prometheus:
    """An output that others come and fetch."""

    def __init__(self, where: str = str(PORT)) -> None:
        self._lock = threading.Lock()
        self._moment: Moment | None = None
        self._totals = Totals()
        self._server = serve(address(where, PORT), handler_for(self._page))

    @property
    def url(self) -> str:
        """What to give to Prometheus."""
        return f"{self._server.url}/metrics"

    def show(self, moment: Moment) -> None:
        with self._lock:
            seconds = moment.sample.clock - self._moment.sample.clock if self._moment else 0.0
            self._totals = self._totals.after(moment, max(0.0, seconds))
            self._moment = moment

    def close(self) -> None:
        self._server.stop()

    def text(self) -> str | None:
        """What is served now; None before the first sample."""
        with self._lock:
            moment, totals = self._moment, self._totals
        return None if moment is None else text_of(moment, totals)

    def _page(self, handler: Handler, path: str) -> None:
        text = self.text() if path in ("/", "/metrics") else None
        if text is not None:
            handler.give(200, _FORMAT, text.encode("utf-8", "replace"))
        elif path in ("/", "/metrics"):
            handler.give(503, "text/plain; charset=utf-8", b"no sample yet\n")
        else:
            handler.give(404, "text/plain; charset=utf-8", b"see /metrics\n")
