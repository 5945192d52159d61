"""``data.dataset(decode=…)``: raw bytes become what a training loop needs, where the row is read."""

from __future__ import annotations

import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import legroom
from legroom.errors import UsageError

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))
from archive_samples import write_tar


def read_image(data: bytes) -> Any:
    from PIL import Image

    return np.array(Image.open(io.BytesIO(data)))


def fails(data: bytes) -> Any:
    raise ValueError("no image")


@pytest.fixture
def data(tmp_path: Path) -> Any:
    from PIL import Image

    files = []
    for number in range(6):
        image = io.BytesIO()
        Image.fromarray(np.full((4, 5, 3), number, np.uint8)).save(image, "png")
        files += [(f"{number}.png", image.getvalue()), (f"{number}.json", json.dumps({"n": number}).encode())]
    with legroom.open(write_tar(tmp_path / "x.tar", files)) as opened:
        yield opened


def test_each_function_gets_the_bytes_of_its_column(data: Any) -> None:
    dataset = data.dataset("png", "json", "__key__", decode={"png": read_image, "json": json.loads})
    for image, about, key in (dataset[4], dataset.__getitems__([4])[0]):
        assert image.shape == (4, 5, 3) and (image == 4).all()
        assert about == {"n": 4} and key == "4"
    assert isinstance(data.dataset("json", decode={"json": bytes})[0], bytes)


def test_transform_comes_after_decode(data: Any) -> None:
    dataset = data.dataset(
        "json", "__key__", decode={"json": json.loads}, transform=lambda about, key: (key, about["n"])
    )
    assert dataset[2] == ("2", 2)


def test_it_works_in_a_dataloader_and_in_a_pickle(data: Any) -> None:
    import torch

    dataset = data.dataset("png", "json", decode={"png": read_image, "json": json.loads})
    again = pickle.loads(pickle.dumps(dataset))
    assert (again[3][0] == 3).all() and again[3][1] == {"n": 3}
    (images, about), *_ = torch.utils.data.DataLoader(dataset, batch_size=3, num_workers=1)
    assert images.shape == (3, 4, 5, 3) and about["n"].tolist() == [0, 1, 2]


def test_an_error_names_the_row(data: Any) -> None:
    with pytest.raises(ValueError, match="no image") as caught:
        data.dataset("png", decode={"png": fails})[5]
    assert "'png'" in caught.value.__notes__[0] and "row 5" in caught.value.__notes__[0]


@pytest.mark.parametrize("decode", [{"jpg": read_image}, {"png": "PIL"}, read_image])
def test_what_is_not_read_or_not_a_function_is_refused(data: Any, decode: Any) -> None:
    with pytest.raises(UsageError, match="decode"):
        data.dataset("png", decode=decode)


def test_values_of_other_columns_are_copies(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))

    def spoil(row: Any) -> Any:
        row += 1
        return row

    with legroom.open(tmp_path / "a.npy") as opened:
        dataset = opened.dataset("array", decode={"array": spoil})
        assert dataset[0].tolist() == [1, 1] and dataset[0].tolist() == [1, 1]


def test_an_index_that_is_no_integer_is_a_type_error(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(4))
    rows = legroom.open(tmp_path / "x.npy").dataset()
    for index in (slice(0, 2), 1.0, "a"):
        with pytest.raises(TypeError):
            rows[index]  # type: ignore[index]


def test_a_loop_over_all_samples_gives_what_their_numbers_give(data: Any) -> None:
    def first_byte(value: bytes) -> int:
        return value[0]

    for names, more in (
        (("png", "json", "__key__"), {"decode": {"png": read_image, "json": json.loads}}),
        (("json",), {"decode": {"json": bytes}}),
        (("__key__",), {"decode": {"__key__": str.upper}}),
        (("png", "__key__"), {}),
        (("png", "json"), {"decode": {"png": first_byte}, "transform": lambda image, about: (image, len(about))}),
    ):
        dataset = data.dataset(*names, **more)
        for samples in (list(dataset), dataset.__getitems__(range(6))):
            assert len(samples) == 6
            for row, sample in enumerate(samples):
                assert pickle.dumps(sample) == pickle.dumps(dataset[row]), names


def test_an_error_in_a_loop_names_the_row(data: Any) -> None:
    with pytest.raises(ValueError, match="no image") as caught:
        list(data.dataset("png", decode={"png": fails}))
    assert "row 0" in caught.value.__notes__[0]
