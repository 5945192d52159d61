"""What an installed Legroom must do without torch; run by the Python it is installed in, anywhere but in a checkout.

python smoke.py LOGFILE      a recorded log of a training that the GPU's memory killed
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path


def legroom(*words: str, fine: tuple[int, ...] = (0,)) -> str:
    """What the command prints; its exit status must be one of these."""
    program = Path(sys.executable).with_name("legroom.exe" if os.name == "nt" else "legroom")
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode in fine, f"legroom {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def the_command_line(log: str, folder: Path) -> None:
    import legroom as package

    assert legroom("--version").split()[-1] == package.__version__
    report = json.loads(legroom("doctor", "--json", fine=(0, 1)))
    assert report["schema"] == "legroom.doctor/1" and report["pools"]
    assert json.loads(legroom("explain", "--json", log))["verdict"] == "gpu-oom"
    legroom("report", "--out", str(folder / "report.zip"))
    assert "box.json" in zipfile.ZipFile(folder / "report.zip").namelist()


def a_dataset_through_the_cache(folder: Path) -> None:
    import h5py
    import numpy as np

    import legroom as package

    path = folder / "train.h5"
    images = np.arange(64 * 8 * 8, dtype=np.float32).reshape(64, 8, 8)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, chunks=(8, 8, 8), compression="gzip")
        file["labels"] = np.arange(64)
    loaded = json.loads(legroom("cache", "load", "--json", str(path)))
    assert loaded["entries"][0]["arrays"]["images"]["shape"] == [64, 8, 8]
    with package.open(str(path)) as data:
        assert np.array_equal(data["images"], images)
        seen = []
        for batch in data.batches(16, shuffle=True, seed=7, format="numpy"):
            assert np.array_equal(batch["images"], images[batch["labels"]])
            seen += batch["labels"].tolist()
    assert sorted(seen) == list(range(64))
    legroom("cache", "drop", str(path))


def the_surface() -> None:
    import legroom as package
    from legroom.errors import MissingPackage

    for name in package.__all__:
        try:
            getattr(package, name)
        except MissingPackage as error:
            assert name == "DataLoader" and "pip install torch" in str(error), name
    home = Path(package.__file__).parent
    for needed in ("py.typed", "monitor/web_page/index.html", "monitor/share/dashboard.json"):
        assert (home / needed).is_file(), needed


def no_torch() -> None:
    assert find_spec("torch") is None, "torch is installed"
    assert "torch" not in sys.modules


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="legroom-smoke-") as name:
        folder = Path(name)
        for part in ("shm", "disk"):
            (folder / part).mkdir(0o700)
        os.environ |= {"LEGROOM_SHM": str(folder / "shm"), "LEGROOM_DIR": str(folder / "disk"), "NO_COLOR": "1"}
        no_torch()
        the_surface()
        the_command_line(os.path.abspath(sys.argv[1]), folder)
        a_dataset_through_the_cache(folder)
        no_torch()


if __name__ == "__main__":
    main()
