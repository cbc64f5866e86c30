"""The estimate beside what others measured: tests/published/trainings.csv. `pytest -s` prints every row.

Models stand in as Qwen3 of the same sizes; it has two norms more in a layer.
"""

import csv
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest

from made_inputs import PROCESSOR, some_inputs, text_shape
from vlmflow.config.gpus import GPUS
from vlmflow.estimate.memory import memory
from vlmflow.estimate.run import EstimateInput
from vlmflow.estimate.shape import FILES, Files, ModelShape, shape_of
from vlmflow.estimate.times import times
from workflow_runs import ROOT

pytestmark = pytest.mark.lengthy

TABLE = ROOT / "tests" / "published" / "trainings.csv"

SIZES = {
    "Qwen-1.8B": (151_936, 2_048, 5_504, 24, 16, 16),
    "Qwen-7B": (151_936, 4_096, 11_008, 32, 32, 32),
    "Qwen-14B": (152_064, 5_120, 13_696, 40, 40, 40),
    "Qwen-72B": (152_064, 8_192, 24_576, 80, 64, 64),
    "Yi-34B": (64_000, 7_168, 20_480, 60, 56, 8),
    "Qwen2.5-7B": (152_064, 3_584, 18_944, 28, 28, 4),
    "Llama-3.1-8B": (128_256, 4_096, 14_336, 32, 32, 8),
    "Llama-3.3-70B": (128_256, 8_192, 28_672, 80, 64, 8),
    "Qwen3-VL-4B": (151_936, 2_560, 9_728, 36, 32, 8),
}
"""Vocabulary, width, inner width, layers, heads and key heads of the published config.json; a head is 128 wide."""

NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
TOWER = {
    "depth": 24,
    "hidden_size": 1_024,
    "intermediate_size": 4_096,
    "out_hidden_size": 2_560,
    "deepstack_visual_indexes": [5, 11, 17],
}

CLOSE = 0.15
"""How far an estimate may be off without a reason in the table."""

FITTED = "modelscope/ms-swift"
"""Whose rows of the kind "used" the constants of `memory` were fitted to."""


def shape_named(model: str) -> ModelShape:
    sizes = dict(zip((*NAMES, "num_key_value_heads"), SIZES[model], strict=True)) | {"head_dim": 128}
    if "VL" not in model:
        return text_shape(**sizes)
    config = {"model_type": "qwen3_vl", "text_config": sizes, "vision_config": TOWER, "tie_word_embeddings": True}
    return shape_of(Files({FILES[0]: json.dumps(config), FILES[1]: PROCESSOR.read_text()}))


def inputs_of(row: dict[str, str]) -> EstimateInput:
    """Return what is estimated of a row; all of its text counts as trained."""
    tokens, pictures = int(row["tokens"]), int(row["picture_tokens"])
    train: dict[str, Any] = {
        "max_length": 32_768,
        "per_device_batch_size": int(row["batch"]),
        "gradient_checkpointing": row["checkpointing"] == "True",
        "liger": row["liger"] == "True",
        "lora": {
            "rank": int(row["rank"]),
            "target_modules": row["targets"].split(),
            "dora": row["method"] == "dora",
        },
    }
    run = {"strategy": row["strategy"], "processes": int(row["gpus"]), "tuner": row["method"].replace("dora", "lora")}
    return some_inputs(train, [(tokens - pictures, pictures)], shape_named(row["model"]), **run)


@dataclass(frozen=True)
class Compared:
    """A row of the table; estimated: the estimate's GiB over those that were measured."""

    row: dict[str, str]
    estimated: float

    def __str__(self) -> str:
        names = ("model", "method", "strategy", "tokens", "batch", "kind", "measured_gib", "reason")
        return f"{self.estimated:.2f} " + " ".join(self.row[name] for name in names)


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    rows = [row for row in csv.DictReader(TABLE.open()) if row["measured_gib"]]
    found = [Compared(row, memory(inputs_of(row)).total / 2**30 / float(row["measured_gib"])) for row in rows]
    print("", *found, sep="\n")
    return found


@pytest.mark.slow
def test_the_median_is_that_of_what_was_measured(compared: list[Compared]) -> None:
    """Of rows that no constant was fitted to, and that count what the driver shows as used."""
    groups = defaultdict(list)
    for one in compared:
        if one.row["kind"] == "used" and FITTED not in one.row["source"]:
            groups[one.row["strategy"]].append(one.estimated)
    assert {strategy: len(found) for strategy, found in groups.items()} == {"ddp": 36, "zero3": 15}
    assert 0.95 <= statistics.median(groups["ddp"]) <= 1.05
    assert 0.9 <= statistics.median(groups["zero3"]) <= 1.1


@pytest.mark.slow
def test_a_row_that_is_far_off_has_its_reason_and_no_other_row_has_one(compared: list[Compared]) -> None:
    far = [str(one) for one in compared if abs(one.estimated - 1) > CLOSE]
    explained = [str(one) for one in compared if one.row["reason"]]
    assert far == explained


def test_tensors_have_the_bytes_that_an_h100_allocated() -> None:
    """The 8B's language model alone (docs/benchmarks.md, "On a GPU").

    8,192 tokens, all trained, with LoRA of rank 16: `max_memory_allocated`.
    """
    needed = memory(some_inputs(rows=[(8_192, 0)], shape=text_shape()))
    assert needed.total - needed.cache - needed.context == pytest.approx(34.64e9, rel=0.005)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(616, 0.356), (2_048, 0.382), (8_192, 1.49), (16_384, 3.26), (24_576, 5.3)]
)
def test_batches_of_an_h100_take_what_was_measured(tokens: int, seconds: float) -> None:
    """The same: a bare loop of torch, transformers and peft."""
    inputs = some_inputs({"max_length": 32_768}, rows=[(tokens, 0)], shape=text_shape())
    fast, slow = (times(inputs, GPUS["h100"], fast=fast) for fast in (True, False))
    least, most = (max(found.batch_seconds, tokens * found.token_seconds) for found in (fast, slow))
    assert least <= seconds <= most


def test_speeds_of_an_a100_lie_in_the_range_of_the_estimate() -> None:
    """LoRA of QwenLM on one GPU, with batches of at least 1,000 tokens: tokens per second, without a step."""
    for row in csv.DictReader(TABLE.open()):
        chosen = row["model"] in ("Qwen-7B", "Qwen-14B") and (row["method"], row["strategy"]) == ("lora", "ddp")
        if chosen and row["tokens_per_s"] and int(row["tokens"]) >= 1_000:
            fast, slow = (times(inputs_of(row), GPUS["a100-80gb"], fast=fast) for fast in (True, False))
            speeds = [1 / max(found.batch_seconds / int(row["tokens"]), found.token_seconds) for found in (slow, fast)]
            assert speeds[0] <= float(row["tokens_per_s"]) <= speeds[1], row
