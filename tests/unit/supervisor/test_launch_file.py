"""The launch file, which tells the other nodes of a training what to train, and is checked as data."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import QLORA, strategy_of
from vlmflow.core.errors import VlmflowError
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.launch import Place, command
from vlmflow.supervisor.other_node import MOST_BYTES, Launch, launch_file, read_launch, write_launch
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.swift.arguments import BaseModel, Targets, Training, as_data
from workflow_runs import ROOT

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
