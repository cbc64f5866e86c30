"""A training as it follows from a run's settings, and the launch file that tells it to the other nodes."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from made_accounts import some_stats
from stages.fetch_model import main as fetch_model
from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import QLORA, strategy_of
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.placed import read_model_manifest
from vlmflow.lengths.count import RowLength
from vlmflow.lengths.fit import fit_rows
from vlmflow.lengths.summary import text_digests
from vlmflow.rows.sharegpt import ShareGptRow, Turn
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.launch import Place, command
from vlmflow.supervisor.other_node import MOST_BYTES, Launch, launch_file, read_launch, write_launch
from vlmflow.supervisor.plan import plan_training
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.swift.arguments import BaseModel, Targets, Training, as_data
from workflow_runs import ROOT

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


DATA = TrainingData(Path("/d/train.jsonl"), Path("/d/val.jsonl"), Path("/d/pictures"), "rows", True)
SETTINGS = TrainSettings(max_steps=4, swift_args={"max_grad_norm": 0.5})
TRAINING = Training(DATA, BaseModel(Path("/m"), "qwen3_vl", "model"), SETTINGS, "cuda", 4, strategy_of("ddp"), nodes=2)
JSON = {
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,
        "zero_hpz_partition_size": 8,
    }
}
"""Weights are kept a second time within each node (hpZ), which no test has run."""
OTHERS = [
    TRAINING,
    replace(TRAINING, tuner=QLORA, strategy=strategy_of("zero2")),
    replace(TRAINING, strategy=strategy_of("deepspeed", JSON), nodes=16, processes=8),
    replace(TRAINING, targets=Targets(["all-linear"], ["mlp.experts.down_proj"])),
]


def written(folder: Path, of: Training = TRAINING, **changes: Any) -> Path:
    """Write a launch file into the training's run folder, with some fields changed, also of the training."""
    run_folder = folder / of.digest()
    run_folder.mkdir()
    launch = Launch(
        attempt="job-1",
        session=1,
        order="train",
        endpoint="job-1-0.job-1:29500",
        resume="checkpoint-2",
        training=as_data(of),
    )
    write_launch(run_folder, launch)
    file = launch_file(run_folder, "job-1")
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | changes | {"training": content["training"] | changes.get("training", {})}))
    return file


@pytest.mark.parametrize("training", OTHERS, ids=["ddp", "qlora", "deepspeed", "experts"])
def test_another_node_starts_the_same_command(training: Training, tmp_path: Path) -> None:
    file = written(tmp_path, training)
    read = read_launch(file)
    assert read
    launch, there = read
    folder, place = RunFolder(file.parent), Place(1, launch.endpoint, launch.meeting)
    assert launch.resume == "checkpoint-2"
    resume = folder.output / launch.resume
    assert command(there, folder, resume, place) == command(training, folder, resume, place)


def test_an_attempt_that_is_over_has_no_launch_file(tmp_path: Path) -> None:
    assert read_launch(launch_file(tmp_path, "job-1")) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"command": ["sh"]}, "unknown field `command`"),
        ({"attempt": "job-2"}, "it is of the attempt 'job-2'"),
        ({"order": "run"}, "Invalid enum value 'run'"),
        ({"endpoint": "x; reboot:1"}, "endpoint: 'x; reboot:1'"),
        ({"resume": "../../elsewhere"}, "resume: '../../elsewhere'"),
        ({"training": {"data": as_data(TRAINING)["data"] | {"train": "rows.jsonl"}}}, "not an absolute path"),
        (
            {"training": {"model": as_data(TRAINING)["model"] | {"model_type": "--external_plugins=x"}}},
            "model_type",
        ),
        ({"training": {"settings": {"swift_args": {"external_plugins": "x.py"}}}}, "swift_args"),
        ({"training": {"settings": SETTINGS.model_dump(mode="json") | {"learning_rate": 1}}}, "another digest"),
        (
            {"training": {"strategy": {"name": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 2}, "x": 1}}}},
            "x: a run may not set",
        ),
        ({"training": {"strategy": {"name": "none", "deepspeed": None}}}, "strategy 'none': unknown"),
        ({"training": {"processes": "4"}}, "Expected `int`"),
        ({"training": {"device": "/dev/x"}}, "Invalid enum value '/dev/x'"),
        ({"training": {"command": ["sh"]}}, "unknown field `command`"),
        ({"training": {"processes": 0}}, "nodes, processes and session must be 1 or more"),
    ],
)
def test_what_is_not_a_launch_file_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = written(tmp_path, **changes)
    with pytest.raises(VlmflowError) as refused:
        read_launch(file)
    assert said in refused.value.cause
    assert str(file) in refused.value.cause


def test_a_file_that_is_too_large_or_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    file = launch_file(tmp_path, "job-1")
    for content in (b" " * (MOST_BYTES + 1), b"[" * MOST_BYTES, b"\xff"):
        file.write_bytes(content)
        with pytest.raises(VlmflowError, match="not a launch file"):
            read_launch(file)


def test_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    file = launch_file(tmp_path, "job-1")
    os.mkfifo(file)
    with pytest.raises(VlmflowError, match="it is not a file"):
        read_launch(file)


def test_the_agent_of_another_node_starts_without_the_packages_of_training() -> None:
    """On the tests' cluster its pods have the image `data`; and it starts in a moment."""
    missing = ["torch", "transformers", "tokenizers", "safetensors", "swift", "peft", "datasets"]
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); import vlmflow.supervisor.other_node"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
