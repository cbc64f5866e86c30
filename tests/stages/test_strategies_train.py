"""All strategies, also those for GPUs, trained by two processes on this machine's cores; most other tests train ddp.

Each training is killed, and resumed to the same bytes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file

from tiny_trainings import Tiny
from trainer_faults import COUNT, DEEPSPEED, FSDP2, KILL, before_trainers
from vlmflow.config.deepspeed_json import BLOCKS, OWN_CHECK, check_deepspeed
from vlmflow.config.strategies import DDP, STRATEGIES, Strategy, strategy_of
from vlmflow.core.account import read_account
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.in_trainer.messages import DIGESTS, Begin, Event, Log, SavedDigests, read_events, rows_of_step
from vlmflow.supervisor.run_folder import SAFE, ForeignCodeError, refuse_foreign_code
from vlmflow.supervisor.train import Trained, train
from vlmflow.swift.arguments import Training

DRIFT = """
import os, sys
if "-m" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv and os.environ.get("RANK") == "1":
    import torch, transformers
    step = transformers.Trainer.training_step

    def training_step(self, model, *args, **kwargs):
        loss = step(self, model, *args, **kwargs)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(weight.requires_grad)
        return loss

    transformers.Trainer.training_step = training_step
"""
"""Make the second process train other weights."""

SCALED = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"

STEPS = 4
"""Optimizer steps of a training, with a checkpoint after half of them."""


def own(stage: int, **zero: Any) -> Strategy:
    """Strategy deepspeed with settings of one's own."""
    gathers = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    settings = {"zero_optimization": {"stage": stage, **gathers, **zero}}
    return strategy_of("deepspeed", check_deepspeed(settings))


SHARDED = {
    **{name: STRATEGIES[name] for name in ("zero2", "zero3", "fsdp2")},
    "deepspeed": own(3, overlap_comm=True, stage3_prefetch_bucket_size=1000),
}
"""Strategies of which each run of the tests trains all but zero3: deepspeed has stage 3, too."""

ALL = SHARDED | {
    "zero2_offload": STRATEGIES["zero2_offload"],
    "zero3_offload": STRATEGIES["zero3_offload"],
    **{f"deepspeed {stage}": own(stage) for stage in (0, 1, 2)},
}


SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "checkpoint_steps": STEPS // 2,
    "evaluation_steps": STEPS // 2,
    "gradient_accumulation_steps": 2,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny.write(tmp_path_factory.mktemp("text"), vision=False)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Return a Qwen3-VL with rows of which only some have a picture: processes that gather its tower must agree."""
    return Tiny.write(tmp_path_factory.mktemp("seeing"), vision=True, mixed=True)


def training_of(tiny: Tiny, strategy: Strategy, **settings: Any) -> Training:
    return tiny.training(strategy=strategy, processes=2, **SETTINGS | settings)


@pytest.fixture
def on_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    before_trainers(tmp_path, DEEPSPEED + FSDP2 + KILL + COUNT, monkeypatch)
    return monkeypatch


def killed_and_resumed(training: Training, folder: Path, patch: pytest.MonkeyPatch) -> Trained:
    """Train twice: until all trainers are killed in the last save, and from the checkpoint before it.

    Checks that both have the same losses, from that checkpoint on, and save the same adapter.
    """
    steps = training.settings.max_steps
    patch.setenv("VLMFLOW_TEST_KILL_IN_SAVE", f"{steps} {folder / 'killed'}")
    with pytest.raises(PassingError, match=r"SIGKILL|trainers ended with code"):
        train(training, folder / "runs", 2, "train_model r")
    patch.delenv("VLMFLOW_TEST_KILL_IN_SAVE")
    checkpoints = folder / "runs" / training.digest() / "checkpoints"
    unbroken = (checkpoints / f"checkpoint-{steps}" / "adapter_model.safetensors").read_bytes()
    if training.strategy.engine == "deepspeed":
        refused_with_foreign_code(training, folder / "runs", checkpoints / f"checkpoint-{steps // 2}")
    trained = train(training, folder / "runs", 2, "train_model r")
    before, after = sessions(read_events(trained.folder.progress))
    assert after, "the second session resumed"
    assert [figures for figures in before if figures[0] > steps // 2] == after
    saved = trained.last.folder / "adapter_model.safetensors"
    assert saved.read_bytes() == unbroken
    assert any(tensor.abs().sum() for name, tensor in load_file(saved).items() if "lora_B" in name), "it is trained"
    return trained


class Harmful:
    """Runs a command when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch pickle-ran",)


def refused_with_foreign_code(training: Training, runs: Path, checkpoint: Path) -> None:
    """Check that a training does not resume from a checkpoint while one of its files would run a command."""
    (tag,) = checkpoint.glob("global_step*")
    torch.save({"x": Harmful()}, tag / "other_states.pt")
    with pytest.raises(ForeignCodeError, match=r"other_states\.pt: would call posix\.system when it is loaded"):
        train(training, runs, 2, "train_model r")
    (tag / "other_states.pt").unlink()


def named_in(checkpoint: Path) -> set[str]:
    """Return what the files of DeepSpeed in a checkpoint name besides what torch itself takes for safe."""
    files = checkpoint.glob("global_step*/*")
    return {name for file in files for name in torch.serialization.get_unsafe_globals_in_checkpoint(file)}


def sessions(events: list[Event]) -> list[list[tuple[Any, ...]]]:
    """Return the losses and gradient norms of each session, by step; training first, then validation."""
    found: list[list[tuple[Any, ...]]] = []
    for event in events:
        if isinstance(event, Begin):
            found.append([])
        elif isinstance(event, Log) and (isinstance(event.loss, float) or isinstance(event.eval_loss, float)):
            found[-1].append((event.step, event.loss, event.eval_loss, event.grad_norm, event.learning_rate))
    return found


@pytest.mark.parametrize(
    "name", [name if name != "zero3" else pytest.param(name, marks=pytest.mark.slow) for name in SHARDED]
)
def test_a_killed_training_resumes_exactly(text: Tiny, name: str, tmp_path: Path, on_cores: pytest.MonkeyPatch) -> None:
    """With two micro-batches in a step on each process, and dropout."""
    if name == "fsdp2":
        on_cores.setenv("VLMFLOW_TEST_COUNT_GATHERED", str(tmp_path / "gathered"))
    quick = {"max_steps": 2, "checkpoint_steps": 1, "evaluation_steps": 1, "gradient_accumulation_steps": 3}
    quick |= {"micro_batch_tokens": 80}
    trained = killed_and_resumed(training_of(text, SHARDED[name], **quick), tmp_path, on_cores)
    assert [len(batches) for batches in rows_of_step(trained.folder.path, 2).values()] == [2, 2]
    states = {file.name for pattern in ("*.pt", "*.pth") for file in trained.last.folder.rglob(pattern)}
    digests = read_account(trained.last.folder / DIGESTS, SavedDigests)
    assert {Path(file).name for file in digests.records} == states > {"scheduler.pt", "rng_state_0.pth"}
    if name == "zero2":
        assert named_in(trained.last.folder) == set(SAFE) - {SCALED}, "all of them are needed"
    if name == "fsdp2":
        (weights,) = trained.last.folder.glob("*.safetensors")
        gathered = int((tmp_path / "gathered").read_text())
        assert 0 < gathered < 4 * weights.stat().st_size, "of the base, nothing is gathered"


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("base", ["text", "seeing"])
def test_every_strategy_resumes_exactly_with_both_models(
    name: str, base: str, tmp_path: Path, on_cores: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    killed_and_resumed(training_of(request.getfixturevalue(base), ALL[name]), tmp_path, on_cores)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["text", "seeing"])
def test_fsdp2_trains_what_ddp_does(
    base: str, tmp_path: Path, on_cores: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """In 32 bits, with dropout and recomputed layers."""
    made: Tiny = request.getfixturevalue(base)
    settings = {"dtype": "float32", "gradient_checkpointing": True, "lora": {"dropout": 0.2}}
    figures, weights = {}, {}
    for strategy in (DDP, STRATEGIES["fsdp2"]):
        trained = train(training_of(made, strategy, **settings), tmp_path / strategy.name, 2, "train_model r")
        (figures[strategy.name],) = sessions(read_events(trained.folder.progress))
        weights[strategy.name] = load_file(trained.last.folder / "adapter_model.safetensors")
    for one, other in zip(figures["ddp"], figures["fsdp2"], strict=True):
        assert [value for value in one if isinstance(value, float)] == pytest.approx(
            [value for value in other if isinstance(value, float)], rel=1e-5
        )
    assert weights["ddp"].keys() == weights["fsdp2"].keys()
    for name, tensor in weights["ddp"].items():
        torch.testing.assert_close(weights["fsdp2"][name], tensor, rtol=1e-3, atol=1e-6)


SCALER = """
import sys, torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
names = ("init_scale", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")
how = {"static_loss_scale": 0, "dynamic_scaling": True, "dynamic_loss_args": dict.fromkeys(names, 1)}
torch.save({"loss_scaler": CreateLossScaler(dtype=torch.float16, **how)}, sys.argv[1])
"""


@pytest.mark.slow
def test_training_in_float16_saves_another_scaler(tmp_path: Path) -> None:
    """DeepSpeed trains in float16 only on GPUs."""
    folder = tmp_path / "checkpoint-1" / "global_step1"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text("global_step1")
    subprocess.run([sys.executable, "-c", SCALER, folder / "x_states.pt"], check=True)
    assert named_in(folder.parent) == {SCALED}
    refuse_foreign_code(folder.parent)


TAKEN = """
import json, sys
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
zero = "zero_optimization"
models = {zero: DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
models |= {f"{zero}.offload_param": DeepSpeedZeroOffloadParamConfig}
models |= {f"{zero}.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig}
taken = {path: [field.alias or name for name, field in model.model_fields.items()] for path, model in models.items()}
for path, key, value in json.loads(sys.argv[1]):
    models[path](**{key: value})
print(json.dumps(taken))
"""
"""Make each of DeepSpeed's blocks with each value, and print their keys."""


def ends_of(schema: dict[str, Any]) -> list[Any]:
    """Return the values at the ends of what a JSON Schema allows."""
    if "anyOf" in schema:
        return [value for branch in schema["anyOf"] for value in ends_of(branch)]
    return {"boolean": [True, False], "null": [None]}.get(schema["type"]) or [schema["minimum"], schema["maximum"]]


@pytest.mark.slow
def test_the_settings_that_a_run_may_set_are_deepspeeds() -> None:
    """DeepSpeed has no classes for keys outside of blocks."""
    blocks = {path: block for path, block in BLOCKS.items() if path}
    values = [
        (path, key, value)
        for path, block in blocks.items()
        for key, kind in block.items()
        if kind is not OWN_CHECK
        for value in ends_of(TypeAdapter(kind).json_schema())
    ]
    command = [sys.executable, "-c", TAKEN, json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout.splitlines()[-1])
    assert taken.keys() == blocks.keys()
    for path, keys in taken.items():
        assert not blocks[path].keys() - set(keys)


def test_processes_that_hold_different_adapters_save_none(
    text: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_trainers(tmp_path, DRIFT, monkeypatch)
    with pytest.raises(VlmflowError, match="not really distributed: 2 different sets of trained weights at one step"):
        train(training_of(text, DDP), tmp_path / "runs", 2, "train_model r")
    assert not list((tmp_path / "runs").rglob("adapter_model.safetensors"))


@pytest.mark.slow
def test_a_strategy_that_is_not_at_work_is_refused(text: Tiny, tmp_path: Path) -> None:
    """On the CPU accelerate trains plain DDP in place of FSDP2."""
    with pytest.raises(VlmflowError, match="strategy fsdp2 is not at work: the model is a DistributedDataParallel"):
        train(training_of(text, STRATEGIES["fsdp2"]), tmp_path / "runs", 2, "train_model r")
