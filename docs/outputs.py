"""Run the commands of a page's console blocks and write what they print into the page.

    python docs/outputs.py docs/get-started.md        needs root, for a /dev/shm of its own

A block marked ``<!-- run: no: docs/outputs.py runs it with shm=64m -->`` begins with its commands, each after ``$ ``.
They run in one scratch folder with the files of the page (``<!-- run: file=NAME -->``) and a /dev/shm of that size.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

_FILE = re.compile(r"<!-- run: file=(?P<name>\S+) -->\n```python\n(?P<text>.*?)```\n", re.S)
_BLOCK = re.compile(
    r"(?P<mark><!-- run: no: docs/outputs.py runs it with shm=(?P<size>\w+) -->\n```console\n)(?P<body>.*?)```\n", re.S
)
_INSTALLED = re.compile(r'(?<=")[^"\n]*(?=/lib/python3\.\d+/site-packages/)')
# A traceback up to its last line, before the diagnosis: as the README, the page shows the error alone.
_TRACEBACK = re.compile(r"^Traceback [^\n]*\n.*?\n(?=\w*Error: [^\n]*\n\n?legroom: )", re.M | re.S)
_MOUNT = 'mount -t tmpfs -o size="$SIZE" tmpfs /dev/shm && exec sh -s'
_END = "----- end of the output -----"
COLUMNS = "80"


def outputs(commands: list[str], size: str, folder: Path) -> list[str]:
    """What each command prints, standard error included, in one shell with a /dev/shm of that size."""
    script = "".join(f"{command} 2>&1\necho '{_END}'\n" for command in commands)
    environment = {
        **os.environ,
        "SIZE": size,
        "COLUMNS": COLUMNS,
        "LC_ALL": "C.UTF-8",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LEGROOM_DIR": str(folder / ".legroom"),
        "XDG_STATE_HOME": str(folder / ".state"),
    }
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT],
        input=script, capture_output=True, text=True, cwd=folder, env=environment, check=True,
    )  # fmt: skip
    return [part.strip("\n") for part in done.stdout.split(_END + "\n")[: len(commands)]]


def rewritten(page: str) -> str:
    """The page with the output of its commands as they print it now."""
    with tempfile.TemporaryDirectory(prefix="train-") as name:
        folder = Path(name)
        (folder / ".legroom").mkdir(mode=0o700)
        for file in _FILE.finditer(page):
            (folder / file["name"]).write_text(file["text"])

        def with_output(block: re.Match[str]) -> str:
            commands = [line[2:] for line in block["body"].splitlines() if line.startswith("$ ")]
            parts = [
                f"$ {command}\n" + (f"{said}\n" if said else "")
                for command, said in zip(commands, outputs(commands, block["size"], folder), strict=True)
            ]
            text = "".join(parts).replace(str(folder), "/home/you/training")
            text = _TRACEBACK.sub("…\n", _INSTALLED.sub("/home/you/venv", text))
            return block["mark"] + text + "```\n"

        return _BLOCK.sub(with_output, page)


if __name__ == "__main__":
    for given in sys.argv[1:]:
        path = Path(given)
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
