"""Write a file as a whole: a reader finds the old content or the new, never a part.

The dataset cache publishes directories relative to an open folder and does not use this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
PUBLIC, PRIVATE = 0o666, 0o600  # before the umask


def replace_file(path: str | os.PathLike[str], data: bytes | str, *, mode: int = PUBLIC) -> None:
    """Write ``path``, replacing a file of that name. OSError leaves the old file as it was.

    A process that is killed meanwhile leaves a ``NAME.….part`` beside it.
    """
    with _written(Path(path), data, mode) as part:
        os.replace(part, path)


def create_file(path: str | os.PathLike[str], data: bytes | str, *, mode: int = PUBLIC) -> None:
    """Write ``path`` and have it on the disk; FileExistsError where something of that name exists."""
    with _written(Path(path), data, mode, sync=True) as part:
        # A link fails where the name is taken; a rename would replace it. Some filesystems have no links.
        try:
            os.link(part, path, follow_symlinks=False)
        except FileExistsError:
            raise
        except (OSError, NotImplementedError):
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            os.rename(part, path)


@contextlib.contextmanager
def _written(path: Path, data: bytes | str, mode: int, *, sync: bool = False) -> Iterator[str]:
    """The name of a temporary file in the same folder that holds the data; removed if it is still there at the end."""
    # os.open, since the files of tempfile are private whatever the umask.
    # A name has 255 bytes at most, in UTF-8 three for each Chinese character.
    name = os.fsencode(path.name)[:200].decode(errors="ignore")
    part = str(path.parent / f"{name}.{os.urandom(6).hex()}.part")
    opened = os.open(part, _NEW, mode)
    try:
        # Closing may fail, too: on a full disk it writes what is left in the buffer.
        with open(opened, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        yield part  # closed: Windows does not rename open files
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)
