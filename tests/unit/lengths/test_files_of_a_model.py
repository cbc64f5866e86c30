"""The files of a model that determine lengths: one that cannot be read is refused by name."""

from pathlib import Path

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.count import TOKENIZER, TokenCounter
from vlmflow.pictures.budget import PLAIN, PictureBudget

UNREADABLE = [
    "[]",
    '{"patch_size": 0, "merge_size": 2}',
    '{"patch_size": -16, "merge_size": 2}',
    '{"patch_size": 1e400, "merge_size": 2}',
    '{"patch_size": 16, "merge_size": 100000}',
    "[" * 100_000,
]


@pytest.mark.parametrize("content", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_picture_rule_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / PLAIN).write_text(content)
    with pytest.raises(VlmflowError, match=PLAIN) as refusal:
        PictureBudget.of(tmp_path, 64)
    assert "its owner published" in refusal.value.next_step


def test_pictures_of_another_rule_are_left_to_ms_swifts_template(tmp_path: Path) -> None:
    (tmp_path / PLAIN).write_text('{"size": {"height": 336, "width": 336}}')
    assert PictureBudget.of(tmp_path, 64).tokens(320, 96) == 1, "its count differs, so the template counts the rows"


def test_a_picture_rule_with_more_keys_is_read(tmp_path: Path) -> None:
    (tmp_path / PLAIN).write_text('{"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536}}')
    assert PictureBudget.of(tmp_path, 64).tokens(320, 96) == 30


@pytest.mark.parametrize("content", ["{}", "not JSON"])
def test_a_tokenizer_of_another_form_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / TOKENIZER).write_text(content)
    with pytest.raises(VlmflowError, match=TOKENIZER):
        TokenCounter(tmp_path, [], 64)
