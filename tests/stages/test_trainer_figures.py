"""The trainer's own figures, for more shapes of a training than test_training_faults, and infinite losses."""

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tiny_trainings import Tiny, check_rows, losses_of
from trainer_faults import make_fault
from vlmflow.config.strategies import FULL
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.evaluation.answer_losses import Pass, Work
from vlmflow.evaluation.measure import Measurement, ScoredModel, measure
from vlmflow.rows.chat import Turn
from vlmflow.supervisor.report import TrainingReport
from vlmflow.supervisor.train import report, train

SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3)]
"""Processes, and the batch size of each."""


@pytest.mark.slow
def test_the_validation_loss_depends_on_neither_processes_nor_batch_size(tmp_path: Path) -> None:
    """Seven rows of other lengths, which fill no batches; weights that stay as they are."""
    tiny = Tiny.write(tmp_path, vision=False, rows=6, val_rows=7)
    found: list[TrainingReport] = []
    for processes, size in SHAPES:
        settings = {"per_device_batch_size": size, "learning_rate": 1e-12, "max_steps": 1}
        training = tiny.training(processes=processes, **settings)
        found.append(report(training, train(training, tmp_path / "runs", 2, "train_model r")))
    assert {(one.eval_rows, one.eval_tokens) for one in found} == {(7, found[0].eval_tokens)}
    losses = [loss for one in found for _, loss in one.eval_losses]
    assert losses == [pytest.approx(losses[0], abs=1e-6)] * len(SHAPES)


@pytest.mark.slow
def test_one_row_is_evaluated_by_more_processes_than_rows(tmp_path: Path) -> None:
    tiny = Tiny.write(tmp_path, vision=True, rows=4, val_rows=1)
    found = []
    for processes in (1, 2):
        training = tiny.training(processes=processes, learning_rate=1e-12, max_steps=1)
        found.append(report(training, train(training, tmp_path / "runs", 2, "train_model r")))
    assert [one.eval_rows for one in found] == [1, 1]
    assert found[0].eval_losses == [(1, pytest.approx(found[1].eval_losses[0][1], abs=1e-6))]


@pytest.mark.slow
def test_rows_of_steps_are_right_with_workers_accumulation_and_a_resume_within_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaders fetch ahead; a kill in the second pass, between two checkpoints; a last step with fewer rows."""
    tiny = Tiny.write(tmp_path, vision=False, rows=15, val_rows=2)
    make_fault(monkeypatch, tmp_path, "SIGKILL", "step", 5, rank=1)
    shape = {"per_device_batch_size": 2, "gradient_accumulation_steps": 2, "dataloader_workers": 2}
    training = tiny.training(processes=2, epochs=4, checkpoint_steps=3, evaluation_steps=3, **shape)
    with pytest.raises(PassingError):
        train(training, tmp_path / "runs", 2, "train_model r")
    trained = train(training, tmp_path / "runs", 2, "train_model r")
    assert [step for step, _ in losses_of(training, tmp_path / "runs")] == [1, 2, 3, 4, 4, 5, 6, 7, 8]
    check_rows(tmp_path, trained.folder.path, tiny, steps=range(1, 9), ranks=2)


@pytest.mark.slow
def test_a_trained_tower_needs_no_picture_in_any_row(tmp_path: Path) -> None:
    """DDP fails at the second step if trained weights got no gradient."""
    tiny = Tiny.write(tmp_path, vision=True, mixed=True)
    for split in ("train", "val"):
        file = tmp_path / f"{split}.jsonl"
        file.write_text("".join(f"{row}\n" for row in file.read_text().splitlines() if "images" not in row))
    training = tiny.training(FULL, processes=2, freeze=[], learning_rate=1e-3, max_steps=3)
    train(training, tmp_path / "runs", 2, "train_model r")
    assert [step for step, _ in losses_of(training, tmp_path / "runs")] == [1, 2, 3]


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
