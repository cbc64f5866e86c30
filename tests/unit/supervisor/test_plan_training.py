"""A training as it follows from a run's settings, the rows that fit and the base model."""

import shutil
from pathlib import Path

import msgspec
import pytest

from made_stats import some_stats
from stages.fetch_model import main as fetch_model
from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.placed import read_model_manifest
from vlmflow.lengths.count import RowLength
from vlmflow.lengths.fit import fit_rows
from vlmflow.lengths.summary import text_digests
from vlmflow.rows.sharegpt import ShareGptRow, Turn
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.plan import plan_training

ROWS = {"train": 88, "val": 3}


def fitted(folder: Path, model: dict[str, str] | None = None) -> Path:
    """Let ROWS, without pictures, fit into a run's rows."""
    for split, count in ROWS.items():
        row = ShareGptRow("r", "s", [], [1], [], [Turn("human", "Why?"), Turn("gpt", "So.")])
        line = msgspec.json.encode(row) + b"\n"
        (folder / f"{split}.jsonl").write_bytes(line * count)
        lengths = [RowLength("r", number * len(line), (number + 1) * len(line) - 1, 9) for number in range(count)]
        (folder / f"{split}.lengths.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(lengths))
    (folder / "fitted").mkdir()
    data = TrainingData(folder / "train.jsonl", folder / "val.jsonl", folder, "digest", False)
    stats = some_stats(form="conversation", examples=ROWS | {"test": 0})
    files = {split: folder / f"{split}.lengths.jsonl" for split in ROWS}
    fit_rows(data, stats, files, pytest.fail, 100, "refuse", folder / "fitted", model=model)
    return folder / "fitted"


def model(folder: Path) -> Path:
    """Make models/NAME of a folder that nobody loads."""
    (folder / "base").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / "base" / name).write_text("{}")
    fetch_model(model=folder / "model", source=str(folder / "base"), store=folder / "store")
    return folder / "model"


def block(processes: int, **train: int) -> FlatRun:
    """Give the settings of a run on the CPU."""
    return FlatRun.model_construct(
        model_type="qwen3_vl",
        train=TrainSettings(max_length=100, **train),
        device="cpu",
        nodes=1,
        processes=processes,
        strategy="ddp",
        deepspeed=None,
        tuner="lora",
    )


@pytest.mark.parametrize(
    ("train", "processes", "steps"),
    [
        ({}, 1, ("1", "1")),  # 11 steps of 8 rows
        ({"gradient_accumulation_steps": 1}, 2, ("4", "4")),  # 44 steps of 2 rows
        ({"gradient_accumulation_steps": 1, "epochs": 100}, 1, ("100", "500")),
        ({"checkpoint_steps": 5, "evaluation_steps": 10}, 1, ("5", "10")),
    ],
)
def test_the_trainer_saves_and_evaluates_by_the_steps_of_its_run(
    tmp_path: Path, train: dict[str, int], processes: int, steps: tuple[str, str]
) -> None:
    words = plan_training(block(processes, **train), fitted(tmp_path), model(tmp_path), tmp_path, []).arguments()
    assert tuple(words[words.index(name) + 1] for name in ("--save_steps", "--eval_steps")) == steps


def test_fewer_rows_than_processes_are_refused(tmp_path: Path) -> None:
    rows, base = fitted(tmp_path), model(tmp_path)
    with pytest.raises(VlmflowError, match="88 rows for 89 processes"):
        plan_training(block(89), rows, base, tmp_path, [])
    plan_training(block(88), rows, base, tmp_path, [])


@pytest.mark.parametrize("change", ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"])
def test_a_model_with_other_texts_than_the_lengths_is_refused(change: str, tmp_path: Path) -> None:
    """ms-swift's chat template is found by them: the training would have other tokens than those that were compared."""
    base = model(tmp_path)
    folder = read_model_manifest(base).folder
    same = text_digests(folder)
    plan_training(block(1), fitted(tmp_path, same), base, tmp_path, [])
    shutil.rmtree(tmp_path / "fitted")
    rows = fitted(tmp_path, same | {change: "other"})
    with pytest.raises(VlmflowError, match=rf"{change}: is another file than when the lengths of .*fitted were"):
        plan_training(block(1), rows, base, tmp_path, [])
