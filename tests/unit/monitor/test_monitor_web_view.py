"""The page's server: what it answers, to whom, and that no client can hold up the watch."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from legroom.errors import CannotListen
from legroom.monitor import serve_web_page as web_module
from legroom.monitor.http_server import AllowedHosts, host_name
from legroom.monitor.serve_web_page import MOST_PROCESSES, MOST_STREAMS, EventFeed, WebView
from legroom.records.watch_sample import Moment, ProcessRow
from watch_runs import HOSTILE, MB, moments, samples

PATIENCE = 60.0


@pytest.fixture
def web() -> Iterator[WebView]:
    served = WebView("127.0.0.1:0")
    yield served
    served.close()


def _where(web: WebView) -> tuple[str, int]:
    parts = urlsplit(web.url)
    return parts.hostname or "", parts.port or 0


def _ask(
    web: WebView, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    link = http.client.HTTPConnection(*_where(web), timeout=PATIENCE)
    try:
        link.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            link.putheader(name, value)
        link.endheaders()
        answer = link.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        link.close()


class Client:
    """One that reads the stream of events."""

    def __init__(self, web: WebView) -> None:
        self.socket = socket.create_connection(_where(web), timeout=PATIENCE)
        self.socket.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self._file = self.socket.makefile("rb")

    def head(self) -> None:
        """Read the answer's head."""
        self.status = int(self._file.readline().split()[1])
        self.headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(": ")
            self.headers[name] = value

    def event(self) -> tuple[str, dict[str, Any]]:
        """The next one that is not a mere sign of life."""
        kind = ""
        while True:
            line = self._file.readline().decode()
            if not line:
                raise EOFError
            if line.startswith("event: "):
                kind = line[7:].strip()
            elif line.startswith("data: "):
                return kind, json.loads(line[6:])

    def close(self) -> None:
        self._file.close()
        self.socket.close()


@contextmanager
def _client(web: WebView) -> Iterator[Client]:
    client = Client(web)
    try:
        client.head()
        yield client
    finally:
        client.close()


def _until(true: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# What is served.


def test_the_page_and_its_parts_and_nothing_else(web: WebView) -> None:
    for path, kind in [
        ("/", "text/html"),
        ("/watch.css", "text/css"),
        ("/watch.js", "text/javascript"),
        ("/?x=1", "text/html"),
    ]:
        status, headers, body = _ask(web, path)
        assert status == 200 and headers["Content-Type"].startswith(kind) and body
        assert (
            "default-src 'none'" in headers["Content-Security-Policy"]
            and "unsafe" not in headers["Content-Security-Policy"]
        )
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    for path in ("/web.py", "/../web.py", "/web_page/", "//etc/passwd", "/%2e%2e/web.py", "/index.html/", "/events/x"):
        assert _ask(web, path)[0] == 404
    assert _ask(web, "/", "HEAD")[2] == b"" and _ask(web, "/events", "HEAD")[0] == 200


def test_every_part_of_the_page_is_served_and_none_comes_from_elsewhere() -> None:
    folder = resources.files("legroom.monitor") / "web_page"
    files = {one.name: one.read_text(encoding="utf-8") for one in folder.iterdir() if one.is_file()}
    assert set(files) == {name for name, _ in web_module._FILES.values()}
    for name, text in files.items():
        assert not re.search(r"(src|href|url\(|import|from|fetch\()\W{1,3}(https?:)?//", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
        assert not re.search(r"style=|onclick=\"", text), name  # the policy forbids them
    for part in re.findall(r"from \"\./([a-z.]+)\"|src=\"([a-z.]+)\"|href=\"([a-z.]+)\"", "".join(files.values())):
        assert "".join(part) in files


def test_before_the_first_data_the_page_does_not_say_that_there_are_no_alarms() -> None:
    folder = Path(web_module.__file__).parent / "web_page"
    assert '<p id="no-alarms" class="soft">not known yet</p>' in (folder / "index.html").read_text()
    assert 'byId("no-alarms").textContent = "none";' in (folder / "cards_and_tables.js").read_text()


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript here")
def test_the_axis_of_five_minutes_says_so() -> None:
    words = Path(web_module.__file__).parent / "web_page" / "words.js"
    times = (12.4, 59.4, 298.9, 300, 272, 3599, 3600, 7269, 90_000)
    script = f"import {{rounded}} from {json.dumps(words.as_uri())}; console.log({list(times)}.map(rounded).join())"
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "12 s,59 s,5 min,5 min,4 min 30 s,1 h,1 h,2 h 1 min,1 d 1 h"
    assert "rounded(last - first)" in (words.parent / "watch.js").read_text()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_can_be_changed(web: WebView, method: str) -> None:
    assert _ask(web, "/", method)[0] == 405


def test_an_unknown_method(web: WebView) -> None:
    assert _ask(web, "/", "BREW")[0] == 501


# To whom.


def test_it_listens_on_this_machine_only_unless_asked() -> None:
    web = WebView("0")
    try:
        assert web.url.startswith("http://127.0.0.1:")
        port = _where(web)[1]
        cards = [one.address for card in psutil.net_if_addrs().values() for one in card if one.family == socket.AF_INET]
        for address in cards:  # those that another machine would come in by
            assert _refused((address, port)) == (not address.startswith("127."))
    finally:
        web.close()


def test_foreign_hosts_are_refused(web: WebView) -> None:
    for host in ("localhost", "127.0.0.1:9465", "[::1]:1", "LOCALHOST.:80"):
        assert _ask(web, Host=host)[0] == 200
    for host in (
        "evil.example",
        "evil.example:9465",
        "127.0.0.1.evil.example",
        "",
        "localhost.evil.example",
        "192.168.1.5",
    ):
        for path in ("/", "/events", "/watch.js"):
            status, _, body = _ask(web, path, Host=host)
            assert status == 421 and b"<html" not in body


def test_names_when_another_address_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "node7.lab.example")
    names = AllowedHosts("0.0.0.0", "0.0.0.0")
    for host in ("192.168.1.5:80", "[fe80::1]:80", "localhost", socket.gethostname(), "node7.lab.example:9465"):
        assert names.allow(host), host
    for host in ("evil.example", "node7.evil.example", "1.2.3.4.evil.example", "", None, "999.1.1.1"):
        assert not names.allow(host), host
    assert AllowedHosts("watch.lab", "10.0.0.7").allow("WATCH.lab")
    assert not AllowedHosts("::1", "::1").allow("192.168.1.5")


@pytest.mark.parametrize(
    ("header", "host"), [("a:80", "a"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("A.", "a"), (None, ""), ("a:b", "a:b")]
)
def test_host_headers(header: str | None, host: str) -> None:
    assert host_name(header) == host


def test_a_port_in_use_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CannotListen, match="cannot listen on") as caught:
            WebView(f"127.0.0.1:{taken.getsockname()[1]}")
    assert caught.value.exit_status == 2 and caught.value.fix


# The stream.


def test_the_history_comes_first_then_every_sample(web: WebView) -> None:
    every = list(moments(12))
    for moment in every[:10]:
        web.show(moment)
    with _client(web) as client:
        kind, story = client.event()
        assert client.status == 200 and client.headers["Content-Type"].startswith("text/event-stream")
        assert kind == "story" and len(story["courses"]["shm"]) == 10 and story["schema"] == "legroom.watch/1"
        assert [mark["text"] for mark in story["marked"]] == ["epoch 1"]
        web.show(every[10])
        kind, moment = client.event()
        assert kind == "moment" and moment["clock"] == 10.0 and "courses" not in moment
        assert moment["pools"][3]["used"] is None  # unknown stays unknown
        assert HOSTILE in [row["command"] for row in moment["processes"]]


def test_before_the_first_sample_and_after_the_last(web: WebView) -> None:
    with _client(web) as client:
        assert client.event() == ("story", {"courses": {}, "process_courses": []})
        web.show(next(moments(1)))
        assert client.event()[0] == "moment"
        web.events.end()
        assert client.event()[0] == "end"
        with pytest.raises(EOFError):
            client.event()
    with _client(web) as late:  # a page opened afterwards still shows the run
        assert [late.event()[0], late.event()[0]] == ["story", "end"]


def test_signs_of_life_when_nothing_happens(web: WebView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_module, "_KEEPALIVE", 0.05)
    with _client(web) as client:
        client.event()
        assert client._file.readline().startswith(b"\n")
        assert client._file.readline() == b": still here\n"


def test_names_that_are_no_text_do_not_break_the_stream(web: WebView) -> None:
    row = ProcessRow(1, 0, "a\ud800\n\ndata: x\r\n\u2028", 1)
    web.show(Moment(replace(next(samples(1)), processes=(row,))))
    with _client(web) as client:
        assert client.event()[1]["processes"][0]["command"] == row.command


def test_many_processes_and_a_long_watch_are_cut_down() -> None:
    feed = EventFeed()
    rows = tuple(ProcessRow(pid, 1, "x", pid) for pid in range(1000))
    for sample in samples(2500):
        feed.add(Moment(replace(sample, processes=rows)))
    _, event = feed.event("story")
    story = json.loads(event.decode().split("data: ", 1)[1])
    assert story["processes_in_all"] == 1000 and len(story["processes"]) == MOST_PROCESSES
    assert min(row["rss"] for row in story["processes"]) == 800
    assert all(len(course) <= 700 for course in story["courses"].values())
    assert feed.event("story")[1] is event  # encoded once, for whoever asks


def test_what_processes_take_in_all_is_the_same_in_the_history_and_in_later_events() -> None:
    feed = EventFeed()
    rows = tuple(ProcessRow(pid, 1, "worker", pid * MB, 0, pss=pid * MB, pss_at=0.0) for pid in range(1, 301))
    for sample in samples(3):
        feed.add(Moment(replace(sample, processes=rows)))
    story, moment = (json.loads(feed.event(kind)[1].decode().split("data: ", 1)[1]) for kind in ("story", "moment"))
    whole = sum(row.rss or 0 for row in rows)
    for _, _, points, others in story["process_courses"]:
        assert len(points) == 16 and sum(point[1] for point in points) + others == whole
    assert sum(row["pss"] for row in moment["processes"]) + moment["others"] == whole


# Clients of every kind.


def test_two_hundred_clients_see_the_watch(web: WebView) -> None:
    every = list(moments(3))
    web.show(every[0])
    with ExitStack() as stack:
        clients = [Client(web) for _ in range(200)]  # all at once: none is answered before the last has asked
        for client in clients:
            stack.callback(client.close)
        for client in clients:
            client.head()
            assert client.status == 200 and client.event()[0] == "story"
        web.show(every[1])
        for client in clients:
            assert client.event()[1]["clock"] == 1.0
        assert _ask(web)[0] == 200

    def noticed() -> bool:
        web.show(every[2])  # whoever left is noticed when it is written to
        return web.events.subscribers == 0

    _until(noticed)


def test_there_may_be_only_so_many(web: WebView, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_STREAMS >= 200
    web.streams = threading.BoundedSemaphore(2)
    with _client(web), _client(web), _client(web) as third:
        assert third.status == 503
    web.show(next(moments(1)))  # writing to those that left frees their places
    web.show(next(moments(1)))

    def again() -> bool:
        web.show(next(moments(1)))
        with _client(web) as client:
            return client.status == 200

    _until(again)


def test_connections_that_send_nothing_are_bounded(web: WebView) -> None:
    web._server.clients = threading.BoundedSemaphore(3)
    with ExitStack() as stack:

        def full() -> bool:
            # One more each time: a request may take the place of a connection whose thread starts later.
            stack.enter_context(socket.create_connection(_where(web)))
            return _ask(web)[0] == 503

        _until(full)
    _until(lambda: _ask(web)[0] == 200)


def _deaf(web: WebView) -> socket.socket:
    """A client that asks for the stream and never reads it."""
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(_where(web))
    deaf.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return deaf


def test_a_client_that_never_reads_does_not_delay_others(web: WebView, monkeypatch: pytest.MonkeyPatch) -> None:
    # One that is never let go: if the watch or another client waited for it, no event would come any more.
    monkeypatch.setattr(web_module._PageHandler, "timeout", 10 * PATIENCE)
    every = [Moment(replace(sample, processes=sample.processes * 40)) for sample in samples(100)]
    web.show(every[0])
    with _deaf(web), _client(web) as client:
        client.event()
        _until(lambda: web.events.subscribers == 2)
        for moment in every[1:]:  # many times what the buffers of a connection hold
            web.show(moment)
            assert client.event()[1]["clock"] == moment.sample.clock
        assert web.events.subscribers == 2
        let_go, stream = threading.Event(), web_module._PageHandler._stream

        def noted(handler: web_module._PageHandler) -> None:
            try:
                stream(handler)
            finally:
                let_go.set()

        monkeypatch.setattr(web_module._PageHandler, "_stream", noted)
        monkeypatch.setattr(web_module._PageHandler, "timeout", 3.0)
        with _deaf(web):
            deadline = time.monotonic() + PATIENCE
            while not let_go.is_set():
                assert time.monotonic() < deadline
                web.show(every[0])
                client.event()
        assert web.events.subscribers == 2


def test_closing_frees_the_port() -> None:
    web = WebView("127.0.0.1:0")
    where = _where(web)
    with _client(web) as client:
        client.event()
        threading.Thread(target=web.close).start()
        assert client.event()[0] == "end"
    _until(lambda: _refused(where))


def _refused(where: tuple[str, int]) -> bool:
    try:
        socket.create_connection(where, timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it closed while we were in its queue
        return False
    return False


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript here")
def test_the_page_sorts_processes_without_pss_by_what_is_known_of_it() -> None:
    rows = [
        ProcessRow(1, 0, "sleep", 2 * MB, pss=100 << 10, pss_at=0.0, rss_anon=MB, pss_anon=MB),
        ProcessRow(2, 0, "just started", 577 * MB, rss_anon=560 * MB),
        ProcessRow(3, 0, "grew", 720 * MB, pss=8 * MB, pss_at=0.0, rss_anon=711 * MB, pss_anon=10 * MB),
        ProcessRow(4, 0, "of another user", 40 * MB, pss_at=0.0),
        ProcessRow(5, 0, "no figures", None),
    ]
    part = Path(web_module.__file__).parent / "web_page" / "cards_and_tables.js"
    script = f"""
        import {{COLUMNS, inOrder, pssEstimate}} from {json.dumps(part.as_uri())};
        const rows = {json.dumps([asdict(row) for row in rows])}, text = COLUMNS.find((one) => one.key === "pss").text;
        console.log(JSON.stringify([inOrder(rows, {{key: "pss", down: true}}).map((row) => row.pid),
          rows.map(pssEstimate), rows.map(text)]));
    """
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script], capture_output=True, text=True, timeout=60, check=True
    )
    order, estimates, texts = json.loads(done.stdout)
    assert order == [3, 2, 4, 1, 5]
    assert estimates == [row.pss_estimate for row in rows]
    assert texts == ["100 KB", "≤ 577 MB", "~ 709 MB", "≤ 40 MB", "not yet read"]
