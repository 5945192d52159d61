"""`legroom` as a page calls it, in a fork of a process that has torch (doc_runner.py).

That process imports this first: `check` and `tune` then measure in forks, too, also where a page's Python calls them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    from legroom.cli.main import run

    sys.exit(run(sys.argv[1:]))
else:
    sys.path.append(str(Path(__file__).parents[1]))
    from forked_measurements import use_forks

    use_forks(setattr)
