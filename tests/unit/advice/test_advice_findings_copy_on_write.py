"""What forked workers copy: a dataset that is read, or only the start of a worker."""

from __future__ import annotations

import pytest

from legroom.advice.findings_copy_on_write import copied_attributes, copy_rate, finding_of_dataset, finding_of_job
from legroom.records.workload import CopiedAttribute

MB = 1 << 20


def test_steady_copying_has_a_rate() -> None:
    points = [(0.0, 0), (10.0, 30 * MB), (20.0, 60 * MB), (30.0, 90 * MB)]
    assert copy_rate(points, least=64 * MB) == 3 * MB
    assert copy_rate([(-10.0, 0), *points[1:]], least=64 * MB) == pytest.approx(2.25 * MB)


@pytest.mark.parametrize(
    "copied",
    [
        [0, 40, 40, 40, 40],  # one full garbage collection
        [0, 1, 2, 2, 2],  # the start of a worker
        [0, 30, 60, 90, 90],  # everything is copied by now
        [0, 20, 40, 60],  # less than a garbage collection might
        [0, 50, 100],  # too few readings
        [],
    ],
)
def test_bursts_starts_and_ends_have_none(copied: list[int]) -> None:
    points = [(10.0 * index, size * MB) for index, size in enumerate(copied)]
    assert copy_rate(points, least=64 * MB) is None


def test_an_attribute_counts_when_a_part_of_it_was_copied() -> None:
    whole = CopiedAttribute("samples", "list", 500 * MB, 100 * MB, 150 * MB)
    touched = CopiedAttribute("names", "dict", 500 * MB, 5 * MB, 150 * MB)
    small = CopiedAttribute("classes", "list", 2 * MB, 2 * MB, 2 * MB)
    larger = CopiedAttribute("boxes", "list", 600 * MB, 300 * MB, 20 * MB)
    assert copied_attributes([whole, touched, small, larger]) == (larger, whole)


def test_little_that_was_read_is_compared_with_little_that_was_copied() -> None:
    """A busy machine reads a few hundred samples in a trial run, whatever the dataset's size."""
    read = CopiedAttribute("samples", "list", 20_000 * MB, MB, MB // 2)
    unread = CopiedAttribute("names", "list", 20_000 * MB, MB // 16, MB // 32)
    assert copied_attributes([read, unread]) == (read,)


def test_the_findings_name_the_cure() -> None:
    found = finding_of_dataset([CopiedAttribute("dataset.samples", "list", 500 * MB, 100 * MB, 90 * MB)], 8)
    assert found.code == "workers-copy-dataset" and found.severity == "warning"
    assert "dataset.samples (list, 500 MB)" in found.message and "8 workers copy up to 3.91 GB" in found.why
    assert any("legroom.freeze_dataset(dataset)" in line for line in found.fix)
    job = finding_of_job(77, [MB, 3 * MB], 4, 90 * MB)
    assert "4 workers of process 77" in job.message and "120 MB/min each" in job.message and "90 MB" in job.why
