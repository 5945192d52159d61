"""Values of every type that legroom.freeze keeps, and a comparison type by type."""

from __future__ import annotations

from pathlib import PosixPath, PurePosixPath
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same types all the way down, and equal parts in the same order; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.flags.fnc == other.flags.fnc
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, np.generic):
        if isinstance(one, np.longdouble):
            return bool(one == other)  # six of its sixteen bytes mean nothing
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    if isinstance(one, (set, frozenset)):
        return one == other and sorted(map(repr, one)) == sorted(map(repr, other))
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)  # tells -0.0 from 0.0, and NaN is itself
    return bool(one == other)


_SCALAR_TYPES = [np.bool_, np.int8, np.uint16, np.int64, np.uint64, np.float16, np.float32, np.float64, np.complex64]
numpy_scalars = st.one_of(
    [hnp.from_dtype(np.dtype(kind)) for kind in _SCALAR_TYPES]
    + [
        st.just(np.datetime64("2026-11-17T10:00", "ns")),
        st.just(np.timedelta64(5, "h")),
        st.just(np.str_("né")),
        st.just(np.bytes_(b"a")),
        st.just(np.longdouble(1.5)),
    ]
)
numpy_arrays = st.one_of(
    hnp.arrays(
        st.sampled_from(["<i4", ">i4", "<f8", ">f2", "|b1", "<c8", "<U3", "|S4", "<M8[us]", "|u1"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    ),
    st.just(np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i2"), ("b", ">f4", (2,))])),
    st.just(np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    st.just(np.arange(10)[::2]),
)
texts = st.text(st.characters(exclude_categories=()), max_size=8)  # with surrogates
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**70), 2**70), st.floats(), texts, st.binary(max_size=8)
)
keys = st.one_of(
    texts,
    st.integers(-(2**66), 2**66),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.binary(max_size=4),
    st.tuples(st.integers(), texts),
    st.builds(PosixPath, st.sampled_from(["a/b", "/x"])),
)
others = st.one_of(
    st.complex_numbers(),
    st.binary(max_size=5).map(bytearray),
    st.sets(st.integers() | texts, max_size=4),
    st.frozensets(st.tuples(st.integers(), st.booleans()), max_size=4),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
    st.builds(PurePosixPath, st.sampled_from(["a/b", "/x", "."])),
    numpy_scalars,
    numpy_arrays,
)
values = st.recursive(
    scalars | others,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)
