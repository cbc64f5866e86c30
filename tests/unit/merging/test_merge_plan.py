"""What the smoke stage says of the merge before the full training begins."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_models import file_names, write_adapter, write_base
from vlmflow.core.errors import VlmflowError
from vlmflow.merging.merge import planned_merge
from vlmflow.supervisor.report import PlannedMerge


def scaled_adapter(base: Path, folder: Path, scale: float) -> Path:
    """An adapter whose updates are `scale` times what write_adapter draws."""
    write_adapter(base, folder)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({key: tensor * scale if "lora_B" in key else tensor for key, tensor in tensors.items()}, weights)
    return folder


def plan(tmp_path: Path, dtype: torch.dtype, scale: float) -> PlannedMerge:
    base = write_base(tmp_path / "base", dtype)
    return planned_merge(base, scaled_adapter(base, tmp_path / "adapter", scale), file_names(base))


@pytest.mark.parametrize(
    ("dtype", "scale", "visible"),
    [
        (torch.bfloat16, 1.0, True),
        (torch.bfloat16, 1e-3, False),
        (torch.float32, 1e-3, True),
        (torch.float32, 1e-9, False),
    ],
)
def test_an_update_that_rounding_hides_is_foreseen(
    tmp_path: Path, dtype: torch.dtype, scale: float, visible: bool
) -> None:
    described = plan(tmp_path, dtype, scale)
    assert described.logits_may_be_inconclusive != visible
    assert (described.rounding_leaves > 0.75) == visible


def test_adapted_tensors_are_counted_by_kind_of_layer(tmp_path: Path) -> None:
    """With a mixture of experts all-linear means attention alone, and nothing said so."""
    described = plan(tmp_path, torch.bfloat16, 1.0)
    kinds = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert described.layers == dict.fromkeys(kinds, 2)
    assert described.touched == 14 < described.tensors


def test_an_adapter_that_changed_nothing_has_no_share(tmp_path: Path) -> None:
    described = plan(tmp_path, torch.bfloat16, 0.0)
    assert (described.rounding_leaves, described.logits_may_be_inconclusive) == (None, False)


def test_the_plan_of_a_merge_refuses_what_the_merge_refuses(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    config = write_adapter(base, tmp_path / "adapter") / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"layer_replication": [[0, 1], [0, 2]]}))
    with pytest.raises(VlmflowError, match="layer_replication"):
        planned_merge(base, tmp_path / "adapter", file_names(base))
