"""The sizes of a model, as transformers builds it, and the micro-batches with which a run is estimated."""

import json
from pathlib import Path
from typing import Any

import pytest

from made_inputs import TEXT, some_inputs, text_shape
from vlmflow.config.gpus import GPUS
from vlmflow.core.errors import VlmflowError
from vlmflow.estimate.account import SHARE, fits_by
from vlmflow.estimate.estimate import estimate
from vlmflow.estimate.shape import UnknownModelError, read_shape, weights_of
from vlmflow.lengths.steps import FIRST, NUMBERS
from workflow_runs import ROOT

PUBLISHED = ROOT / "tests" / "published"

QWEN2_5 = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
TIED = {"tie_word_embeddings": True}


def written(folder: Path, **changes: Any) -> Path:
    """Write the 8B's config.json with other values; None leaves a key out."""
    config = json.loads((PUBLISHED / "Qwen3-VL-8B-Instruct" / "config.json").read_text())
    config = {key: value for key, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "weights"), [("Qwen3-VL-8B-Instruct", 8_767_123_696), ("Qwen3-VL-32B-Instruct", 33_357_390_064)]
)
def test_published_models_have_their_published_size(name: str, weights: int) -> None:
    assert weights_of(read_shape(PUBLISHED / name)) == weights


@pytest.mark.parametrize(
    ("model_type", "sizes", "weights"),
    [
        ("qwen2", QWEN2_5 | TIED | {"vocab_size": 151_936, "num_key_value_heads": 2}, 3_085_938_688),
        ("llama", LLAMA | TIED | {"vocab_size": 128_256, "num_key_value_heads": 8, "head_dim": 64}, 1_235_814_400),
        ("gpt2", {"n_layer": 6, "n_embd": 768, "n_head": 12, "vocab_size": 50_257}, 81_912_576),
    ],
)
def test_published_models_of_other_families_too(
    model_type: str, sizes: dict[str, Any], weights: int, tmp_path: Path
) -> None:
    """Qwen2.5-3B, Llama-3.2-1B, distilgpt2: with tied embeddings, and keys of config.json that have other names."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | sizes))
    assert weights_of(read_shape(tmp_path)) == weights


def test_another_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="transformers knows no model_type 'qwen9'"):
        read_shape(written(tmp_path, model_type="qwen9"))
    with pytest.raises(UnknownModelError, match="no model_type 'None'"):
        read_shape(written(tmp_path, model_type=None))
    with pytest.raises(UnknownModelError, match="no decoder of model_type 'vit'"):
        read_shape(written(tmp_path, model_type="vit", text_config=None, vision_config=None))
    with pytest.raises(UnknownModelError, match="it is quantised"):
        read_shape(written(tmp_path, quantization_config={"quant_method": "fp8"}))


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": TEXT | {"hidden_size": -1}},
        {"text_config": TEXT | {"hidden_size": "wide"}},
        {"text_config": TEXT | {"hidden_size": 1 << 62}},
        {"text_config": "of another file"},
        {"text_config": TEXT | {"sliding_window": "4"}},
        {"vision_config": {"depth": "many"}},
        {"text_config": TEXT | {"num_attention_heads": 0, "head_dim": None}},
    ],
)
def test_sizes_that_are_none_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The model is built in a child with limits of memory and time."""
    with pytest.raises(VlmflowError, match=r"config\.json: a model of the sizes in config\.json fails: "):
        read_shape(written(tmp_path, **changes))


@pytest.mark.slow
def test_building_a_model_of_very_many_layers_ends(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=r"fails: (not done after|more than) "):
        read_shape(written(tmp_path, text_config=TEXT | {"num_hidden_layers": 10**6}))


def test_a_token_goes_through_few_of_the_experts() -> None:
    shape = text_shape("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96)
    (down,) = (one for one in shape.of.matrices if one.name.endswith("experts.down_proj"))
    assert (down.experts, down.active, down.count) == (8, 2, TEXT["num_hidden_layers"])
    assert down.weights == 8 * 96 * TEXT["hidden_size"]


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"model_type": ', " " * (1 << 21)])
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(VlmflowError, match=r"config\.json: "):
        read_shape(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(VlmflowError, match=r"config\.json: "):
        read_shape(tmp_path)


ROWS = [(360, 256)] * 400
"""As long as FIRE's on average."""

AUTO = {"micro_batch_tokens": "auto", "gradient_checkpointing": "auto", "gradient_accumulation_steps": 32}


def test_auto_is_the_fastest_that_fits_the_product() -> None:
    found = estimate(some_inputs(AUTO, ROWS), "h100", None)
    room = SHARE * GPUS["h100"].memory
    needs = {(one.micro_batch_tokens, one.gradient_checkpointing): one.memory for one in found.passes}
    assert set(needs) == {(number, again) for number in NUMBERS for again in (True, False)}
    assert found.micro_batch_tokens is not None
    chosen = needs[found.micro_batch_tokens, found.gradient_checkpointing]
    assert found.memory.total == chosen <= room
    assert found.micro_batch_tokens >= 4096, "a GPU waits for Python below"
    assert found.one_row_each is not None
    assert found.one_row_each > 2
    small = estimate(some_inputs(AUTO, ROWS), "rtx-4090", None)
    assert (small.micro_batch_tokens, small.gradient_checkpointing) == (NUMBERS[0], True), "none is known to fit"


def test_a_smoke_run_begins_with_what_fits_the_gpu_at_hand() -> None:
    found = estimate(some_inputs(AUTO, ROWS), "h100", None)
    smallest, largest = (select(one.memory for one in found.passes) for select in (min, max))
    fits = fits_by(found, lambda: round(smallest / SHARE) + 1)
    assert fits is not None
    assert [one for one in found.passes if fits(one.micro_batch_tokens, one.gradient_checkpointing)] == [
        one for one in found.passes if one.memory == smallest
    ]
    everything = fits_by(found, lambda: 2 * largest)
    assert everything is not None
    assert everything(NUMBERS[-1], False)
    assert fits_by(estimate(some_inputs(), "h100", None), lambda: largest) is None, "nothing is to be found"


def test_without_a_product_auto_is_an_assumption() -> None:
    found = estimate(some_inputs(AUTO | {"gradient_checkpointing": False}), None, None)
    assert (found.micro_batch_tokens, found.gradient_checkpointing, found.one_row_each) == (FIRST, False, None)
    assert {one.gradient_checkpointing for one in found.passes} == {False}


def test_a_number_and_null_are_taken_as_they_are() -> None:
    set_to = estimate(some_inputs({"micro_batch_tokens": 3_000}), "h100", None)
    assert (set_to.micro_batch_tokens, set_to.passes) == (3_000, [])
    assert estimate(some_inputs(), "h100", None).micro_batch_tokens is None
