"""The pictures of the documents: `legroom doctor` from a real run, the views of `legroom watch` from a made-up one.

python docs/images/make.py        all of them: needs root, podman, runc, chromium and a Chinese font
python docs/images/make.py watch  those of the watch, from the samples of tests/watch_runs.py
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from legroom.monitor.serve_web_page import WebView
from legroom.monitor.tui import TerminalView, make_app
from legroom.records import Moment

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
COLUMNS, WIDTH, LINE, MARGIN = 80, 1010, 24, 20
# A font whose Chinese characters are exactly two columns wide keeps the columns.
STYLE = f"""body {{margin: {MARGIN}px; background: #1f2329; color: #d8dde3}}
pre {{margin: 0; line-height: {LINE}px; font: 20px/{LINE}px 'WenQuanYi Micro Hei Mono', monospace}}"""


def screen_of(language: str) -> str:
    """What doctor prints on a terminal in a container with the default /dev/shm of 64 MB, colours included."""
    from rigs import container

    legroom = [sys.executable, "-m", "legroom", "--lang", language, "doctor"]
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    with container() as one:
        command = one.command(legroom, shm="64m", options=["--tty", "--interactive"])
        with subprocess.Popen(command, stdin=its, stdout=its, env=environment, start_new_session=True):
            os.close(its)
            pieces = []
            with contextlib.suppress(OSError):  # Linux reports it when no process has the other end any more
                while piece := os.read(mine, 1 << 16):
                    pieces.append(piece)
    os.close(mine)
    return b"".join(pieces).decode().replace("\r\n", "\n")


def picture(screen: str, path: Path) -> None:
    """That screen as a PNG."""
    text = Text.from_ansi(screen.rstrip("\n"))
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(text)
    body = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>", theme=MONOKAI)
    height = LINE * (screen.rstrip("\n").count("\n") + 1) + 2 * MARGIN
    screenshot(f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{body}", WIDTH, height, path)


def screenshot(page: str, width: int, height: int, path: Path) -> None:
    """A page as a PNG."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page)
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--window-size={width},{height}", f"--screenshot={path}", f"file://{file}"],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


def watched() -> Iterator[Moment]:
    """Five minutes of a made-up watch that end now, with names of processes as a reader has them."""
    from watch_runs import HOSTILE, moments

    names = {HOSTILE: "python evaluate.py", "somebody else's": "another user's process"}
    for moment in moments(300, start=time.time() - 300):
        rows = [replace(row, command=names.get(row.command, row.command)) for row in moment.sample.processes]
        yield replace(moment, sample=replace(moment.sample, processes=tuple(rows)))


def watch_screen(path: Path) -> None:
    """The full-screen view, drawn by Textual itself as SVG."""
    view = TerminalView()
    for moment in watched():
        view.show(moment)

    async def drawn() -> str:
        app = make_app(view, threading.Event())
        async with app.run_test(size=(COLUMNS, 24)) as pilot:
            await pilot.pause()
            return str(app.export_screenshot())

    svg = asyncio.run(drawn())
    style = "body {margin: 0} svg {display: block; width: 990px}"
    screenshot(f"<!doctype html><meta charset=utf-8><style>{style}</style>{svg}", 990, 636, path)


def watch_web(path: Path) -> None:
    """The page in a browser."""
    import chromium

    with chromium.browser() as page:
        page.look(1280, 726)  # the rest of the page would be cut in the middle of a box
        web = WebView("127.0.0.1:0")
        try:
            for moment in watched():
                web.show(moment)
            page.open(web.url)
            page.until("document.querySelectorAll('#process-rows tr').length > 3")
            page.until("document.querySelector('[data-pool=shm] polyline') !== null")
            path.write_bytes(page.picture())
        finally:
            web.close()


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS / "real")]
    watch_screen(HERE / "watch-screen.png")
    watch_web(HERE / "watch-web.png")
    if sys.argv[1:] != ["watch"]:
        picture(screen_of("en"), HERE / "doctor.png")
        picture(screen_of("zh"), HERE / "doctor-zh.png")
