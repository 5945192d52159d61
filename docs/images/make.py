"""The picture of `legroom doctor` in the documents, made from a real run of it.

    python docs/images/make.py        needs root (for a 64 MB /dev/shm), chromium and a Chinese font

Covers: doctor.png and doctor-zh.png. Does not cover: the watch's pictures, which its own tests take.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).resolve().parent
SHELL = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
COLUMNS, WIDTH, LINE, MARGIN = 80, 1010, 24, 20
# A font whose Chinese characters are exactly two columns wide keeps the columns.
STYLE = f"""body {{margin: {MARGIN}px; background: #1f2329; color: #d8dde3}}
pre {{margin: 0; line-height: {LINE}px; font: 20px/{LINE}px 'WenQuanYi Micro Hei Mono', monospace}}"""


def screen_of(language: str) -> str:
    """What doctor prints on a terminal, colours included."""
    command = [sys.executable, "-m", "legroom", "--lang", language, "doctor"]
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", SHELL, "sh", *command]
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    with subprocess.Popen(private, stdout=its, env=environment):
        os.close(its)
        pieces = []
        with contextlib.suppress(OSError):  # Linux says so when nobody has the other end any more
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
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{body}")
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--window-size={WIDTH},{height}", f"--screenshot={path}", f"file://{page}"],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


if __name__ == "__main__":
    picture(screen_of("en"), HERE / "doctor.png")
    picture(screen_of("zh"), HERE / "doctor-zh.png")
