"""What arrives from a worker against what arrives with torch's loader: values, types, strides, writability, aliasing."""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import legroom

torch = pytest.importorskip("torch")
from legroom.loader.dataloader.collate import to_send  # noqa: E402
from legroom.loader.dataloader.memory_slots import SlotPool  # noqa: E402
from legroom.loader.dataloader.receive import _workers, forget_with, receive  # noqa: E402
from legroom.loader.dataloader.send import SlotWriter  # noqa: E402

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings(
        "ignore:This DataLoader will create", "ignore:.*multi-threaded, use of fork", "ignore:TypedStorage is deprec",
        "ignore:Sparse", "ignore:.*quantiz", "ignore:The PyTorch API of nested tensors",
    ),
]  # fmt: skip


class Owner:
    """In place of torch's iterator, with which the slots of its workers are dropped."""


@pytest.fixture(scope="module", autouse=True)
def _no_slots_left() -> Iterator[None]:
    """This process is the worker of some tests here: without a loader its slots would stay mapped for later files."""
    yield
    gc.collect()
    forget_with(Owner(), list(_workers))


def numbers(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.arange(int(np.prod(shape)), dtype=torch.float64).reshape(shape).to(dtype)


class Own(torch.Tensor):
    pass


class Measured(np.ndarray):  # type: ignore[type-arg]
    def __array_finalize__(self, source: Any) -> None:
        self.unit = getattr(source, "unit", "m")


Pair = collections.namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class Record:
    x: Any
    name: str


def frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


def from_one_array() -> Any:
    array = np.arange(500.0)
    return [torch.from_numpy(array), torch.from_numpy(array), array]


def collated_and_numpy() -> Any:
    batch = torch.utils.data.default_collate([torch.ones(500), torch.zeros(500)])
    return [batch, batch.numpy(), torch.from_numpy(batch.numpy()), batch[0]]


def one_storage() -> Any:
    base = numbers(40, 50)
    return [base, base.T, base[3:7], base[:, 1:], base[:, :-1], base.view(-1)[::2], base.view(torch.int32)]


TENSORS: dict[str, Callable[[], Any]] = {
    **{f"{dtype}": lambda dtype=dtype: numbers(30, 40, dtype=dtype) for dtype in (
        torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64,
        torch.float8_e5m2, torch.uint32,
    )},
    "scalar": lambda: torch.tensor(3.5),
    "expanded": lambda: numbers(1000).expand(600, 1000),
    "expanded in the middle": lambda: numbers(3, 1, 40).expand(3, 50, 40),
    "expanded scalar": lambda: torch.tensor(1.0).expand(64, 1000),
    "channels last": lambda: numbers(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "transposed": lambda: numbers(30, 40).T,
    "permuted": lambda: numbers(4, 5, 6, 7).permute(2, 0, 3, 1),
    "windows that overlap": lambda: numbers(1000).unfold(0, 100, 10),
    "as_strided": lambda: numbers(1000).as_strided((50, 20), (3, 2), 7),
    "every second": lambda: numbers(40, 50)[:, ::2],
    "without the last": lambda: numbers(40, 50)[:, :-1],
    "a row of a large storage": lambda: numbers(3000, 1000)[17],
    "rows of a large storage": lambda: numbers(3000, 1000)[17:19],
    "inputs and targets": lambda: (lambda t: [t[:, :-1], t[:, 1:]])(numbers(40, 50)),
    "views of one storage": one_storage,
    "chunks": lambda: list(numbers(40, 50).chunk(4)),
    "bytes and doubles": lambda: (lambda t: [t[1:4000], t[8:4008].view(torch.float64)])(torch.zeros(4096, dtype=torch.uint8)),
    "the same twice": lambda: (lambda t: {"a": t, "b": [t]})(numbers(600)),
    "of one array": from_one_array,
    "collated, and as an array": collated_and_numpy,
    "empty": lambda: torch.empty(0, 700),
    "empty slice": lambda: numbers(40, 50)[:, 3:3],
    "empty, odd strides": lambda: torch.empty_strided((0, 5, 7), (1, 9, 2)),
    "sizes of one": lambda: numbers(600).view(1, 600, 1),
    "requires grad": lambda: numbers(600).requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(numbers(30, 20)),
    "subclass": lambda: numbers(600).as_subclass(Own),
    "conjugate": lambda: torch.complex(numbers(600), numbers(600)).conj(),
    "negative": lambda: torch.complex(numbers(600), numbers(600)).conj().imag,
    "sparse": lambda: numbers(30, 20).to_sparse(),
    "sparse rows": lambda: numbers(30, 20).to_sparse_csr(),
    "meta": lambda: torch.empty(30, 20, device="meta"),
    "expanded meta": lambda: torch.empty(30, 1, device="meta").expand(30, 20),
    "storage": lambda: numbers(600).untyped_storage(),
    "size, dtype, device": lambda: [torch.Size([2, 3]), torch.float16, torch.device("cpu"), torch.strided],
}  # fmt: skip

# As torch sends them but for their strides: they fill less than half of the memory that they span.
COMPACT: dict[str, Callable[[], Any]] = {
    "features and labels": lambda: (lambda t: [t[:, :-1], t[:, -1]])(numbers(40, 3)),
    "a column": lambda: numbers(400, 50)[:, 3],
    "columns": lambda: numbers(400, 50)[:, 3:6],
    "every third": lambda: numbers(900, 3)[::3],
    "expanded column": lambda: numbers(400, 50)[:, 3:4].expand(400, 70),
    "a diagonal": lambda: numbers(300, 300).diagonal(),
}

ARRAYS: dict[str, Callable[[], Any]] = {
    name: make
    for size in (1, 100)
    for name, make in {
        f"plain × {size}": lambda size=size: np.arange(5.0 * size),
        f"read-only × {size}": lambda size=size: frozen(np.arange(5 * size)),
        f"big-endian × {size}": lambda size=size: np.arange(5 * size).astype(">i4"),
        f"big-endian times × {size}": lambda size=size: np.arange(5 * size).astype(">M8[s]"),
        f"big-endian text × {size}": lambda size=size: np.array(["abc", "d"] * size).astype(">U3"),
        f"big-endian, read-only, transposed × {size}": lambda size=size: frozen(
            np.arange(6 * size).reshape(3, -1).astype(">f8")
        ).T,
        f"structured × {size}": lambda size=size: np.zeros(5 * size, [("a", "<i4"), ("b", "<f8", (2,))]),
        f"structured, big-endian × {size}": lambda size=size: np.ones(5 * size, [("a", ">i4"), ("b", "<f8")]),
        f"structured, aligned × {size}": lambda size=size: np.ones(5 * size, np.dtype("i1, f8", align=True)),
        f"structured with objects × {size}": lambda size=size: np.array([(1, "x")] * 3 * size, "i4, O"),
        f"times × {size}": lambda size=size: np.arange(5 * size).astype("M8[ms]"),
        f"spans of time × {size}": lambda size=size: np.arange(5 * size).astype("m8[D]"),
        f"objects × {size}": lambda size=size: np.array([None, "a", 3.0] * size, object),
        f"text × {size}": lambda size=size: np.array(["abc", "d"] * size),
        f"bytes × {size}": lambda size=size: np.array([b"abc", b"d"] * size),
        f"void × {size}": lambda size=size: np.zeros(5 * size, "V7"),
        f"long double × {size}": lambda size=size: np.arange(5 * size).astype("g"),
        f"half × {size}": lambda size=size: np.arange(5 * size).astype("e"),
        f"complex × {size}": lambda size=size: np.arange(5 * size) * 1j,
        f"bool × {size}": lambda size=size: np.arange(50 * size) % 2 == 0,
        f"no dimension × {size}": lambda size=size: np.array(5.0 * size),
        f"a large element × {size}": lambda size=size: np.array("x" * size),
        f"fortran × {size}": lambda size=size: np.asfortranarray(np.arange(6.0 * size).reshape(2, -1)),
        f"fortran, read-only × {size}": lambda size=size: frozen(np.arange(6.0 * size).reshape(2, -1).T),
        f"reversed × {size}": lambda size=size: np.arange(5 * size)[::-1],
        f"every second × {size}": lambda size=size: np.arange(10 * size)[::2],
        f"permuted × {size}": lambda size=size: np.arange(24 * size).reshape(2, 3, 4, -1).transpose(2, 0, 3, 1),
        f"broadcast × {size}": lambda size=size: np.broadcast_to(np.arange(5 * size), (4, 5 * size)),
        f"empty × {size}": lambda size=size: np.empty((0, size)),
        f"column × {size}": lambda size=size: np.ones((10 * size, 1), order="F"),
        f"masked × {size}": lambda size=size: np.ma.masked_array(np.arange(9 * size), np.arange(9 * size) % 2),
        f"matrix × {size}": lambda size=size: np.asmatrix(np.ones((3, 5 * size))),
        f"record × {size}": lambda size=size: np.rec.array(np.ones(5 * size, [("a", ">i4"), ("b", "f8")])),
        f"subclass × {size}": lambda size=size: np.arange(5.0 * size).view(Measured),
        f"metadata × {size}": lambda size=size: np.zeros(5 * size, np.dtype("i4", metadata={"unit": "m"})),
        f"unaligned × {size}": lambda size=size: np.zeros(80 * size + 1, np.uint8)[1:].view("f8"),
        f"views of one × {size}": lambda size=size: (lambda a: [a, a[1:], a.T, a])(np.arange(9.0 * size).reshape(3, -1)),
    }.items()
}  # fmt: skip
if hasattr(np, "dtypes") and hasattr(np.dtypes, "StringDType"):
    ARRAYS["strings of any length"] = lambda: np.array(["abc", "d" * 99] * 100, np.dtypes.StringDType())

OTHERS: dict[str, Callable[[], Any]] = {
    "containers": lambda: {"p": Pair(numbers(600), [np.arange(600), (1, "x")]), 3: {4, 5}, "n": None},
    "ordered": lambda: collections.OrderedDict(b=numbers(600), a=numbers(3)),
    "default": lambda: collections.defaultdict(list, a=[numbers(600)]),
    "deque": lambda: collections.deque([numbers(600)], 3),
    "dataclass": lambda: Record(numbers(600), "x"),
    "numpy scalars": lambda: [np.float32(3), np.int64(4), np.datetime64("2020-01-01"), np.str_("x"), np.bool_(True)],
    "bytes": lambda: [bytes(5000), bytearray(5000), bytearray(3), range(5), 1j, slice(1, 2), Ellipsis],
    "a structure in itself": lambda: (lambda x: [x, x])([numbers(600), np.arange(600)]),
    "nothing": lambda: None,
}  # fmt: skip
ALL = TENSORS | COMPACT | ARRAYS | OTHERS


def build(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return name, ALL[name]()


class Names(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    def __len__(self) -> int:
        return len(ALL)

    def __getitem__(self, index: int) -> str:
        return list(ALL)[index]


def leaves(batch: Any) -> Iterator[Any]:
    """Every tensor and array of a batch, in order."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        yield batch
    elif isinstance(batch, dict):
        yield from itertools.chain(*map(leaves, batch.values()))
    elif isinstance(batch, (list, tuple, collections.deque)):
        yield from itertools.chain(*map(leaves, batch))


def shown(part: Any, compact: bool) -> Any:
    """A part as something that can be compared, with all that a program can see of it."""
    if isinstance(part, torch.Tensor):
        seen = [type(part), part.dtype, part.shape, part.layout, part.device, part.requires_grad, part.is_leaf]
        if part.layout is not torch.strided:
            return [*seen, part.detach().to_dense().tolist()]
        seen += [part.is_conj(), part.is_neg(), None if compact else part.stride()]
        return seen if part.is_meta else [*seen, str(part.detach().resolve_conj().resolve_neg().tolist())]
    if isinstance(part, np.ma.MaskedArray):
        return [type(part), shown(part.data, compact), shown(np.ma.getmaskarray(part), compact), part.fill_value]
    if isinstance(part, np.ndarray):
        flags = part.flags
        layout = [flags.writeable, flags.c_contiguous, flags.f_contiguous, flags.aligned, part.strides]
        return [type(part), part.dtype, str(part.dtype), part.dtype.metadata, part.shape, layout, vars(part) if
                isinstance(part, Measured) else None, str(part.tolist())]  # fmt: skip
    if isinstance(part, torch.UntypedStorage):
        return [type(part), part.nbytes(), bytes(part)]
    if isinstance(part, dict):
        return [type(part), [(key, shown(value, compact)) for key, value in part.items()]]
    if isinstance(part, (list, tuple, collections.deque)):
        return [type(part), [shown(value, compact) for value in part]]
    if isinstance(part, Record):
        return [type(part), shown(vars(part), compact)]
    return [type(part), part]


def memory(leaf: Any) -> Any:
    """The bytes of a leaf as an array that shares them, or None."""
    if isinstance(leaf, np.ndarray):
        return leaf
    plain = leaf.layout is torch.strided and leaf.device.type == "cpu" and not leaf.is_neg() and not leaf.is_conj()
    if not plain or not leaf.numel() or leaf.untyped_storage().nbytes() % leaf.element_size():
        return None
    return leaf.detach().view(torch.uint8).numpy() if leaf.dim() and leaf.stride(-1) == 1 else None


def shared(batch: Any) -> list[bool]:
    """Which pairs of leaves lie in the same memory."""
    found = [memory(leaf) for leaf in leaves(batch)]
    return [
        a is not None
        and b is not None
        and bool(np.shares_memory(a, b, max_work=10**6) if a.dtype != object else a is b)
        for a, b in itertools.combinations(found, 2)
    ]


@pytest.fixture(scope="module", params=["fork", "spawn"])
def arrived(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    given = []
    for kind in (legroom.DataLoader, torch.utils.data.DataLoader):
        loader = kind(Names(), None, num_workers=1, collate_fn=build, multiprocessing_context=request.param)
        given.append(dict(loader))  # all are kept: the first lie in slots, the others in ordinary memory
    return given[0], given[1]


@pytest.mark.parametrize("name", [*ALL])
def test_what_arrives_is_what_torch_delivers(name: str, arrived: tuple[dict[str, Any], dict[str, Any]]) -> None:
    ours, theirs = arrived[0][name], arrived[1][name]
    assert shown(ours, name in COMPACT) == shown(theirs, name in COMPACT)
    assert shared(ours) == shared(theirs)
    if name in COMPACT:
        assert [*leaves(ours)][-1].untyped_storage().nbytes() <= [*leaves(theirs)][-1].untyped_storage().nbytes() // 2


@pytest.mark.parametrize("name", [*ALL])
def test_on_a_slot_as_well(name: str, arrived: tuple[dict[str, Any], dict[str, Any]]) -> None:
    theirs, pool = arrived[1][name], SlotPool(None, 1)
    sent = to_send(build(name)[1], SlotWriter(None), pool, None)
    ours = receive(*sent._arguments)
    assert shown(ours, name in COMPACT) == shown(theirs, name in COMPACT)
    assert shared(ours) == shared(theirs)


def views(storage: Any) -> Any:
    """Any views of a storage of 400 numbers."""

    def one(drawn: tuple[list[int], list[int], int]) -> Any:
        sizes, steps, first = drawn
        steps = steps[: len(sizes)]
        while first + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) >= 400:
            sizes = [max(1, size // 2) for size in sizes]
            first //= 2
        return storage.as_strided(sizes, steps, first)

    size, step = st.integers(1, 12), st.integers(0, 40)
    return st.tuples(
        st.lists(size, min_size=0, max_size=3), st.lists(step, min_size=3, max_size=3), st.integers(0, 399)
    ).map(one)


STORAGES = [numbers(400), numbers(400, dtype=torch.int64)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(*map(views, STORAGES)), min_size=1, max_size=5), st.booleans())
def test_any_views_of_one_storage(batch: list[Any], keep: bool) -> None:
    pool = SlotPool(None, 1)
    held = [receive(*to_send(numbers(900), SlotWriter(None), pool, None)._arguments) for _ in range(2 * keep)]
    sent = to_send(batch, SlotWriter(None), pool, None)
    assert pool.expected <= sum(-(-one.nbytes // 64) * 64 for one in STORAGES) + 128 * len(batch)
    got = receive(*sent._arguments)
    for source, one in zip(batch, got, strict=True):
        assert torch.equal(source, one) and source.dtype is one.dtype
    loose = {
        number for number, source in enumerate(batch) if source.stride() != got[number].stride() and source.numel() > 1
    }
    for number, one in enumerate(got):
        assert one.untyped_storage().nbytes() <= STORAGES[one.dtype is torch.int64].nbytes
        if number in loose:
            continue
        first = one.view(-1)[:1] if one.is_contiguous() else one.as_strided((1,), (1,))
        before = first.clone()
        first.add_(1)
        changed = [int((a != b).sum()) for a, b in zip(batch, got, strict=True)]
        address = batch[number].data_ptr()
        for other, source in enumerate(batch):
            if other not in loose:
                same_storage = source.dtype is batch[number].dtype
                assert (changed[other] > 0) == (same_storage and address in _addresses(source))
        first.copy_(before)
    del held


def _addresses(tensor: Any) -> set[int]:
    steps = itertools.product(*(range(size) for size in tensor.shape))
    return {
        tensor.data_ptr() + tensor.element_size() * sum(i * s for i, s in zip(at, tensor.stride(), strict=True))
        for at in steps
    }


def on_meta(worker: int) -> None:
    torch.set_default_device("meta")


class OnTheCpu(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    """Samples that name their device, and some that are put together by a constructor."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        number = torch.full((300,), float(index), device="cpu")
        grad = torch.full((70,), 1.0, device="cpu")
        return {"tensor": number, "empty": torch.empty(0, 3, device="cpu"), "array": np.full(300, index), "int": index,
                "float": index / 2, "small": grad[:2]}  # fmt: skip


def odd(samples: list[Any]) -> Any:
    batch = torch.utils.data.default_collate(samples)
    tensor = batch["tensor"]
    return [
        batch,
        tensor.clone().requires_grad_(),
        tensor[:1].expand(9, 300),
        tensor[:, 3],
        tensor.numpy(),
        tensor[:, :0],
    ]


@pytest.mark.parametrize("where", ["in the workers", "in this process"])
@pytest.mark.parametrize("fn", [None, odd], ids=["default", "odd"])
def test_a_default_device_changes_nothing_that_torch_keeps(where: str, fn: Any) -> None:
    given = []
    init = on_meta if where == "in the workers" else None
    for kind in (legroom.DataLoader, torch.utils.data.DataLoader):
        loader = kind(OnTheCpu(), 4, num_workers=1, collate_fn=fn, worker_init_fn=init, multiprocessing_context="fork")
        iterator = iter(loader)
        if init is None:
            torch.set_default_device("meta")
        try:
            given.append([shown(batch, compact=True) for batch in list(iterator)])
        finally:
            torch.set_default_device(None)
    assert given[0] == given[1]
