"""What the real trainer does with our rows, and how its refusals are reported."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP, LORA
from vlmflow.core.errors import VlmflowError
from vlmflow.in_trainer import process as trainer
from vlmflow.in_trainer.messages import Orders
from vlmflow.lengths.count import TokenCounter, measure_rows
from vlmflow.pictures.manifest import read_picture_manifest
from vlmflow.raw.json_file import JsonRows
from vlmflow.rows.forms.fire import read_trajectory
from vlmflow.rows.training_data import TrainingData
from vlmflow.rows.trajectories import Trajectory, timestep_rows, trajectory_row
from vlmflow.supervisor.train import train
from vlmflow.swift.arguments import BaseModel, Training
from warm_programs import fresh_torchrun
from workflow_runs import ROOT, RUN, STEPS, command, copy_folder, snakemake, words_of

TEMPLATE = """
import json, sys
from swift import get_processor, get_template
model, *pairs = sys.argv[1:]
roles = {"human": "user", "gpt": "assistant"}
for rows, loss_scale in zip(pairs[::2], pairs[1::2]):
    template = get_template(get_processor(model, model_type="qwen3_vl"), max_length=8192, loss_scale=loss_scale)
    template.set_mode("train")
    for line in open(rows):
        row = json.loads(line)
        messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        encoded = template.encode({"messages": messages, "images": row["images"]})
        trained = [token for token in encoded["labels"] if token != -100]
        print(json.dumps([len(encoded["input_ids"]), template.tokenizer.decode(trained)]), flush=True)
"""


def encoded_by_ms_swift(demo_run: Path, home: Path, scales: dict[Path, str]) -> list[tuple[int, str]]:
    """Return the number of tokens that ms-swift's template makes of rows, and the trained text.

    home: where it may write. scales: the loss scale for each file of rows.
    """
    files = [word for rows, loss_scale in scales.items() for word in (str(rows), loss_scale)]
    done = subprocess.run(
        [sys.executable, "-c", TEMPLATE, str(demo_run / "tiny-model"), *files],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ
        | {
            "HF_HUB_OFFLINE": "1",
            "USE_HF": "1",
            "IMAGE_MAX_TOKEN_NUM": "5",
            "ROOT_IMAGE_DIR": str(demo_run / "stores" / "pictures" / "fire"),
            "HOME": str(home),
        },
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_lengths_are_those_of_the_trainer(demo_run: Path, tmp_path: Path) -> None:
    """Text, chat marks and picture tokens after the budget, for every row, to the token."""
    rows = demo_run / "data" / "fire" / "val.jsonl"
    entries = read_picture_manifest(demo_run / "images" / "fire" / "train.jsonl")
    lengths = list(measure_rows(rows, TokenCounter(demo_run / "tiny-model", entries, image_max_tokens=5), processes=2))
    expected = [tokens for tokens, _ in encoded_by_ms_swift(demo_run, tmp_path, {rows: "default"})]
    assert [row.tokens for row in lengths] == expected
    assert len(expected) > 10


def test_all_answers_are_trained_or_only_the_last(demo_run: Path, tmp_path: Path) -> None:
    """The trajectory form trains every answer, the timestep form only its target; neither trains feedback."""
    with JsonRows(demo_run / "raw" / "fire" / "FIRE-test.json") as raw:
        read = (read_trajectory(row) for row in raw)
        trajectory = next(found for found in read if isinstance(found, Trajectory) and len(found.attempts) == 3)
    answers = [attempt.answer for attempt in trajectory.attempts]
    made = {"default": [trajectory_row("t", trajectory)], "last_round": timestep_rows("t", trajectory, None)}
    files = {tmp_path / f"{loss_scale}.jsonl": loss_scale for loss_scale in made}
    for file, rows in zip(files, made.values(), strict=True):
        lines = [[{"from": turn.speaker, "value": turn.value} for turn in row.conversations] for row in rows]
        file.write_text("\n".join(json.dumps({"conversations": turns, "images": rows[0].images}) for turns in lines))
    encoded = encoded_by_ms_swift(demo_run, tmp_path, files)
    trained = [text.replace("<|im_end|>\n", "\n").strip() for _, text in encoded]
    assert trained == ["\n".join(answers), *answers]


def job(demo_run: Path, **settings: Any) -> Training:
    quick = {
        "max_steps": 2,
        "checkpoint_steps": 1,
        "evaluation_steps": 1,
        "dtype": "float32",
        "image_max_tokens": 16,
        "dataloader_workers": 0,
    }
    quick |= {"gradient_checkpointing": False, "gradient_accumulation_steps": 1}
    data = demo_run / "data" / "fire"
    pictures = demo_run / "stores" / "pictures" / "fire"
    return Training(
        TrainingData(data / "val.jsonl", data / "val.jsonl", pictures, "digest", last_answer_only=False),
        BaseModel(demo_run / "tiny-model", "qwen3_vl", "digest"),
        TrainSettings(**quick | settings),
        device="cpu",
        processes=1,
        strategy=DDP,
    )


def test_an_over_long_row_stops_the_trainer_with_our_own_message(demo_run: Path, tmp_path: Path) -> None:
    """Strict: no row is replaced or cut, and the error says what to change."""
    with pytest.raises(VlmflowError) as error:
        train(job(demo_run, max_length=40), tmp_path, threads=2, label="train_model r")
    assert "max_length" in error.value.cause
    assert error.value.next_step.startswith("raise runs.NAME.train.max_length")
    assert "Traceback" not in str(error.value)


def test_a_further_argument_with_a_value_that_ms_swift_refuses_is_named(demo_run: Path, tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=r"argument --adam_beta1.*'many'") as error:
        train(job(demo_run, swift_args={"adam_beta1": "many"}), tmp_path, threads=2, label="train_model r")
    assert "swift_args" in error.value.next_step


def test_processes_that_do_not_train_together_are_noticed(demo_run: Path, tmp_path: Path) -> None:
    """One process instead of two: ms-swift itself would train, and end with code 0."""
    lone = job(demo_run)
    rows = lone.data.train
    paths = {"model": demo_run / "tiny-model", "dataset": rows, "val_dataset": rows, "output_dir": tmp_path / "o"}
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "-m", trainer.__name__]
    orders = Orders(
        folder=str(tmp_path),
        starter=os.getpid(),
        processes=2,
        batches_per_step=1,
        tuner=LORA.name,
        strategy=DDP.name,
        early_stop_after=None,
    )
    done = subprocess.run(
        [sys.executable, *torchrun, orders.as_word(), *words, *lone.arguments()],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("scripts", "tests/helpers/warm")),
            "HF_HUB_OFFLINE": "1",
            "USE_HF": "1",
            "ROOT_IMAGE_DIR": str(lone.data.pictures),
            "HOME": str(tmp_path),
        },
    )
    assert done.returncode != 0
    assert "not really distributed: world size 1 of 2" in done.stderr
    assert not list((tmp_path / "o").glob("checkpoint-*"))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_programs")
def test_a_full_disk_stops_the_training_which_resumes_when_there_is_room(demo_run: Path, tmp_path: Path) -> None:
    """The incomplete checkpoint does not count; steps and losses continue from the previous one."""
    folder = copy_folder(demo_run, tmp_path / "demo_run")
    shutil.rmtree(folder / "checkpoints" / RUN / "full")
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "--map-root-user",
            sys.executable,
            str(ROOT / "tests" / "helpers" / "full_disk.py"),
            str(folder),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_training_saves_and_resumes(demo_run: Path, tmp_path: Path, sent: signal.Signals) -> None:
    """Ctrl-C as a terminal sends it, to the whole group; SIGTERM as a pod's end does, to the stage."""
    folder = copy_folder(demo_run, tmp_path / "demo_run")
    shutil.rmtree(folder / "checkpoints" / RUN / "full")
    shutil.rmtree(folder / "stores" / "runs" / RUN / "full")
    words = command(folder, "--allowed-rules", "train_model", "--", f"checkpoints/{RUN}/full")
    with (
        fresh_torchrun(),
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as first,
    ):
        while steps_logged(folder) < 2:
            assert first.poll() is None, first.stdout.read()
            time.sleep(0.05)
        if sent == signal.SIGINT:
            os.killpg(first.pid, sent)
        else:
            (stage,) = [child for child in psutil.Process(first.pid).children() if "train_model" in words_of(child)]
            stage.send_signal(sent)
        said = first.stdout.read()
    assert first.returncode != 0
    assert "to save a checkpoint and end: 2 trainers" in said, said[-3000:]
    # There may be one of a third step; no completed step may be lost.
    saved = folder.glob(f"stores/runs/{RUN}/full/*/checkpoints/checkpoint-*/trainer_state.json")
    step = max(json.loads(state.read_text())["global_step"] for state in saved)
    assert 2 <= step == steps_logged(folder) < STEPS
    (rows,) = folder.glob(f"stores/runs/{RUN}/full/*/cache/datasets")
    (rows / "planted").touch()
    assert f"resuming from step {step} of {STEPS}" in snakemake(folder, *words[words.index("--allowed-rules") :])
    report = json.loads((folder / "checkpoints" / RUN / "full" / "report.json").read_text())
    assert [number for number, _ in report["losses"]] == list(range(1, STEPS + 1))
    assert report["sessions"] == 2
    assert not (rows / "planted").exists(), "whoever writes there would decide what is trained"


def steps_logged(folder: Path) -> int:
    logs = list(folder.glob(f"stores/runs/{RUN}/full/*/progress.jsonl"))
    return logs[0].read_text().count('"loss"') if logs else 0
