"""Converts record batches to the format asked for: Arrow, numpy arrays, torch tensors or Python objects.

Nothing is guessed: nulls become NaN where the type has one and are refused where it has none. Texts are numpy object
arrays, or lists with torch. Arrays and tensors own their memory. Images and tokens in a column stay bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from legroom.errors import UnsupportedData
from legroom.formats.base_table_reader import bytes_of_batch
from legroom.formats.file_reads_and_errors import invalid_text
from legroom.messages import phrase, say
from legroom.system.lazy_and_optional_imports import require

Format = Literal["arrow", "numpy", "torch", "python"]

# Copies of a batch while it is returned: the last batch, still held by the consumer, the parts it is joined from,
# the joined one, and the converted one.
COPIES: dict[Format, int] = {"arrow": 3, "numpy": 4, "torch": 4, "python": 4}
_OBJECT = 56  # bytes of a Python number or short string, and its reference


def converter(form: Format) -> Callable[[Any], Any]:
    """The function that converts a record batch to that format."""
    if form == "torch":
        require("torch", "torch", phrase("batches as tensors"))
        return lambda batch: {
            name: _as_tensor(name, _array((name,), batch.column(name))) for name in batch.schema.names
        }
    if form == "numpy":
        return lambda batch: {name: _array((name,), batch.column(name)) for name in batch.schema.names}
    if form == "python":
        return _objects_by_row
    return lambda batch: batch


def object_bytes(batch: Any) -> int:
    """Approximate bytes of a batch as Python objects."""
    return bytes_of_batch(batch) + _OBJECT * sum(_cells(column) for column in batch.columns)


def _cells(column: Any) -> int:
    types = require("pyarrow", "parquet", phrase("Arrow data")).types
    kind = column.type
    if types.is_struct(kind):
        return sum(_cells(child) for child in column.flatten()) + len(column)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _cells(column.flatten()) + len(column)
    return len(column)


def _array(path: tuple[str, ...], column: Any) -> Any:
    """A numpy array; a list of them for rows of differing lengths, a dictionary of them for a struct.

    ``path``: the names of the column, of its field if it is a struct, and so on.
    """
    arrow = require("pyarrow", "parquet", phrase("Arrow data"))
    types, kind = arrow.types, column.type
    if types.is_dictionary(kind):
        return _array(path, column.dictionary_decode())
    if isinstance(kind, arrow.FixedShapeTensorType):
        _require_whole(path, column)
        return _owned(column.to_numpy_ndarray())
    if isinstance(kind, getattr(arrow, "Bool8Type", ())):  # since pyarrow 18; any number but 0 is true
        return _array(path, column.storage) != 0
    if isinstance(kind, arrow.BaseExtensionType):
        return _array(path, column.storage)
    if types.is_struct(kind):
        _require_whole(path, column)
        children = zip(kind, column.flatten(), strict=True)
        return {field.name: _array((*path, field.name), child) for field, child in children}
    if types.is_fixed_size_list(kind):
        _require_whole(path, column)
        return _by_row(_array(path, column.flatten()), len(column), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        _require_whole(path, column)
        return [_array(path, row.values) for row in column]
    # Not of intervals, where Arrow's to_numpy ends the process, and of times, which it refuses by their nanoseconds.
    if types.is_floating(kind) or types.is_timestamp(kind) or types.is_date(kind) or types.is_duration(kind):
        return _owned(column.to_numpy(zero_copy_only=False))
    if types.is_integer(kind) or types.is_boolean(kind):
        _require_whole(path, column)
        return _owned(column.to_numpy(zero_copy_only=False))
    return _objects(_values(".".join(path), column))


def _by_row(inner: Any, rows: int, size: int) -> Any:
    """Values in one sequence as ``size`` of them for each row."""
    if isinstance(inner, dict):
        return {name: _by_row(part, rows, size) for name, part in inner.items()}
    if isinstance(inner, list):
        return [inner[row * size : (row + 1) * size] for row in range(rows)]
    return inner.reshape(rows, size, *inner.shape[1:])


def _objects_by_row(batch: Any) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    except UnicodeDecodeError:
        for name in batch.schema.names:
            _values(name, batch.column(name))  # raises for one of them
        raise


def _values(name: str, column: Any) -> list[Any]:
    """The rows as Python objects. Arrow does not check before whether texts are UTF-8."""
    try:
        values: list[Any] = column.to_pylist()
        return values
    except UnicodeDecodeError as problem:
        what = say("column {name!r} has a text that is not UTF-8", name=name)
        raise invalid_text(what, problem, say("or omit it: columns=[…]")) from problem


def _as_tensor(name: str, value: Any) -> Any:
    """A torch tensor; lists where there is none for the type."""
    import torch

    if isinstance(value, dict):
        return {key: _as_tensor(f"{name}.{key}", part) for key, part in value.items()}
    if isinstance(value, list):
        return [_as_tensor(name, part) for part in value]
    if value.dtype == object:
        return value.tolist()
    try:
        return torch.from_numpy(value)
    except TypeError as problem:
        raise UnsupportedData(
            say("column {name!r} cannot be a tensor", name=name),
            why=say("torch has no dtype for {dtype}", dtype=value.dtype),
            fix=(say("omit it: columns=[…]"), say("or use format='numpy' and convert it yourself")),
        ) from problem


def _owned(array: Any) -> Any:
    """The array on memory of its own, so that it is writable and keeps nothing else alive."""
    return array if array.flags.owndata and array.flags.writeable else array.copy()


def _objects(values: list[Any]) -> Any:
    import numpy as np

    found = np.empty(len(values), object)
    found[:] = values
    return found


def _require_whole(path: tuple[str, ...], column: Any) -> None:
    if column.null_count:
        raise UnsupportedData(
            say("column {name!r} cannot be an array: {nulls} of {rows} rows are null", name=".".join(path),
                nulls=column.null_count, rows=len(column)),
            why=say("{kind} has no value for missing data", kind=column.type),
            fix=(
                say("filter out those rows: filters=pyarrow.compute.field({name}).is_valid()",
                    name=", ".join(map(repr, path))),
                say("or use format='arrow' and fill them yourself"),
            ),
        )  # fmt: skip
