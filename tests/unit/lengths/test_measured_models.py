"""What the lengths need of a model's files, and what is said where they do not fit together."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.against_swift import accepted_difference, refuse_incomplete_base, refuse_other_architecture
from vlmflow.lengths.count import TOKENIZER, LengthAccount, RowLength, TokenCounter
from vlmflow.pictures.budget import PLAIN, PictureBudget


@pytest.mark.parametrize(
    ("config", "model_type", "cause", "next_step"),
    [
        (
            {"architectures": ["Qwen3VLForConditionalGeneration"]},
            "qwen2_5_vl",
            "the model is a Qwen3VLForConditionalGeneration; model_type qwen2_5_vl is for",
            "set models.NAME.model_type: qwen3_vl",
        ),
        ({"architectures": ["Made\x1b[2J"]}, "qwen3", "the model is a Made\\x1b[2J; model_type", "ms-swift knows"),
    ],
)
def test_a_model_of_another_architecture_than_its_model_type_is_refused(
    tmp_path: Path, config: dict[str, list[str]], model_type: str, cause: str, next_step: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VlmflowError) as found:
        refuse_other_architecture(tmp_path, model_type)
    assert cause in found.value.cause
    assert next_step in found.value.next_step


@pytest.mark.parametrize(
    ("config", "model_type"),
    [
        ({"architectures": ["Qwen3VLForConditionalGeneration"]}, "qwen3_vl"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "deepseek_vl2"),  # ms-swift does not say which it is for
        ({}, "qwen3"),
        ({"architectures": "Qwen3ForCausalLM"}, "qwen3_vl"),
    ],
)
def test_a_model_of_the_same_or_of_an_unknown_architecture_is_taken(
    tmp_path: Path, config: dict[str, object], model_type: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuse_other_architecture(tmp_path, model_type)


@pytest.mark.parametrize("found", [{}, {"missing": [], "unneeded": []}])
def test_a_whole_base_is_taken(found: dict[str, Any]) -> None:
    refuse_incomplete_base(found, "base")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {"missing": ["a", "b"], "unneeded": ["c"]},
            r"base: its files lack tensors .*: a, b; the training would begin",
        ),
        ({"missing": [], "unneeded": [*"abcd\x1b"]}, r"base: its files have tensors .*: a, b, c and 2 more; nobody"),
        ({"failed": "ValueError: no\x1b"}, r"base: transformers cannot build .*: 'ValueError: no\\x1b'"),
    ],
)
def test_other_tensors_are_named_with_the_base(found: dict[str, Any], said: str) -> None:
    with pytest.raises(VlmflowError, match=said):
        refuse_incomplete_base(found, "base")


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


DIFFERENCE = {"row": "r-1", "before": "user\n", "trained": "red", "served": "Hear \x1b[2J"}
QWEN3 = {"template": "qwen3"}


def test_an_equal_template_needs_no_acceptance() -> None:
    assert accepted_difference({}, Path("m"), {}, False) is None


def test_an_accepted_difference_is_told_on_one_line() -> None:
    said = accepted_difference(DIFFERENCE, Path("m"), {}, True)
    assert said == r"row r-1: after 'user\n' the training has 'red', the model's chat template 'Hear \x1b[2J'"


@pytest.mark.parametrize(
    ("text_args", "trained", "step"),
    [
        (QWEN3, "<think>\n\n</think>\n\nred", "add_non_thinking_prefix: false to runs.NAME.train.swift_args"),
        (QWEN3, "red", "local copy of the model"),
        (QWEN3 | {"add_non_thinking_prefix": False}, "<think>\nWell", "local copy of the model"),
        ({"system": "Be brief."}, "<|im_start|>system", "datasets.NAME.system_prompt"),
    ],
)
def test_a_difference_stops_with_what_makes_the_two_equal(text_args: dict[str, Any], trained: str, step: str) -> None:
    with pytest.raises(VlmflowError, match=r"m: servers would not .* row r-1: after 'user\\n'") as error:
        accepted_difference(DIFFERENCE | {"trained": trained}, Path("m"), text_args, False)
    assert step in error.value.next_step
    assert "models.NAME.template_differs: true" in error.value.next_step


@pytest.mark.parametrize(
    ("failed", "where"), [({"row": "r-1"}, "template fails at row r-1: 'TemplateError"), ({}, "template fails: ")]
)
def test_a_template_that_fails_is_never_accepted(failed: dict[str, str], where: str) -> None:
    with pytest.raises(VlmflowError, match=where):
        accepted_difference(failed | {"failed": "TemplateError: no\x1b"}, Path("m"), {}, True)


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
