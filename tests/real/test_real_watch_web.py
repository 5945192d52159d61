"""The page in a real browser: a real watch of a real process, what it shows, what it asks for, and who may ask it.

Needs Debian's chromium, which ``make test`` installs where it may; skipped with a reason elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import chromium
import pytest
from chromium import Page

from legroom.monitor.serve_web_page import WebView
from legroom.monitor.watch_log import WatchLog
from watch_runs import HOSTILE, moments

LEGROOM = [sys.executable, "-m", "legroom"]
# As a name of a process, not as an argument of one: it is what ps shows, and what a page must not run.
HOSTILE_NAME = "<script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """One browser for all: starting it takes a second or two."""
    reason = chromium.why_not()
    if reason is not None:
        if os.environ.get("CI") and chromium.could_be_installed():
            pytest.fail(f"CI as root must look at the page: {reason}")
        pytest.skip(reason)
    with chromium.browser() as found:
        yield found


@pytest.fixture
def fresh(page: Page) -> Page:
    """The browser with an empty console, on a screen of its usual size."""
    page.open("about:blank")
    page.console.clear()
    page.requests.clear()
    page.look(1280, 800)
    return page


@contextlib.contextmanager
def _watching(*options: str, ends: bool = False) -> Iterator[str]:
    """A watch in another process; its address. ``ends``: it has ended by itself afterwards, or is about to."""
    child = subprocess.Popen(
        [*LEGROOM, "watch", "--web", "127.0.0.1:0", *(() if "--replay" in options else ("--interval", "0.2s")), *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stderr is not None
    try:
        found = re.search(r"http://\S+", child.stderr.readline())
        assert found is not None
        yield found[0]
        if not ends:
            child.terminate()
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        child.stderr.close()


def _foreign(page: Page, url: str) -> list[str]:
    return [one for one in page.requests if not one.startswith((url, "data:,", "about:"))]


def test_a_live_watch_in_a_browser(fresh: Page) -> None:
    page = fresh
    sleeper = subprocess.Popen(
        ["bash", "-c", f'exec -a "{HOSTILE_NAME}" {sys.executable} -c "import time; time.sleep(600)"']
    )
    try:
        with _watching("--pid", str(sleeper.pid), ends=True) as url:
            page.open(url)
            page.until("document.querySelectorAll('#process-rows tr').length === 1")
            # A name is shown as text, and did nothing.
            assert page.value("document.querySelector('#process-rows td.command').textContent").startswith(HOSTILE_NAME)
            assert page.value("document.title") != "owned"
            assert page.value("document.querySelectorAll('script').length") == 1  # the page's own
            # Values are there and live.
            assert page.value("document.querySelector('#process-rows').textContent").count(str(sleeper.pid)) == 1
            assert page.until("[...document.querySelectorAll('.pool h3')].map(one => one.textContent).includes('ram')")
            assert re.search(r"\d+%", page.until("document.querySelector('[data-pool=ram] .share').textContent"))
            # late, where no sample came for 6 s
            page.until("document.getElementById('state').dataset.state === 'live'")
            dots = "document.querySelector('[data-pool=ram] polyline').getAttribute('points').split(' ').length"
            before = page.until(f"document.querySelector('[data-pool=ram] polyline') && {dots}")
            page.until(f"{dots} > {before} + 3")
            assert f"process {sleeper.pid}" in page.value("document.getElementById('watched').textContent")
            sleeper.kill()
            sleeper.wait()
            # The watch ends with what it watches, and the page says so instead of asking for ever.
            page.until("document.getElementById('state').dataset.state === 'ended'")
            assert page.console == [] and _foreign(page, url) == []
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.fixture
def served() -> Iterator[WebView]:
    """A whole made-up watch, with alarms."""
    web = WebView("127.0.0.1:0")
    for moment in moments(300, start=time.time() - 300):
        web.show(moment)
    yield web
    web.close()


def _shown(page: Page, url: str) -> None:
    page.open(url)
    page.until("document.querySelectorAll('#process-rows tr').length === 7")


def test_everything_is_on_the_page(fresh: Page, served: WebView) -> None:
    page = fresh
    _shown(page, served.url)
    text = page.value("document.body.innerText")
    for words in ("shm full in about", "62.7 MB of 64 MB used", "the store's directory may not be read", "epoch 4",
                  "3.97 steps/s", "optimizer", "2.8 GB", "/data/val_256.h5", "not yet read", HOSTILE):  # fmt: skip
        assert words in text, words
    unknown = page.value("[...document.querySelectorAll('#process-rows tr')].at(-1).innerText")
    assert "somebody else's" in unknown and unknown.count("unknown") == 5 and "0 B" not in unknown
    assert page.value("document.title") == "(3) legroom watch"
    assert page.console == [] and _foreign(page, served.url) == []


def test_processes_can_be_sorted_and_charts_reach_further_back(fresh: Page, served: WebView) -> None:
    page = fresh
    _shown(page, served.url)
    first = "document.querySelector('#process-rows tr').innerText"
    assert "4711" in page.value(first) and page.value("document.querySelector('th[aria-sort]').innerText").startswith(
        "PSS"
    )
    page.value("[...document.querySelectorAll('th button')].find(one => one.textContent === 'pid').click()")
    assert "4711" in page.value(first) and page.value(
        "document.querySelector('th[aria-sort=ascending]').innerText"
    ).startswith("pid")
    page.value("[...document.querySelectorAll('th button')].find(one => one.textContent === 'pid').click()")
    assert "4801" in page.value(first)
    page.value("document.querySelectorAll('#spans button')[2].click()")
    assert page.value("document.querySelector('#spans [aria-pressed=true]').textContent") == "all"
    assert page.console == []


def test_it_can_be_read_aloud(fresh: Page, served: WebView) -> None:
    page = fresh
    _shown(page, served.url)
    assert page.value("[...document.querySelectorAll('h1,h2')].map(one => one.textContent)") == [
        "legroom watch", "Alarms", "Resources", "Reported by the script", "Processes", "Groups that share batches",
        "Copies in GPU memory that processes share", "Cache entries",
    ]  # fmt: skip
    label = page.value("document.querySelector('[data-pool=shm] svg').getAttribute('aria-label')")
    assert re.fullmatch(r"shm over time: now 98%, between \d+% and 98%", label)
    assert page.value("document.querySelector('[data-pool=shm] [role=meter]').getAttribute('aria-valuenow')") == "98"
    assert "critical: shm is 98% full" in page.value("document.getElementById('alarm-news').textContent")
    assert page.value("[...document.querySelectorAll('th')].every(one => one.scope === 'col')")
    assert page.value("[...document.querySelectorAll('table')].every(one => one.caption.textContent)")
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {node.get("role", {}).get("value") for node in tree}
    assert {"meter", "heading", "table", "columnheader", "row", "list"} <= roles and roles & {"image", "img"}


_LUMINANCE = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (360, False), (360, True), (320, False)])
def test_on_a_phone_and_in_the_dark(fresh: Page, served: WebView, width: int, dark: bool, tmp_path: Path) -> None:
    page = fresh
    page.look(width, 740, dark=dark)
    _shown(page, served.url)
    assert page.value("document.documentElement.scrollWidth") <= width  # nothing to push sideways
    luminance = page.value(_LUMINANCE)
    assert luminance < 150 if dark else luminance > 600
    narrow = page.value("getComputedStyle(document.getElementById('sort').parentElement).display")
    assert (narrow == "none") == (width > 640)
    assert page.picture().startswith(b"\x89PNG")


def test_a_finished_watch_stays_open(fresh: Page, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    kept = WatchLog(log, print)
    for moment in moments(60):
        kept.show(moment)
    kept.close()
    with _watching("--replay", str(log)) as url:
        fresh.open(url)
        fresh.until("document.getElementById('state').dataset.state === 'ended'")
        assert "62" not in fresh.value("document.title")
        assert fresh.value("document.querySelectorAll('#process-rows tr').length") == 7
        assert urlopen(url).status == 200


def test_another_page_cannot_read_it(fresh: Page, served: WebView) -> None:
    assert fresh.value(f"fetch('{served.url}/events').then(() => 'read', () => 'refused')") == "refused"


def test_a_name_pointed_at_this_machine_reads_nothing(fresh: Page, served: WebView) -> None:
    fresh.open(served.url.replace("127.0.0.1", chromium.ELSEWHERE))
    assert "names another host" in fresh.value("document.body.innerText")
    assert fresh.value("document.querySelectorAll('table').length") == 0
    assert fresh.value("fetch('/events').then(answer => answer.status)") == 421


# Without a browser.


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LEGROOM, "watch", *options], capture_output=True, text=True, timeout=240)


def test_a_port_in_use_and_a_bad_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = _run("--web", f"127.0.0.1:{taken.getsockname()[1]}")
    assert found.returncode == 2 and "in use" in found.stderr and "Traceback" not in found.stderr


def test_a_picture_of_no_known_kind(tmp_path: Path) -> None:
    found = _run("--plot", str(tmp_path / "out.pdf"))
    assert found.returncode == 2 and ".svg" in found.stderr


@pytest.mark.parametrize("kind", ["svg", "html", "png"])
def test_a_finished_watch_is_drawn(kind: str, tmp_path: Path) -> None:
    if kind == "png":
        pytest.importorskip("matplotlib")
    log, out = tmp_path / "run.jsonl", tmp_path / f"out.{kind}"
    kept = WatchLog(log, print)
    for moment in moments(40):
        kept.show(moment)
    kept.close()
    found = _run("--replay", str(log), "--plot", str(out))
    assert found.returncode == 0 and f"plot written to {out}" in found.stderr and found.stdout == ""
    assert out.stat().st_size > 3000


def test_a_live_watch_is_drawn_when_it_ends(tmp_path: Path) -> None:
    out, log = tmp_path / "out.svg", tmp_path / "log.jsonl"
    watched = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # it ends when it has been sampled
    options = ["--pid", str(watched.pid), "--interval", "0.2s", "--plot", str(out), "--log", str(log)]
    watch = subprocess.Popen([*LEGROOM, "watch", *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while (not log.exists() or log.read_bytes().count(b"\n") < 5) and time.monotonic() < deadline:
            time.sleep(0.05)
        watched.communicate()
        assert watch.wait(60) == 0 and "polyline" in out.read_text()
    finally:
        for process in (watched, watch):
            process.kill()
            process.wait()
