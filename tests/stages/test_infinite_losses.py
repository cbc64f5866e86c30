"""A loss that is no finite number ends an evaluation with the row and the cause; JSON could not keep it."""

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from vlmflow.core.errors import VlmflowError
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.evaluation.answer_losses import Pass, Work
from vlmflow.evaluation.measure import Measurement, ScoredModel, measure
from vlmflow.rows.chat import Turn

ABOVE_FLOAT16 = 1e6


def test_a_row_on_which_float16_overflows_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_tiny_model(folder, ["Is it red?", "No."] * 9, TinyShape(hidden_size=32, layers=2, merges=100), seed=1)
    scaled = 0
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in tensors:
            if name.endswith("language_model.norm.weight"):
                tensors[name] *= ABOVE_FLOAT16
                scaled += 1
        save_file(tensors, shard, {"format": "pt"})
    assert scaled == 1
    row = Work("the-key", {"own right": Pass([Turn("human", "Is it red?"), Turn("gpt", "No.")], [])})

    def losses(dtype: str) -> float:
        how = Measurement("qwen3_vl", {}, "last_round", tmp_path, 64, 512, "cpu", dtype, 1, 1)
        found, _ = measure(ScoredModel("it", folder, "digest"), [row], how, tmp_path / "store")
        return found["the-key"].losses["own right"].nats

    assert math.isfinite(losses("float32"))
    with pytest.raises(VlmflowError, match=r"row the-key, own right: the model's loss is (nan|inf)") as caught:
        losses("float16")
    assert "set runs.NAME.train.dtype to bfloat16 or float32" in caught.value.cause
    assert "check the disk" not in str(caught.value)
