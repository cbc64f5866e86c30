"""The files of a model that determine lengths: what is not Qwen's is refused with the file."""

from pathlib import Path

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.count import TOKENIZER, TokenCounter, picture_tokens_of
from vlmflow.pictures.size_limits import PLAIN

OTHER_RULES = [
    "{}",
    "[]",
    '{"patch_size": 0, "merge_size": 2}',
    '{"patch_size": -16, "merge_size": 2}',
    '{"patch_size": 1e400, "merge_size": 2}',
    '{"patch_size": 16, "merge_size": 100000}',
    "[" * 100_000,
]


@pytest.mark.parametrize("content", OTHER_RULES, ids=range(len(OTHER_RULES)))
def test_a_picture_rule_of_another_form_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / PLAIN).write_text(content)
    with pytest.raises(VlmflowError, match=PLAIN) as refusal:
        picture_tokens_of(tmp_path, 64)
    assert "Qwen3-VL" in refusal.value.next_step


def test_a_picture_rule_with_more_keys_is_read(tmp_path: Path) -> None:
    (tmp_path / PLAIN).write_text('{"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536}}')
    assert picture_tokens_of(tmp_path, 64)(320, 96) == 30


@pytest.mark.parametrize("content", ["{}", "not JSON"])
def test_a_tokenizer_of_another_form_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / TOKENIZER).write_text(content)
    with pytest.raises(VlmflowError, match=TOKENIZER):
        TokenCounter(tmp_path, [], 64)
