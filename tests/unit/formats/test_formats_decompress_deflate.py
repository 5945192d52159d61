"""Inflating many chunks does not take and give back the same memory over and over."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import os, resource, sys, threading, zlib
from legroom.formats import decompress_deflate

if sys.argv[1] == "without":
    decompress_deflate._keep_freed_memory = lambda: None
packed = zlib.compress(os.urandom(200_000), 1)

def work():
    for _ in range(100):
        group = [decompress_deflate.inflate(packed, 200_000) for _ in range(5)]
        del group

decompress_deflate.inflate(zlib.compress(b"x"), 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how: str) -> int:
    """Page faults of inflating 100 MB in groups of a megabyte, in a program that has freed nothing large before."""
    command = [sys.executable, "-c", _PROGRAM, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's heap that gives memory back so soon")
def test_memory_of_freed_chunks_is_reused() -> None:
    assert _faults("with") < 4000 < _faults("without")
