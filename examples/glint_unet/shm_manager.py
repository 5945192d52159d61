"""What of the data is in shared memory, and how to get rid of it: `legroom cache` under the flags you may know.

    python shm_manager.py --list [--h5 train_256.h5]        legroom cache list [FILE]
    python shm_manager.py --cleanup --h5 train_256.h5       legroom cache drop FILE
    python shm_manager.py --cleanup-all                     legroom cache drop --all

What a running training uses is not removed: that ends with status 1 and says who uses it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from legroom.messages import either


def legroom_cache(*words: str) -> int:
    """Run `legroom cache …`; its exit status."""
    return subprocess.call([sys.executable, "-m", "legroom", "cache", *words])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=either("List and remove shared copies of the data.", "列出和删除数据的共享副本。")
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--list",
        action="store_true",
        help=either("what is loaded: arrays, sizes, users", "已加载的数据：数组、大小、使用者"),
    )
    action.add_argument(
        "--cleanup",
        action="store_true",
        help=either("remove the copy of one file, named by --h5", "删除 --h5 所指文件的副本"),
    )
    action.add_argument(
        "--cleanup-all",
        action="store_true",
        help=either("remove every copy that no process uses", "删除所有未使用的副本"),
    )
    parser.add_argument("--h5", metavar="FILE", help=either("the data file", "数据文件"))
    wanted = parser.parse_args()
    if wanted.cleanup and not wanted.h5:
        parser.error(either("--cleanup needs --h5 FILE", "--cleanup 需要 --h5 文件"))
    if wanted.cleanup_all and wanted.h5:
        parser.error(
            either("--cleanup-all removes everything: it takes no --h5", "--cleanup-all 删除全部副本，不接受 --h5")
        )
    if wanted.list and wanted.h5 and not os.path.exists(wanted.h5):
        parser.error(either(f"there is no file {wanted.h5}", f"文件 {wanted.h5} 不存在"))

    if wanted.list:
        sys.exit(legroom_cache("list", *([wanted.h5] if wanted.h5 else [])))
    # A file that was deleted may have left its copy behind, so it need not be there to be cleaned up after.
    sys.exit(legroom_cache("drop", *([wanted.h5] if wanted.cleanup else ["--all", "--yes"])))


if __name__ == "__main__":
    main()
