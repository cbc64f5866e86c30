"""The merge and the proof of trained weights, the model's own: what is taken over, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_models import file_names, randomise, tensors_of, write_base
from vlmflow.config.strategies import FULL
from vlmflow.core.errors import VlmflowError
from vlmflow.merging.merge import merge_weights, planned_merge
from vlmflow.merging.proof import TensorProof
from vlmflow.merging.verify_tensors import verify_tensors

FROZEN = "model.layers.0.mlp.up_proj.weight"
TRAINED = "model.layers.1.mlp.up_proj.weight"


def write_trained(base: Path, folder: Path, dtype: torch.dtype = torch.float32, spread: float = 0.1) -> Path:
    """Write what a training of the base's second layer releases, in one file: its type may differ from the base's."""
    folder.mkdir()
    torch.manual_seed(3)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(base).items()}
    names = sorted(name for name in tensors if name.startswith("model.layers.1."))
    for name in names:
        tensors[name] = tensors[name] + torch.randn_like(tensors[name]) * spread
    save_file(tensors, folder / "model.safetensors")
    save_file({"row.0.logits": torch.zeros(1, 96)}, folder / "logits.safetensors")
    (folder / "trained.json").write_text(json.dumps({"tensors": names}))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained(base, tmp_path_factory.mktemp("trained") / "written")


@pytest.fixture
def trained(written: Path, tmp_path: Path) -> Path:
    """What a training of the base's weights released; a test may change it."""
    return shutil.copytree(written, tmp_path / "trained")


def merge(base: Path, trained: Path, merged: Path) -> TensorProof:
    merge_weights(base, trained, merged, file_names(base), 2)
    return verify_tensors(base, trained, merged, file_names(base), 2, FULL)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_trained_tensors_are_the_checkpoints_and_frozen_ones_the_bases(tmp_path: Path, stored: torch.dtype) -> None:
    """In the base's layout and type, whatever the layout and the type of the checkpoint."""
    base = write_base(tmp_path / "base", dtype=stored)
    proof = merge(base, write_trained(base, tmp_path / "trained"), tmp_path / "merged")
    before, after = tensors_of(base), tensors_of(tmp_path / "merged")
    expected = load_file(tmp_path / "trained" / "model.safetensors")
    for name, tensor in after.items():
        assert torch.equal(tensor, expected[name].to(stored)), name
        assert torch.equal(tensor, before[name]) == (not name.startswith("model.layers.1.")), name
    assert file_names(tmp_path / "merged") == file_names(base)
    assert (proof.touched, proof.untouched) == (11, len(before) - 11)
    assert proof.changed_share > 0.9
    assert {kind.name: kind.tensors for kind in proof.kinds}["model.layers.*.mlp.up_proj.weight"] == 1


def test_an_update_that_rounding_hides_is_noticed_by_the_gate_and_by_the_proof(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", dtype=torch.bfloat16)
    trained = write_trained(base, tmp_path / "trained", spread=1e-9)
    plan = planned_merge(base, trained, file_names(base))
    assert plan.logits_may_be_inconclusive
    with pytest.raises(VlmflowError, match=r"not one of .* trained numbers differs from the base's") as error:
        merge(base, trained, tmp_path / "merged")
    assert "learning_rate" in error.value.next_step


def changed(name: str, **tensors: torch.Tensor | None) -> Callable[[Path], None]:
    """Change the file `model.safetensors`: a tensor's value, or None to remove it."""

    def change(trained: Path) -> None:
        content = load_file(trained / "model.safetensors")
        for _, tensor in tensors.items():
            content.pop(name) if tensor is None else content.update({name: tensor})
        save_file(content, trained / "model.safetensors")

    return change


def named(*names: str) -> Callable[[Path], None]:
    return lambda trained: (trained / "trained.json").write_text(json.dumps({"tensors": list(names)})) and None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (named("model.layers.9.mlp.up_proj.weight"), "model.layers.9.mlp.up_proj.weight was trained, but the base"),
        (named(), "names no trained tensor"),
        (changed(TRAINED, value=None), f"{TRAINED} was trained, but the checkpoint does not have it"),
        (changed(FROZEN, value=None), f"{FROZEN} is in the base, but not in the checkpoint"),
        (changed("model.other.weight", value=torch.zeros(3)), "model.other.weight is in the checkpoint, but not in"),
        (changed(TRAINED, value=torch.zeros(3, 3)), f"{TRAINED} has shape (3, 3), in the base (80, 48)"),
        (changed(TRAINED, value=torch.zeros(80, 48, dtype=torch.int8)), "is I8 in the checkpoint"),
        (lambda trained: (trained / "model.safetensors").write_bytes(b"{}"), "model.safetensors: its header cannot"),
        (lambda trained: (trained / "trained.json").write_text("[]"), "trained.json"),
        (changed(TRAINED, value=torch.full((80, 48), torch.nan)), "a merged value is NaN"),
    ],
)
def test_what_does_not_fit_the_base_is_refused_by_name(
    base: Path, trained: Path, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    change(trained)
    with pytest.raises(VlmflowError, match=re.escape(said)):
        merge(base, trained, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_frozen_tensor_that_the_training_changed_is_an_error(base: Path, trained: Path, tmp_path: Path) -> None:
    """The merge leaves it as the base's, so the folder alone would not show it."""
    content = load_file(trained / "model.safetensors")
    content[FROZEN][70, 3] += 1e-3
    save_file(content, trained / "model.safetensors")
    with pytest.raises(VlmflowError, match=rf"tensor {re.escape(FROZEN)} is frozen .* but the training changed it"):
        merge(base, trained, tmp_path / "merged")


@pytest.mark.parametrize("name", [FROZEN, TRAINED])
def test_one_other_number_in_the_folder_is_found(base: Path, trained: Path, tmp_path: Path, name: str) -> None:
    merge(base, trained, tmp_path / "merged")
    for file in (tmp_path / "merged").glob("*.safetensors"):
        content = load_file(file)
        if name in content:
            content[name][7, 7] = torch.nextafter(content[name][7, 7], torch.tensor(9.0))
            save_file(content, file, {"format": "pt"})
    with pytest.raises(VlmflowError, match=re.escape(name)):
        verify_tensors(base, trained, tmp_path / "merged", file_names(base), 2, FULL)


def test_trained_embeddings_that_the_base_stores_twice_are_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    trained = write_trained(base, tmp_path / "trained")
    named("lm_head.weight")(trained)
    with pytest.raises(VlmflowError, match="which the base stores twice"):
        merge(base, trained, tmp_path / "merged")


def test_random_weights_of_a_checkpoint_in_shards_are_merged(tmp_path: Path) -> None:
    """Transformers' own saving divides into other shards than the base's."""
    from transformers import AutoModelForCausalLM

    base = write_base(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    randomise(model, 0.1)
    trained = tmp_path / "trained"
    model.save_pretrained(trained, max_shard_size=30_000)
    names = sorted(name for name, _ in model.named_parameters())
    (trained / "trained.json").write_text(json.dumps({"tensors": names}))
    save_file({"row.0.logits": torch.zeros(1, 96)}, trained / "logits.safetensors")
    assert len(list(trained.glob("model-*"))) not in (1, len(list(base.glob("model-*"))))
    proof = merge(base, trained, tmp_path / "merged")
    assert (proof.untouched, proof.largest_deviation) == (0, 0.0)
