"""A process that reads damaged files for the fuzz test: a crash of a C library ends it and not pytest.

Started as ``python fuzz_child.py ours`` or ``python fuzz_child.py reference``; each line of stdin names a
sample and a file, each line of stdout says what came of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))

MOST = 16 << 20  # more than this is not read: whoever reserves room refuses it


def digest(array: np.ndarray) -> str:
    native = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("="), copy=False)
    if native.dtype.names:  # what lies between the fields is nobody's data
        content = "".join(name + digest(native[name]) for name in native.dtype.names).encode()
    else:
        content = native.tobytes()
    return hashlib.md5(f"{array.shape}{native.dtype.str}".encode() + content).hexdigest()


def digest_table(table: Any) -> str:
    try:
        content = [(name, str(table[name].type), table[name].to_pylist()) for name in table.column_names]
    except ValueError:  # text that is not UTF-8, fields of one name: handed through, as pyarrow does
        content = ["what Python has no words for"]
    return hashlib.md5(repr((table.num_rows, content)).encode("utf-8", "surrogatepass")).hexdigest()


def ours(path: Path, dtype: str | None) -> dict[str, Any]:
    import pyarrow as pa

    from legroom.errors import LegroomError
    from legroom.formats.base_reader import ArraySpec
    from legroom.formats.detect import open_source

    found: dict[str, str] = {}
    try:
        with open_source(path, dtype=dtype) as reader:
            description = reader.describe()
            json.dumps(dict(description.attributes), allow_nan=False)
            if description.nbytes > MOST:
                return {"kind": "huge"}
            for item in description.items:
                if isinstance(item, ArraySpec):
                    out = np.zeros(item.shape, item.dtype)
                    reader.extent(item.name)
                    reader.read_into(item.name, out)
                    found[item.name] = digest(out)
                else:
                    with tempfile.TemporaryDirectory() as folder:
                        reader.write_table(item.name, Path(folder) / "t")
                        found[item.name] = digest_table(pa.ipc.open_file((Path(folder) / "t").read_bytes()).read_all())
    except LegroomError as problem:
        str(problem), json.dumps(problem.as_dict())
        return {"kind": "error", "code": problem.code, "what": str(problem)}
    except BaseException:
        return {"kind": "other", "trace": traceback.format_exc()}
    return {"kind": "data", "found": found}


def reference(sample: Any, path: Path) -> dict[str, Any]:
    try:
        if sample.table is not None:
            return {"kind": "data", "found": {"table": digest_table(sample.table(path))}}
        return {"kind": "data", "found": {name: digest(array) for name, array in sample.arrays(path).items()}}
    except BaseException as problem:
        return {"kind": "refused", "why": repr(problem)[:300]}


def peak_bytes() -> int:
    """The most memory that this process has had so far; 0 where that cannot be read."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    from fuzz_samples import TINY

    warnings.simplefilter("ignore")
    if sys.platform == "linux":
        import resource

        # A promise of terabytes must fail, not fill the machine.
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    samples = {sample.name: sample for sample in TINY}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints
    for line in sys.stdin:
        name, _, path = line.rstrip("\n").partition("\t")
        sample = samples[name]
        answer = ours(Path(path), sample.dtype) if sys.argv[1] == "ours" else reference(sample, Path(path))
        answers.write(json.dumps({**answer, "peak": peak_bytes()}) + "\n")


if __name__ == "__main__":
    main()
