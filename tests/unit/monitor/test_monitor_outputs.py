"""Outputs: Prometheus read by Prometheus's own parser, alarms carried to commands and webhooks, plain lines."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from monitor_samples import GB, MB, moments, pool, row, sample

from legroom.errors import CannotListen, UsageError
from legroom.messages import cells
from legroom.monitor.history_and_trend import History
from legroom.monitor.http_server import Handler, parse_address
from legroom.monitor.notify import Notifier, command_sender, webhook_sender
from legroom.monitor.prometheus import METRICS, MOST_PROCESSES, Prometheus, Totals, metrics_text
from legroom.monitor.watch_text import TextOutput, sample_line
from legroom.records.machine import MemoryEvents, Pool, Pressure
from legroom.records.watch_sample import Annotations, EntryRow, Mark, Moment, ProcessRow

EVIL = 'python "<script>"\\n\\ train.py\nX{a="b"}'


def _moment() -> Moment:
    """One that has a figure for every metric."""
    return list(
        moments(
            sample(
                float(n),
                pool("shm", 100 * MB, (20 + n * 0.7) * MB),
                pool("swap", GB, MB),
                processes=(row(7, rss=GB, shmem=n * MB, command=EVIL, pss=5, pss_at=0.0, gpu=3, fds=4, fd_limit=9),),
                pressure=(Pressure("machine", 50.0, 0, 25.0, 0, "x"),),
                events=MemoryEvents(1, 2, 3, "cgroup", "memory.events"),
                said=Annotations({"model": 5}, "epoch 1", (), 7, 1.0),
                entries=(EntryRow("abc", "/data/x.h5", "shm", GB, True),),
                swap_in=1.0,
                swap_out=2.0,
                cost=0.01,
            )
            for n in range(100)
        )
    )[-1]


def _families(text: str) -> dict[str, Any]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def _exposed() -> dict[str, set[str]]:
    """Every metric name that is exposed, with its labels."""
    text = metrics_text(_moment(), Totals(5.0, 6.0, {("shm-filling", "shm"): 1}))
    return {s.name: set(s.labels) for family in _families(text).values() for s in family.samples}


def test_prometheus_can_read_every_metric() -> None:
    moment = _moment()
    families = _families(metrics_text(moment, Totals(5.0, 6.0, {("shm-filling", "shm"): 1})))
    assert set(_exposed()) == {f"legroom_{name}" for name in METRICS}
    for name, (kind, text) in METRICS.items():
        family = families[f"legroom_{name.removesuffix('_total')}"]
        assert family.type == kind and family.documentation == text
        assert (kind == "counter") == name.endswith("_total")
    command = families["legroom_process_resident_memory_bytes"].samples[0]
    assert command.labels["command"] == EVIL and command.value == GB
    ratios = {s.labels["pool"]: s.value for s in families["legroom_pool_used_ratio"].samples}
    assert ratios["shm"] == pytest.approx(0.893, abs=0.01)
    assert families["legroom_memory_pressure_ratio"].samples[0].value == 0.5
    assert families["legroom_process_proportional_memory_age_seconds"].samples[0].value == 99.0
    assert {s.labels["code"] for s in families["legroom_alarm"].samples} >= {"shm-nearly-full", "shm-filling"}


def test_units_are_base_units_and_names_follow_the_rules() -> None:
    import re

    for name in METRICS:
        assert re.fullmatch(r"[a-z][a-z_]+[a-z]", name)
        assert not re.search(r"_(ms|kb|mb|gb|kib|mib|percent|minutes)(_|$)", name)


def test_entries_without_a_key_are_one_series() -> None:
    entries = tuple(EntryRow("", "/data/x.h5", "inplace", size, None) for size in (3, 4))
    moment = next(moments([sample(entries=entries)]))
    (series,) = _families(metrics_text(moment, Totals()))["legroom_cache_entry_bytes"].samples
    assert series.value == 7


def test_what_is_unknown_is_left_out_and_processes_are_bounded() -> None:
    unknown = Pool("shm", None, None, None, "x", "why")
    nothing = MemoryEvents(None, None, None, "machine", "x")
    rows = tuple(row(pid, rss=pid) for pid in range(500))
    moment = next(moments([sample(0, unknown, events=nothing, swap_in=None, swap_out=None, processes=rows)]))
    families = _families(metrics_text(moment, Totals()))
    assert {s.labels["pool"] for s in families["legroom_pool_size_bytes"].samples} == {"ram"}
    assert not {"legroom_oom_kills", "legroom_swap_in_bytes", "legroom_steps"} & set(families)
    assert len(families["legroom_process_resident_memory_bytes"].samples) == MOST_PROCESSES
    assert families["legroom_processes"].samples[0].value == 500


def test_swap_is_summed_over_time() -> None:
    totals = Totals()
    for moment in moments(sample(float(n), swap_in=10.0, swap_out=1.0) for n in range(5)):
        totals = totals.after(moment, 2.0)
    assert (totals.swapped_in, totals.swapped_out) == (100.0, 10.0)


def _get(url: str, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    parts = urlsplit(url)
    link = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        link.putrequest("GET", path, skip_host="Host" in headers)
        for name, value in headers.items():
            link.putheader(name, value)
        link.endheaders()
        answer = link.getresponse()
        return answer.status, answer.getheader("Content-Type") or "", answer.read().decode()
    finally:
        link.close()


@pytest.fixture
def served() -> Iterator[Prometheus]:
    server = Prometheus("127.0.0.1:0")
    yield server
    server.close()


def test_it_is_served(served: Prometheus) -> None:
    assert _get(served.url)[0] == 503
    served.show(_moment())
    status, kind, text = _get(served.url)
    assert (
        status == 200
        and kind == "text/plain; version=0.0.4; charset=utf-8"
        and "legroom_pool_used_bytes" in _families(text)
    )
    assert _get(served.url, "/nothing")[0] == 404
    for host in ("localhost:9464", "127.0.0.1", "[::1]:9464"):
        assert _get(served.url, Host=host)[0] == 200
    for host in ("evil.example", "evil.example:9464", "127.0.0.1.evil.example", ""):
        assert _get(served.url, Host=host)[0] == 421


def test_a_client_that_never_reads_does_not_delay_scrapes(served: Prometheus) -> None:
    served.show(_moment())
    parts = urlsplit(served.url)
    idle = [socket.create_connection((parts.hostname, parts.port)) for _ in range(20)]
    try:
        assert _get(served.url)[0] == 200
    finally:
        for one in idle:
            one.close()


def _until_answered(served: Prometheus) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if _get(served.url)[0] == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # on a busy machine a request may not be sent within the limit
        assert time.monotonic() < deadline


def _lines_until_closed(served: Prometheus, first: bytes, more: bytes) -> bytes:
    """What a client receives that sends ``more`` byte by byte, as long as the server lets it."""
    parts = urlsplit(served.url)
    got = b""
    with socket.create_connection((parts.hostname, parts.port), timeout=0.05) as client:
        client.sendall(first)
        deadline = time.monotonic() + 60
        for byte in itertools.cycle(more):
            assert time.monotonic() < deadline
            try:
                if (part := client.recv(1 << 16)) == b"":
                    return got
                got += part
            except TimeoutError:
                if more.strip(b"-"):
                    client.sendall(bytes([byte]))
            except ConnectionError:
                return got
    return got


@pytest.mark.parametrize(
    ("first", "more"),
    [(b"", b"-"), (b"GET /metrics HTTP/1.1\r\nHost: local", b"-"), (b"GET /metr", b"x"),
     (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Long: ", b"y")],
)  # fmt: skip
def test_a_request_must_be_complete_in_time_however_it_comes(
    served: Prometheus, monkeypatch: pytest.MonkeyPatch, first: bytes, more: bytes
) -> None:
    monkeypatch.setattr(Handler, "timeout", 1.0)
    served._server.clients = threading.BoundedSemaphore(1)
    served.show(_moment())
    assert b"200" not in _lines_until_closed(served, first, more)
    _until_answered(served)  # the only thread is free again


def test_requests_on_one_connection_have_a_limit_each(served: Prometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "timeout", 60.0)
    served.show(_moment())
    parts = urlsplit(served.url)
    link = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    for _ in range(3):
        link.request("GET", "/metrics")
        answer = link.getresponse()
        assert answer.status == 200 and b"legroom_" in answer.read()
    link.close()


def test_a_client_that_never_reads_is_let_go(served: Prometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "timeout", 1.0)
    monkeypatch.setattr("legroom.monitor.prometheus.metrics_text", lambda *_, **__: "x 1\n" * (1 << 19))
    served._server.clients = threading.BoundedSemaphore(1)
    served.show(_moment())
    parts = urlsplit(served.url)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((parts.hostname, parts.port))
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 16)  # more than buffers hold
        _until_answered(served)


def test_clients_are_bounded(served: Prometheus) -> None:
    served.show(_moment())
    served._server.clients = threading.BoundedSemaphore(3)
    parts = urlsplit(served.url)
    idle = [socket.create_connection((parts.hostname, parts.port)) for _ in range(3)]  # accepted in this order
    try:
        assert _get(served.url)[0] == 503
    finally:
        for one in idle:
            one.close()
    deadline = time.monotonic() + 60
    while _get(served.url)[0] != 200:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("where", ["no.such.host.invalid:9464", "203.0.113.7:9464"])
def test_an_address_that_is_not_this_machine_s_is_reported_as_one(where: str) -> None:
    with pytest.raises(CannotListen) as caught:
        Prometheus(where)
    assert "an address of this machine" in caught.value.fix[0]


def test_a_port_in_use_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CannotListen, match=r"in use|already") as caught:
            Prometheus(f"127.0.0.1:{taken.getsockname()[1]}")
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("text", "meant"),
    [("", ("127.0.0.1", 1)), ("9999", ("127.0.0.1", 9999)), ("0.0.0.0:80", ("0.0.0.0", 80)), (":80", ("127.0.0.1", 80)),
     ("[::1]:80", ("::1", 80)), ("localhost", ("localhost", 1))],
)  # fmt: skip
def test_addresses(text: str, meant: tuple[str, int]) -> None:
    assert parse_address(text or "1", 1) == meant


@pytest.mark.parametrize("text", ["host:port", "1:99999", "a:b:c", "99999999"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(CannotListen):
        parse_address(text, 1)


# What is shipped.


def _share(name: str) -> str:
    return (resources.files("legroom.monitor") / "share" / name).read_text(encoding="utf-8")


def _metrics_in(expression: str) -> set[str]:
    import re

    return set(re.findall(r"legroom_[a-z_]+", expression))


def _labels_in(expression: str) -> set[str]:
    import re

    return {
        label for group in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"([a-z_]+)\s*[=!]", group)
    }


def test_alert_rules_name_metrics_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    groups = yaml.safe_load(_share("alerts.yml"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert rules and len({rule["alert"] for rule in rules}) == len(rules)
    exposed = _exposed()
    for rule in rules:
        named = _metrics_in(rule["expr"])
        assert named and named <= set(exposed), rule
        assert _labels_in(rule["expr"]) <= set().union(*(exposed[name] for name in named)), rule
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() >= {"summary", "description"}
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_the_dashboard_names_metrics_that_exist() -> None:
    board = json.loads(_share("dashboard.json"))
    exposed = _exposed()
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert panels and len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    shown: set[str] = set()
    for panel in panels:
        assert panel["title"] and panel["targets"] and {"x", "y", "w", "h"} == panel["gridPos"].keys()
        for target in panel["targets"]:
            named = _metrics_in(target["expr"])
            assert named and named <= set(exposed), target
            assert _labels_in(target["expr"]) - {"job", "instance"} <= set().union(*(exposed[name] for name in named))
            shown |= named
    assert shown >= {
        "legroom_pool_used_ratio",
        "legroom_alarm",
        "legroom_process_resident_memory_bytes",
        "legroom_steps_total",
    }


# Alarms carried elsewhere.


@pytest.fixture
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell or a server may wait seconds for a core; what is tested is what arrives, not when."""
    monkeypatch.setattr("legroom.monitor.notify._LAST_WAIT", 60.0)
    monkeypatch.setattr("legroom.monitor.notify._WEBHOOK_TIMEOUT", 60.0)


def _carry(deliver: Notifier) -> None:
    full = [
        sample(float(n), pool("shm", 100 * MB, (90 if n < 3 else 10) * MB), processes=(row(7, shmem=n),))
        for n in range(30)
    ]
    for moment in moments(full):
        deliver.show(moment)
    deliver.close()


@pytest.mark.usefixtures("_no_hurry")
def test_a_command_is_run_for_each_alarm(tmp_path: Path) -> None:
    told: list[str] = []
    out = tmp_path / "out"
    _carry(
        Notifier(
            command_sender(f'cat >> {out}; echo " $LEGROOM_ALARM_STATE $LEGROOM_ALARM_CODE" >> {out}'), told.append
        )
    )
    lines = out.read_text().splitlines()
    assert told == [] and len(lines) == 2
    assert lines[0].endswith(" begun shm-nearly-full") and lines[1].endswith(" ended shm-nearly-full")
    data = json.loads(lines[0].removesuffix(" begun shm-nearly-full"))
    assert (
        data["schema"] == "legroom.alarm/1"
        and data["level"] == "warning"
        and data["text"].startswith("legroom: WARNING")
    )


@pytest.mark.usefixtures("_no_hurry")
def test_the_text_of_an_alarm_is_never_part_of_the_command(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    command = f"x'; touch {mark}; $(touch {mark}) `touch {mark}`"
    leak = [
        sample(float(n), pool("shm", 100 * MB, (20 + n) * MB), processes=(row(7, shmem=n * MB, command=command),))
        for n in range(75)
    ]
    deliver = Notifier(command_sender("true"), lambda text: None)
    alarms = []
    for moment in moments(leak):
        deliver.show(moment)
        alarms += moment.begun
    deliver.close()
    assert any("touch" in alarm.message for alarm in alarms) and not mark.exists()


@pytest.mark.usefixtures("_no_hurry")
def test_a_command_that_fails_is_reported(tmp_path: Path) -> None:
    told: list[str] = []
    _carry(Notifier(command_sender("exit 3"), told.append))
    assert len(told) == 2 and "failed: exit code 3" in told[0]
    with pytest.raises(UsageError):
        command_sender("  ")


@pytest.mark.usefixtures("_no_hurry")
def test_a_webhook_gets_json() -> None:
    got: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204 if len(got) == 1 else 500)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    told: list[str] = []
    try:
        _carry(Notifier(webhook_sender(f"http://127.0.0.1:{server.server_port}/hook"), told.append))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [one["state"] for one in got] == ["begun", "ended"] and got[0]["code"] == "shm-nearly-full"
    assert len(told) == 1 and "answered 500" in told[0]


@pytest.mark.parametrize("url", ["", "hook", "file:///etc/passwd", "ftp://x/y", "http://"])
def test_a_webhook_is_an_http_address(url: str) -> None:
    with pytest.raises(UsageError, match="cannot post"):
        webhook_sender(url)


@pytest.mark.usefixtures("_no_hurry")
def test_a_slow_carrier_does_not_hold_up_the_watch() -> None:
    go = threading.Event()
    carried: list[str] = []

    def carry(alarm: Any, state: str) -> None:
        go.wait(30)
        carried.append(state)

    deliver = Notifier(carry, lambda text: None)
    began = time.monotonic()
    for moment in moments([sample(0, pool("shm", 100, 90))] * 1):
        for _ in range(500):
            deliver.show(moment)
    assert time.monotonic() - began < 20
    go.set()
    deliver.close()
    assert "begun" in carried


# Lines.


def test_lines_show_samples_alarms_marks_and_a_summary() -> None:
    told: list[str] = []
    history = History()
    lines = TextOutput(told.append, history)
    run = [
        sample(
            float(n),
            pool("shm", 100 * MB, (90 if n < 3 else 10) * MB),
            pool("swap", 0, 0),
            processes=(row(7, rss=GB),),
            said=Annotations({"model": MB}, "epoch 1", (Mark(0.0, "epoch 1"),) if n == 0 else (), 5, 2.5),
        )
        for n in range(30)
    ]
    for moment in moments(run):
        history.add(moment.sample)
        lines.show(moment)
    lines.close()
    text = "\n".join(told)
    assert told[0] == "watching a test" and "-- epoch 1" in text
    assert "shm 90% of 100 MB" in text and "largest: pid 7 python train.py 7 1 GB" in text and "2.50 steps/s" in text
    assert text.count("WARNING shm-nearly-full") == 1 and text.count("ended after") == 1
    assert told[-1].startswith("watched for 29 s; peaks: shm 90 MB of 100 MB") and told[-1].endswith("1 alarm")
    assert "swap" not in told[1]  # a machine without swap has nothing to say about it


def test_a_note_is_written_once_also_when_it_comes_later() -> None:
    told: list[str] = []
    lines = TextOutput(told.append, History())
    for moment in moments(sample(float(n), notes=() if n < 3 else ("a note",)) for n in range(6)):
        lines.show(moment)
    assert [n for n, line in enumerate(told) if line == "note: a note"] == [4]  # after the head and three samples


def test_lines_list_the_five_largest_every_ten_seconds_and_at_an_alarm() -> None:
    told: list[str] = []
    lines = TextOutput(told.append, History(), lambda: 60)
    command = "python train.py " + "--flag " * 20
    rows = tuple(row(pid, rss=pid * MB, command=command) for pid in range(1, 9))
    full = pool("shm", 100 * MB, 97 * MB)
    run = [sample(float(n), *((full,) if n == 17 else ()), processes=rows) for n in range(25)]
    for moment in moments(run):
        lines.show(moment)
    listed = [line.split()[:3] for line in told if line.startswith("    ")]
    assert listed[:5] == [[str(n), "MB", str(n)] for n in (8, 7, 6, 5, 4)]
    assert len(listed) == 5 * 3  # at 0 s, 10 s and with the alarm at 17 s
    assert all(cells(line) <= 60 for line in told if line.startswith("    "))


def test_lines_fit_a_terminal_and_show_the_most_that_fits() -> None:
    command = "python train_glint_unet.py --h5 train_256.h5 --batch-size 32"
    watched = sample(
        0.0,
        *(pool(name, 100 * GB, 42 * GB) for name in ("shm", "ram", "swap", "gpu0", "disk")),
        processes=tuple(row(pid, rss=pid * GB, command=command) for pid in range(1, 9)),
        said=Annotations({"model": MB}, "epoch 1", (), 5, 2.5),
    )
    whole = sample_line(watched)
    assert (
        whole.count("of 100 GB") == 5 and "largest: pid 8 python train_glint_unet.py" in whole and "model 1 MB" in whole
    )
    lengths = []
    for columns in range(200, 4, -1):
        line = sample_line(watched, columns)
        lengths.append(cells(line))
        assert lengths[-1] <= columns
    assert sorted(lengths, reverse=True) == lengths  # less room never says more
    at_80 = sample_line(watched, 70)
    assert all(f"{name} 42%" in at_80 for name in ("shm", "ram", "swap", "gpu0", "disk")) and "2.50 steps/s" in at_80


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_everything_printed_to_a_terminal_fits_it(columns: int) -> None:
    told: list[str] = []
    history = History()
    lines = TextOutput(told.append, history, lambda: columns)
    full = [pool(name, 100 * MB, 97 * MB) for name in ("shm", "ram", "swap", "gpu0", "disk")]
    notes = ("a note about what cannot be seen from here, which is longer than a line of forty columns",)
    for moment in moments([replace(sample(float(n), *full), notes=notes) for n in range(4)]):
        history.add(moment.sample)
        lines.show(moment)
    lines.close()
    shown = "\n".join(told).splitlines()
    assert max(map(cells, shown)) <= columns
    text = " ".join(" ".join(shown).split())
    assert notes[0] in text and "CRITICAL shm-nearly-full" in text and "peaks: shm 97 MB of 100 MB" in text


def test_an_unknown_size_is_not_printed_as_zero() -> None:
    told: list[str] = []
    lines = TextOutput(told.append, History())
    rows = (ProcessRow(5, 1, "no figures", None), ProcessRow(6, 1, "small", 3 * MB, swap=0))
    lines.show(Moment(sample(0, processes=rows)))
    assert [line.split()[:2] for line in told if line.startswith("    ")] == [["3", "MB"], ["unknown", "5"]]
    lines.show(Moment(sample(1, processes=rows[:1])))
    assert told[-1].endswith("largest: pid 5 no figures unknown") and "0 B" not in "".join(told)


def test_a_command_that_is_too_long_keeps_its_arguments() -> None:
    told: list[str] = []
    lines = TextOutput(told.append, History(), lambda: 60)
    rows = tuple(row(n, rss=GB, command=f"/root/.pyenv/versions/3.11.7/bin/python train_{n}.py") for n in (1, 2))
    lines.show(Moment(sample(0, processes=rows)))
    assert all(cells(line) <= 60 for line in told)
    assert [line.split(maxsplit=3)[3] for line in told[-2:]] == ["python train_1.py", "python train_2.py"]
    assert "python train_1.py" in sample_line(sample(0, processes=rows), 90)
