"""numpy dtypes as they may be shared: native byte order, no metadata, no objects.

Covers: turning a file's dtype into the one its array has in memory. Does not cover: types that numpy has no
word for; each format names those itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

DType = np.dtype[Any]


def in_memory(dtype: DType) -> DType:
    """The same values in native byte order; offsets and padding of records are kept, metadata is not.

    Metadata would be lost, with a warning, by anyone who saves the array.
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.dtype((in_memory(base), shape))
    if dtype.names is None or dtype.fields is None:
        return (
            np.dtype(dtype.newbyteorder("=").str)
            if dtype.kind != "V"
            else np.dtype((np.void, dtype.itemsize))
        )
    fields = [dtype.fields[name] for name in dtype.names]
    return np.dtype(
        {
            "names": list(dtype.names),
            "formats": [in_memory(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "itemsize": dtype.itemsize,
        }
    )
