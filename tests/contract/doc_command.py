"""`legroom` as a page calls it, in a fork of a process that has torch (doc_runner.py); it measures in forks, too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [os.getcwd(), str(Path(__file__).parents[1])]
    from forked_measurements import use_forks

    from legroom.cli.main import run

    use_forks(setattr)
    sys.exit(run(sys.argv[1:]))
