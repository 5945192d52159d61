"""Frozen values come back type by type, or are refused with their path."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import gc
import math
import tracemalloc
import uuid
import warnings
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import ormsgpack
import pytest
from frozen_values import keys, same, values
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.cache.freeze import freeze
from legroom.errors import UnsupportedData


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGROOM_DISABLE", "1")  # the encoding is the same without a store


@settings(max_examples=150)
@given(st.lists(values, max_size=5))
def test_a_list_comes_back_type_by_type(items: list[Any]) -> None:
    view = freeze(items)
    assert len(view) == len(items)
    assert all(map(same, view, items))
    assert all(same(view[index - len(items)], items[index]) for index in range(len(items)))


@settings(max_examples=100)
@given(st.dictionaries(keys, values, max_size=6))
def test_a_dict_comes_back_type_by_type_in_order_and_is_found_by_key(items: dict[Any, Any]) -> None:
    view = freeze(items)
    assert same(list(view), list(items)) and same(list(view.values()), list(items.values()))
    assert same(list(view.items()), list(items.items()))
    for key, value in items.items():
        assert key in view and same(view[key], value)


@pytest.mark.parametrize(
    "item",
    [
        [np.zeros((3000, 1)), np.zeros((1, 3000))],  # added up: 72 MB
        {"a": [np.float32(1), range(10**7)]},  # as an array: 80 MB
        [1.5, np.ones(3), [2, 3] * 10],
        [float("inf"), -float("inf"), 10**400, True],
        [np.float16(6e4), np.float16(6e4)],
    ],
    ids=["arrays", "range", "lists", "infinite", "overflow"],
)
def test_values_are_never_added_to_each_other(item: Any, recwarn: pytest.WarningsRecorder) -> None:
    """What numpy makes of a sum can be as large as the product of its parts, and may warn."""
    gc.collect()  # what earlier tests left open warns when it is collected
    recwarn.clear()
    warnings.simplefilter("always")
    tracemalloc.start()
    try:
        view = freeze([item])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert same(view[0], item) and not recwarn.list
    assert peak < 5e6


class Text(str):
    pass


class Whole(int):
    pass


class Real(float):
    pass


class Raw(bytes):
    pass


class Items(list):  # type: ignore[type-arg]
    pass


class Level(enum.IntEnum):
    LOW = 1


class Colour(enum.Enum):
    RED = 1


class Word(enum.StrEnum):
    A = "a"


class Keeps(np.ndarray):  # type: ignore[type-arg]
    pass


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Box:
    x: int = 1


REFUSED = [
    Text("a"), Whole(1), Real(1.0), Raw(b"a"), Items([1]), Level.LOW, Colour.RED, Word.A, Point(1, 2), Box(), object(),
    collections.OrderedDict(a=1), collections.defaultdict(int, a=1), collections.Counter("a"), collections.deque([1]),
    datetime.datetime(2026, 1, 1), datetime.date(2026, 1, 1), uuid.UUID(int=1), decimal.Decimal(1), memoryview(b"a"),
    array("d", [1.0]), SimpleNamespace(a=1), len, int, ..., NotImplemented, iter([1]), np.array([object()]),
    np.zeros(2).view(Keeps), np.ma.masked_array([1, 2]), np.zeros(2, [("a", "i4")])[0], np.str_("a\0"), np.dtype("i4"), ormsgpack.Ext(1, b"\x90"),
    np.zeros(1, np.dtype({"names": ["a"], "formats": ["i4"], "titles": ["A"]})),
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("wrap", ["item", "deep", "tuple", "value", "set"])
def test_other_types_and_subclasses_are_refused_with_their_path(value: Any, wrap: str) -> None:
    if wrap == "set":
        try:
            hash(value)
        except TypeError:
            return
        if value != value or (isinstance(value, np.ndarray)):
            return
    obj, path = {
        "item": (lambda: ([1, value], "annotations[1]")),
        "deep": (lambda: ([{"a": [0, value]}], "annotations[0]['a'][1]")),
        "tuple": (lambda: ([("x", (1, value))], "annotations[0][1][1]")),
        "value": (lambda: ({"k": 1, 7: {"mask": value}}, "annotations[7]['mask']")),
        "set": (lambda: ([{value}], "annotations[0] (member)")),
    }[wrap]()
    with pytest.raises(UnsupportedData) as caught:
        freeze(obj, name="annotations")
    assert f"cannot freeze {path}: " in str(caught.value)


@pytest.mark.parametrize("key", [Text("a"), Whole(1), Level.LOW, Word.A, Point(1, 2), datetime.date(2026, 1, 1),
                                 uuid.UUID(int=1), np.int64(1), np.str_("a"), math.nan, (1, math.nan), Colour.RED])  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_keys_that_would_change_are_refused(key: Any, nested: bool) -> None:
    if nested and isinstance(key, np.generic):
        view = freeze([{key: 1}])  # inside an item a numpy scalar is a key as any value
        assert same(view[0], {key: 1})
        return
    with pytest.raises(UnsupportedData, match="cannot freeze object"):
        freeze([{key: 1}] if nested else {key: 1})


def test_a_pil_image_is_named_in_words() -> None:
    image_type = type("Image", (), {"__module__": "PIL.Image"})
    with pytest.raises(UnsupportedData, match=r"cannot freeze annotations\[17\]\['mask'\]: a PIL image"):
        freeze([*({"mask": None} for _ in range(17)), {"mask": image_type()}], name="annotations")


def test_a_tensor_is_refused_with_a_way_out() -> None:
    tensor_type = type("Tensor", (), {"__module__": "torch"})
    with pytest.raises(UnsupportedData, match="a torch tensor; use its"):
        freeze([tensor_type()])


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    ring: dict[str, Any] = {}
    ring["me"] = [ring]
    pair: list[Any] = []
    pair.append((pair,))
    for obj in ([loop], ring, pair, [{1: loop}]):
        with pytest.raises(UnsupportedData, match="contains itself"):
            freeze(obj)


@pytest.mark.parametrize("wrap", [lambda one: [one], lambda one: (one,), lambda one: {"a": one}, lambda one: {1: one}])
def test_depth_up_to_the_limit(wrap: Any) -> None:
    deep: Any = "end"
    for _ in range(100):
        deep = wrap(deep)
    assert freeze([deep])[0] == deep
    refused = 0
    for _ in range(400):
        deep = wrap(deep)
        try:
            view = freeze([deep])
        except UnsupportedData as problem:
            assert "nested more than 100" in str(problem)
            refused += 1
        else:
            assert view[0] == deep  # deeper is taken or refused, and what is taken can be read
    assert refused


def test_bytes_like_values_keep_their_types_wherever_they_are() -> None:
    items = [
        [1.0, 2.0, bytearray(b"x")],
        [b"x"],
        [bytearray(300)],
        ({"a": bytearray(70_000)},),
        [[1, 2], bytearray()],
        {"a": ({"b": bytearray(b"y")},)},
        [3, b"z"],
    ]
    assert all(map(same, freeze(items), items))


def test_a_shared_reference_comes_back_as_equal_values() -> None:
    one = [1, 2]
    first, second = freeze([(one, one)])[0]
    assert first == second == one and first is not second


def test_items_are_new_objects_on_each_access() -> None:
    view = freeze([{"a": [1]}, np.zeros(3)])
    view[0]["a"].append(2)
    view[1][0] = 5
    assert view[0] == {"a": [1]} and view[1][0] == 0


def test_keys_that_are_equal_to_a_stored_one_find_it() -> None:
    plain = {1: "a", 2.5: "b", (1, 2): "c", b"d": "d", 2**70: "e", 10**5000: "f", -3: "g", 0.1: "h", (0.5, "i"): "i"}
    frozen = freeze(plain)
    equal = [
        decimal.Decimal(1), decimal.Decimal("2.5"), fractions.Fraction(5, 2), 1 + 0j, (decimal.Decimal(1), 2),
        (1.0, 2 + 0j), memoryview(b"d"), decimal.Decimal(2**70), fractions.Fraction(2**70), 10**5000, decimal.Decimal(-3),
        np.complex64(2.5), np.complex128(1), np.float16(2.5), (fractions.Fraction(1, 2), "i"), fractions.Fraction(0.1),
    ]  # fmt: skip
    different = [
        decimal.Decimal("0.1"), fractions.Fraction(1, 10), 1 + 1j, decimal.Decimal("Infinity"), decimal.Decimal("1e400"),
        decimal.Decimal(2**70 + 1), decimal.Decimal("NaN"), complex("nan"), 10**5000 + 1, fractions.Fraction(1, 3),
    ]  # fmt: skip
    assert all(key in plain for key in equal) and not any(key in plain for key in different)
    for key in (*equal, *different):
        assert (frozen.get(key), key in frozen) == (plain.get(key), key in plain), key
