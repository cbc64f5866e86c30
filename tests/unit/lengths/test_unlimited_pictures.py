"""What measure_lengths says where train.image_max_tokens does not limit a model's pictures."""

import json
import re
from pathlib import Path

import pytest

from vlmflow.lengths.count import LengthAccount, RowLength
from vlmflow.pictures.budget import PictureBudget

FIXED = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336}}
QWEN = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
TILED = {"image_processor_type": "GotOcr2ImageProcessor", "max_patches": 12}


@pytest.mark.parametrize(
    ("processor", "largest", "said"),
    [
        (FIXED, 576, "does not limit this model's pictures.*; a picture takes up to 576 tokens"),
        (FIXED, 16, "does not limit this model's pictures.*; a picture takes up to 16 tokens"),
        (TILED, 256, "64 is below the tokens of this model's smallest picture; a picture takes up to 256 tokens"),
    ],
)
def test_it_says_how_many_tokens_a_picture_takes(
    tmp_path: Path, processor: dict[str, object], largest: int, said: str
) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": processor, "image_seq_length": 256}))
    assert re.search(said, PictureBudget.of(tmp_path, 64).exceeded(largest) or "")


def test_it_says_nothing_where_pictures_are_limited_or_there_are_none(tmp_path: Path) -> None:
    assert PictureBudget.of(tmp_path, 64).exceeded(0) is None
    for processor, largest in ((QWEN, 64), (TILED, 64), (FIXED, 0)):
        whole = {"image_processor": processor, "image_seq_length": 16}
        (tmp_path / "processor_config.json").write_text(json.dumps(whole))
        assert PictureBudget.of(tmp_path, 64).exceeded(largest) is None


def test_the_pictures_of_a_row_count_one_by_one() -> None:
    rows = [RowLength("one", 0, 1, 5, 400), RowLength("four", 1, 2, 5, 1601, pictures=4), RowLength("none", 2, 3, 5)]
    assert LengthAccount.of(rows).most_of_picture == 401
