"""Every argument of the Python API with values of wrong types: what is refused is refused in words.

An argument that fails here has no check: its function begins with ``check_arguments`` (system/argument_checks.py).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import legroom
from legroom.errors import BadArgument, LegroomError
from legroom.gpu import search_batch_size
from legroom.loader import legroom_check, legroom_plan
from legroom.loader.dataloader.dataloader import Loader
from legroom.loader.tune import legroom_tune
from legroom.records.gpu_results import BatchFound, Trial

# The value, and the types of annotations that it fits.
VALUES: tuple[tuple[Any, str], ...] = (
    (None, "None"), ("x", "str Literal LoaderKind Uneven Format"), ("", "str"), (b"x", "bytes Where Iterable"), (-1, "int float"),
    (0, "int float bool"), (1.5, "float Amount"), (True, "bool"), (object(), ""), ([], "Iterable Sequence tuple"),
    ({}, "Iterable Sequence tuple Mapping"), (1 << 70, "int float"), (int, "Callable Loss Collate StepFunction"),
)  # fmt: skip
# Arguments that take any value, by function.
ANYTHING = {"is_oom": {"problem"}, "mark": {"text"}}


class _Reached(Exception):
    """The arguments passed, and the work would begin."""


def _reached(*_: object, **__: object) -> None:
    raise _Reached


class Case(NamedTuple):
    call: Callable[..., Any]
    valid: dict[str, Any]
    of: Callable[..., Any] | None = None  # whose signature, if not its own


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Case]]:
    """Calls by public name, with arguments that are valid."""
    monkeypatch.setenv("LEGROOM_DIR", str(tmp_path))
    monkeypatch.setenv("LEGROOM_SHM", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # What takes long.
    for module, name in (
        (legroom_check, "_machine_for_run"), (legroom_check, "_measure"), (legroom_plan, "snapshot"), (legroom_plan, "measure_running_jobs"),
        (legroom_tune, "_measured"), (search_batch_size, "_runner"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, _reached)
    np.save("x.npy", np.arange(100.0))
    np.arange(1000, dtype="uint16").tofile("t.bin")
    save_file({"w": np.zeros(3, np.float32)}, "w.safetensors")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"a": range(100)}), "p.parquet")
    data, tokens = legroom.open("x.npy"), legroom.open("t.bin", dtype="uint16")
    batches, stream, watch = data.batches(8), legroom.stream("p.parquet"), legroom.watch()
    dataset = torch.utils.data.TensorDataset(torch.arange(8))
    loader = legroom.DataLoader(dataset)
    model, sample = torch.nn.Linear(2, 2), torch.zeros(2, 2)
    found = BatchFound(4, 4, 1, 4, 1, 1000, 0.1, (Trial(2, True, 300), Trial(4, True, 500)), 100, 100.0, "x")
    return {
        "open": [Case(legroom.open, {"path": "x.npy"})],
        "Data": [
            Case(data.batches, {"batch_size": 8}),
            Case(tokens.batches, {"batch_size": 8, "sequence_length": 8}),
            Case(lambda **given: data.dataset(*given.pop("names", ()), **given), {}, data.dataset),
            Case(data.ready, {}),
            Case(batches.set_epoch, {"epoch": 0}),
            Case(batches.load_state_dict, {"state": batches.state_dict()}),
        ],
        "DataLoader": [Case(loader.load_state_dict, {"state": loader.state_dict()})],  # and below
        "collate": [Case(legroom.collate, {})],
        "available": [Case(legroom.available, {})],
        "snapshot": [Case(legroom.snapshot, {})],
        "freeze": [Case(legroom.freeze, {"obj": [1]})],
        "freeze_dataset": [Case(legroom.freeze_dataset, {"dataset": dataset})],
        "step": [Case(_step, {}, legroom.step)],
        "stream": [
            Case(legroom.stream, {"paths": "p.parquet"}),
            Case(stream.set_epoch, {"epoch": 0}),
            Case(stream.load_state_dict, {"state": stream.state_dict()}),
        ],
        "watch": [Case(legroom.watch, {}), Case(watch.mark, {"text": "a"}), Case(watch.step, {})],
        "weights": [Case(legroom.weights, {"path": "w.safetensors"})],
        "check": [
            Case(legroom.check, {"batch_size": 2, "sample_bytes": 100}),
            Case(legroom.check, {"batch_size": 2, "dataset": dataset}),
            Case(legroom.check, {"batch_size": 2, "data": "x.npy"}),
            Case(legroom.check, {"batch_size": 2, "sample_bytes": 1, "checkpoint_dir": ".", "checkpoint_bytes": 9}),
        ],
        "plan": [
            Case(legroom.plan, {"batch_size": 2, "sample_bytes": 100, "num_workers": 1}),
            Case(legroom.plan, {"batch_size": 2, "data": "x.npy", "num_workers": 1}),
        ],
        "tune": [Case(legroom.tune, {"dataset": dataset, "batch_size": 2})],
        "account": [Case(legroom.gpu.account, {})],
        "advise": [Case(legroom.gpu.advise, {"model": model, "sample": sample})],
        "estimate": [Case(legroom.gpu.estimate, {"model": model, "sample": sample})],
        "find_batch_size": [Case(legroom.gpu.find_batch_size, {"step": print})],
        "is_oom": [Case(legroom.gpu.is_oom, {"problem": MemoryError()})],
        "limit": [Case(legroom.gpu.limit, {"amount": 0.5}), Case(legroom.gpu.limit, {"share": 0.5})],
        "on_oom": [
            Case(legroom.gpu.on_oom, {"model": model}),
            Case(legroom.gpu.on_oom(model), {"loss_of": print}, _annotated_loss),
        ],
        "plot": [Case(legroom.gpu.plot, {"found": found})],
        "tf32": [Case(legroom.gpu.tf32, {})],
        "LeakWatch": [Case(legroom.leak.watch().page, {"path": "page.html"})],
    }


def _annotated_loss(loss_of: Callable[..., Any]) -> None: ...


def _step(**given: Any) -> None:
    from legroom.system.training_step_listeners import listen, stop_listening

    listen(_listener)  # without one nothing is done with the argument
    try:
        legroom.step(**given)
    finally:
        stop_listening(_listener)


def _listener(source: str, count: int) -> None: ...


def _wrong(name: str, case: Case) -> Iterator[str]:
    """Arguments that fail in another way than by an error in words, or that are accepted against their annotation."""
    function = getattr(case.of or case.call, "__name__", name)
    for parameter in inspect.signature(case.of or case.call).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        annotation = str(parameter.annotation)
        types = set(re.findall(r"[A-Za-z0-9_]+", annotation))
        assert parameter.annotation is not inspect.Parameter.empty, (name, parameter.name)
        for value, fits in VALUES:
            given = [value] if parameter.kind is inspect.Parameter.VAR_POSITIONAL else value
            call = f"{name}: {function}({parameter.name}={value!r})"
            try:
                case.call(**case.valid | {parameter.name: given})
            except LegroomError as problem:
                assert problem.__context__ is None or problem.__suppress_context__ or problem.__cause__, call
                continue
            except _Reached:
                pass
            except Exception as problem:
                yield f"{call} fails with {type(problem).__name__}: {problem}"
                continue
            if (
                "Any" not in types
                and not types & set(fits.split())
                and parameter.name not in ANYTHING.get(function, ())
            ):
                yield f"{call} is accepted, but is not {annotation}"


def test_every_argument_is_checked(cases: dict[str, list[Case]]) -> None:
    wrong = [line for name, several in cases.items() for case in several for line in _wrong(name, case)]
    assert not wrong, "\n".join(wrong)


def test_every_public_name_is_walked(cases: dict[str, list[Case]]) -> None:
    records = {"LegroomError", "Machine", "__version__", "gpu", "leak"}
    public = {*legroom.__all__, *legroom.gpu.__all__, *legroom.leak.__all__}
    assert public - records == set(cases)


def test_components_of_a_watch() -> None:
    wrong: tuple[Any, ...] = ("x", -1, 1.5, True, [])
    for value in wrong:
        with pytest.raises(LegroomError, match="must be an integer"):
            legroom.watch().component(model=value)


TORCHS = ("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 1])
def test_the_dataloader_fails_as_torchs_does(workers: int) -> None:
    own = set(inspect.signature(Loader.__init__).parameters) - {"self", "options", "dataset"}
    not_torchs = {"memory_budget", "share", "on_slow", "device"}
    dataset = torch.utils.data.TensorDataset(torch.arange(8))
    for name in sorted(own | set(TORCHS)):
        for value, _ in VALUES:
            given = {"num_workers": workers, name: value}
            refused = name in not_torchs or _refusal(torch.utils.data.DataLoader, dataset, given)
            ours = _refusal(legroom.DataLoader, dataset, given)
            assert ours is None or isinstance(ours, LegroomError), (given, ours)
            if isinstance(refused, Exception):
                assert isinstance(ours, type(refused)), (given, ours)
                if isinstance(refused, ValueError):
                    assert isinstance(ours, BadArgument) and ours.what == str(refused) and ours.why and ours.fix


def _refusal(kind: Any, dataset: Any, given: dict[str, Any]) -> Exception | None:
    try:
        kind(dataset, **given)
    except Exception as problem:
        return problem
    return None


class _WithoutLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_without_a_length(workers: int) -> None:
    dataset: Any = _WithoutLength()
    for shuffle in (False, True):
        with pytest.raises(TypeError, match="no len") as caught:
            list(legroom.DataLoader(dataset, num_workers=workers, shuffle=shuffle))
        assert isinstance(caught.value, LegroomError) and caught.value.fix
    assert len(list(legroom.DataLoader(dataset, sampler=range(3), num_workers=0))) == 3
    assert len(list(legroom.DataLoader(dataset, batch_sampler=[[1], [2]], num_workers=0))) == 2
