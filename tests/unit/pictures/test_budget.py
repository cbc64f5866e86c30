"""The one file of a model that says how pictures are scaled, and a run's limits in it."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from qwen_vl_utils.vision_process import smart_resize as in_training
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as in_transformers

from vlmflow.config.settings import PictureLimits as Admitted
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.budget import PictureBudget, Processor, ScaleLimits, Squares, processor_of

QWEN = """{
    "size": {
        "longest_edge": 16777216,
        "shortest_edge": 65536
    },
    "patch_size": 16, "name": "größe \\u00e9 \\"size\\": {",\t"merge_size": 2,
    "image_mean": [0.5, 0.5e0, 5E-1]\r
}  """


def found(folder: Path, **files: str) -> Processor:
    for name, text in files.items():
        (folder / f"{name}.json").write_bytes(text.encode())
    processor = processor_of(folder)
    assert processor
    return processor


def limits_of(processor: Processor, most_tokens: int) -> ScaleLimits:
    limits = PictureBudget(processor, most_tokens).limits
    assert limits
    return limits


def left_to_processor(folder: Path, most_tokens: int) -> dict[str, object]:
    return PictureBudget.of(folder, most_tokens).left_to_processor


def test_only_the_value_of_size_changes(tmp_path: Path) -> None:
    processor = found(tmp_path, preprocessor_config=QWEN)
    content = processor.limited(limits_of(processor, 1024)).decode()
    before, after = QWEN.split("{\n        ", 1)[0], QWEN.split("65536\n    }", 1)[1]
    assert content == f'{before}{{"shortest_edge": 4096, "longest_edge": 1048576}}{after}'


def test_the_limits_are_those_of_the_trainer(tmp_path: Path) -> None:
    assert limits_of(found(tmp_path, preprocessor_config=QWEN), 2048) == ScaleLimits(4 * 32 * 32, 2048 * 32 * 32)


def test_the_nested_processor_wins_if_there_is_one(tmp_path: Path) -> None:
    nested = f'{{"size": 1, "image_processor":\n{QWEN}, "video_processor": {QWEN}}}'
    processor = found(tmp_path, preprocessor_config=QWEN, processor_config=nested)
    content = json.loads(processor.limited(limits_of(processor, 64)))
    limits = {"shortest_edge": 4096, "longest_edge": 65_536}
    original = json.loads(QWEN)
    assert processor.file == "processor_config.json"
    assert content == {"size": 1, "image_processor": original | {"size": limits}, "video_processor": original}
    for legacy in ('{"processor_class": "Q"}', '{"image_processor": null}'):
        assert found(tmp_path, processor_config=legacy).file == "preprocessor_config.json"


def test_a_model_without_pictures_has_none(tmp_path: Path) -> None:
    assert processor_of(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"patch_size": 16, "merge_size": 2}', "has no size"),
        (QWEN.replace('"image_mean"', '"size"'), "names the key 'size' twice"),
        (QWEN.replace('"image_mean"', r'"siz\\u0065"'.replace(r"\\", "\\")), "names the key 'size' twice"),
        (QWEN.replace("16,", "0,"), "patch_size"),
        (QWEN.replace("16,", r'"\ud800",'), "preprocessor_config.json: "),
        (QWEN[:-5], "preprocessor_config.json: "),
        ("[]", "an object must begin at character 1"),
        ("\ufeff{}", "BOM"),
    ],
)
def test_a_file_that_cannot_hold_the_limits_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(VlmflowError, match=why):
        found(tmp_path, preprocessor_config=text)


def test_null_pixels_override_nothing(tmp_path: Path) -> None:
    text = QWEN.replace('"image_mean"', '"min_pixels": null, "image_mean"')
    assert found(tmp_path, preprocessor_config=text).rule == Squares(32)


@given(
    st.integers(17, 6000),
    st.floats(1, 200),
    st.booleans(),
    st.sampled_from([4, 16, 64, 200, 1024, 16_384]),
)
def test_trainer_and_transformers_scale_alike_whatever_validation_admits(
    short: int, aspect: float, upright: bool, most_tokens: int
) -> None:
    """All but what the lengths refuse: of a picture more elongated than tokens, the trainer leaves nothing."""
    long = int(short * aspect)
    assume(long <= Admitted().max_aspect * short and long * short <= Admitted().max_pixels)
    size = (long, short) if upright else (short, long)
    limits = (4 * 1024, most_tokens * 1024)
    trained = in_training(*size, 32, *limits)
    assert trained == in_transformers(*size, 32, *limits) or 0 in trained


def test_older_files_have_their_limits_in_pixels(tmp_path: Path) -> None:
    """Qwen2.5-VL's: they would override `size`."""
    text = '{"min_pixels": 3136, "patch_size": 14, "merge_size": 2, "max_pixels": 12845056, "x": "max_pixels"}'
    processor = found(tmp_path, preprocessor_config=text)
    limits = limits_of(processor, 100)
    assert limits == ScaleLimits(4 * 28 * 28, 100 * 28 * 28)
    assert processor.limited(limits).decode() == text.replace("3136", "3136").replace("12845056", "78400")
    both = text.replace('"x"', '"size": {"longest_edge": 5, "shortest_edge": 1}, "x"')
    changed = json.loads(found(tmp_path, preprocessor_config=both).limited(limits))
    assert changed["size"] == {"shortest_edge": 3136, "longest_edge": 78400}
    assert changed["max_pixels"] == 78400


@pytest.mark.parametrize("kind", ["Glm4vImageProcessor", "PaddleOCRVLImageProcessorFast"])
def test_the_keys_of_qwen_mean_nothing_in_another_class(tmp_path: Path, kind: str) -> None:
    """ms-swift would train without the limits that the published folder had."""
    processor = found(
        tmp_path, preprocessor_config=QWEN.replace('"image_mean"', f'"image_processor_type": "{kind}", "x"')
    )
    assert processor.rule is None


TILED = '{"image_processor_type": "GotOcr2ImageProcessorFast", "max_patches": 12, "size": {"height": 448}}'
LINED = '{"size": {"longest_edge": 1540}, "patch_size": 14, "image_processor_type": "PixtralImageProcessor"}'
OF_TILES, OF_LINES = '{"image_seq_length": 256}', '{"patch_size": 14, "spatial_merge_size": 2}'
"""Of the whole processor, as InternVL 3.5 and Mistral Small 3.1 have them."""


@pytest.mark.parametrize(
    ("tokens", "tiles"), [(16, 1), (256, 1), (767, 1), (768, 2), (1024, 3), (3328, 12), (9999, 12)]
)
def test_tiles_and_the_whole_picture_fit_the_tokens(tmp_path: Path, tokens: int, tiles: int) -> None:
    processor = found(tmp_path, preprocessor_config=TILED, processor_config=OF_TILES)
    limits = limits_of(processor, tokens)
    assert limits == ScaleLimits(max_patches=tiles)
    assert processor.limited(limits).decode() == TILED.replace("12", str(tiles))
    assert left_to_processor(tmp_path, tokens) == {"max_patches": tiles}
    assert PictureBudget(processor, tokens).most == 256 * (1 if tiles == 1 else tiles + 1)


@pytest.mark.parametrize(
    ("tokens", "squares"), [(4, 1), (6, 2), (16, 3), (71, 7), (72, 8), (1024, 31), (3079, 54), (3080, 55), (9999, 55)]
)
def test_squares_and_the_ends_of_lines_fit_the_tokens(tmp_path: Path, tokens: int, squares: int) -> None:
    """Of n lines with n squares each."""
    processor = found(tmp_path, preprocessor_config=LINED, processor_config=OF_LINES)
    limits = limits_of(processor, tokens)
    assert limits == ScaleLimits(longest_edge=28 * squares)
    assert processor.limited(limits).decode() == LINED.replace("1540", str(28 * squares))
    assert left_to_processor(tmp_path, tokens) == {"size": {"longest_edge": 28 * squares}}
    assert PictureBudget(processor, tokens).most == squares * (squares + 1)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ('{"size": {"height": 896, "width": 896}, "image_seq_length": 256}', "{}"),
        (TILED.replace("GotOcr2", "Cohere2Vision"), OF_TILES),
        (TILED.replace("12", "null"), OF_TILES),
        (TILED, OF_LINES),
        (TILED, '{"image_seq_length": 0}'),
        (LINED.replace("Pixtral", "Idefics3"), OF_LINES),
        (LINED.replace("1540", '1540, "height": 4'), OF_LINES),
        (LINED, OF_TILES),
    ],
)
def test_a_processor_without_a_known_rule_stays_as_it_is(tmp_path: Path, text: str, whole: str) -> None:
    processor = found(tmp_path, preprocessor_config=text, processor_config=whole)
    budget = PictureBudget(processor, 64)
    assert (budget.limits, budget.most, processor.rule, budget.left_to_processor) == (None, None, None, {})


def test_ms_swift_limits_qwen_vl_itself(tmp_path: Path) -> None:
    assert limits_of(found(tmp_path, preprocessor_config=QWEN), 64)
    assert PictureBudget.of(tmp_path, 64).most == 64
    assert left_to_processor(tmp_path, 64) == {}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no pictures"),
        ({"preprocessor_config": QWEN}, "4 to 1024 tokens"),
        ({"preprocessor_config": TILED, "processor_config": OF_TILES}, '{"max_patches": 3}'),
        ({"preprocessor_config": TILED}, "the model's own"),
    ],
)
def test_a_report_says_how_pictures_are_scaled(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    assert PictureBudget.of(tmp_path, 1024).in_words() == said
