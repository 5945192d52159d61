"""The bytes of a batch, from a data file's description: no data are read.

Covers: bytes a row of every array and table that has rows. Does not cover: what a transform makes of a row (uint8
images that become float32 take four times as much), padding of ragged rows to the longest; a batch drawn for
real (loader) tells those.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from legroom.budget.demand import Batch
from legroom.errors import UnsupportedData
from legroom.system.argument_checks import check_integer
from legroom.words import say


@dataclass(frozen=True, slots=True)
class DataRows:
    """A data file as a loader sees it."""

    path: str
    rows: int
    tensors: tuple[Fraction, ...]  # bytes of one row of each
    nbytes: int  # of everything in it
    uneven: bool  # some rows are ragged or text: their average is all that is known
    left_out: tuple[str, ...] = ()  # arrays that have no rows

    def batch(self, samples: int) -> Batch:
        """A batch of so many rows."""
        samples = check_integer("batch_size", samples, 1)
        name = os.path.basename(self.path)
        source = (
            say("{samples} average rows of {path}", samples=samples, path=name)
            if self.uneven
            else say("{samples} rows of {path} as they lie there", samples=samples, path=name)
        )
        return Batch(tuple(ceil(each * samples) for each in self.tensors), samples, source, self.rows)


def data_rows(path: str | os.PathLike[str], keys: str | Iterable[str] | None = None) -> DataRows:
    """What a loader over that file would batch."""
    from legroom.formats.detect import open_source
    from legroom.formats.protocol import ArraySpec

    with open_source(path, keys) as reader:
        description = reader.describe()
    arrays = [item for item in description.items if isinstance(item, ArraySpec)]
    tables = [item for item in description.items if not isinstance(item, ArraySpec)]
    # Offsets have one more row than there are rows: of a ragged pair the values carry the bytes.
    ragged = {
        item.ragged: item.shape[0] - 1 for item in arrays if item.ragged and item.name.endswith("/offsets")
    }
    counts = Counter([item.shape[0] for item in arrays if item.shape and not item.ragged])
    counts.update(ragged.values())
    counts.update(table.rows for table in tables)
    rows = max(counts, key=lambda count: (counts[count], count), default=0)
    if rows < 1:
        raise UnsupportedData(
            say("{path} has no rows to make batches of", path=path),
            why=say("none of its {count} arrays has a first axis", count=len(description.items)),
            fix=(say("give the bytes of a sample instead"),),
        )
    tensors: list[Fraction] = []
    left_out: list[str] = []
    for item in arrays:
        if item.ragged:
            if item.name.endswith("/values") and ragged.get(item.ragged) == rows:
                tensors.append(Fraction(item.nbytes, rows))
        elif item.shape and item.shape[0] == rows:
            tensors.append(Fraction(item.nbytes, rows))
        else:
            left_out.append(item.name)
    for table in tables:
        if table.rows == rows and table.columns:
            tensors += [Fraction(table.nbytes, rows * len(table.columns))] * len(table.columns)
    uneven = bool(ragged) or bool(tables)
    return DataRows(str(path), rows, tuple(tensors), description.nbytes, uneven, tuple(left_out))
