"""Every training strategy: its settings, its ms-swift arguments, and its complete checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from checkpoints import checkpoint
from vlmflow.config.run_settings import RunSettings, TrainSettings
from vlmflow.config.strategies import DDP, STRATEGIES, ZERO2, ZERO3, Choices, Strategy, names_on, strategy_of
from vlmflow.config.swift_args import names
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.report import release
from vlmflow.supervisor.run_folder import newest_whole_checkpoint, read_checkpoint
from vlmflow.swift.arguments import BaseModel, Training

SAVED = {
    "ddp": ["optimizer.pt"],
    "zero2": [
        "latest",
        "global_step20/mp_rank_00_model_states.pt",
        "global_step20/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "global_step20/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ],
    "zero3": [
        "latest",
        "global_step20/zero_pp_rank_0_mp_rank_00_model_states.pt",
        "global_step20/zero_pp_rank_1_mp_rank_00_model_states.pt",
        "global_step20/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "global_step20/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ],
    "fsdp2": ["fsdp2_rank_0.pt", "fsdp2_rank_1.pt"],
}
SAVED |= {"zero2_offload": SAVED["zero2"], "zero3_offload": SAVED["zero3"], "deepspeed": SAVED["zero2"]}
"""By strategy, the files that a training with two processes adds to its checkpoint of step 20."""

FILES = [(name, file) for name, files in SAVED.items() for file in ["adapter_model.safetensors", *files]]

OWN = {"zero_optimization": {"stage": 2}}
"""DeepSpeed settings of one's own."""


def resolved(name: str) -> Strategy:
    """Return a strategy as a run has it."""
    return strategy_of(name, OWN if STRATEGIES[name].takes_json else None)


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Strategy:
    return resolved(request.param)


def job(strategy: Strategy, **settings: Any) -> Training:
    data = TrainingData(Path("train.jsonl"), Path("val.jsonl"), Path("pictures"), "digest", last_answer_only=False)
    return Training(data, BaseModel(Path("m"), "qwen3", "digest"), TrainSettings(**settings), "cuda", 2, strategy)


def run(strategy: str, device: str) -> RunSettings:
    own = OWN if STRATEGIES[strategy].takes_json else None
    return RunSettings(
        model="m", dataset="d", strategy=strategy, deepspeed=own, device=device, processes=2, experimental=True
    )


def test_of_every_strategy_it_is_known_what_a_training_saves() -> None:
    assert SAVED.keys() == STRATEGIES.keys()


def test_a_run_accepts_it_only_on_its_devices(strategy: Strategy) -> None:
    for device in ("cuda", "cpu"):
        if device in strategy.devices:
            assert run(strategy.name, device).strategy == strategy.name
        else:
            said = f"strategy {strategy.name} needs device .*; on {device} use {', '.join(names_on(device))}"
            with pytest.raises(ValidationError, match=said):
                run(strategy.name, device)


def test_one_that_shards_needs_gpus() -> None:
    with pytest.raises(ValidationError, match="strategy zero3 needs device cuda; on cpu use ddp"):
        run("zero3", "cpu")
    with pytest.raises(ValueError, match="strategy 'fsdp': unknown; there are ddp, zero2, zero3, zero2_offload"):
        strategy_of("fsdp")


def test_its_arguments_exist_in_ms_swift_and_only_the_workflow_sets_them(strategy: Strategy) -> None:
    words = job(strategy).arguments()
    for name, value in strategy.arguments_for(Choices("bfloat16", gradient_checkpointing=True)).items():
        assert words.count(f"--{name}") == 1
        assert words[words.index(f"--{name}") + 1] == (str(value).lower() if isinstance(value, bool) else str(value))
        assert name in names()["arguments"]
        with pytest.raises(ValidationError, match=r"sets this argument itself \((runs\.NAME\.strategy|train\..*)\)"):
            TrainSettings(swift_args={name: value})


def test_under_zero3_adapters_have_the_type_of_the_run() -> None:
    for name in ("zero3", "zero3_offload"):
        words = job(STRATEGIES[name]).arguments()
        assert words[words.index("--lora_dtype") + 1] == "bfloat16"
        assert "--lora_dtype" not in job(STRATEGIES[name], dtype="float32").arguments()
    assert "--lora_dtype" not in job(ZERO2).arguments()


def test_fsdp2_recomputes_in_place_of_ms_swift() -> None:
    """Both at once would compute each layer three times."""
    for wanted in (True, False):
        words = job(STRATEGIES["fsdp2"], gradient_checkpointing=wanted).arguments()
        assert words[words.index("--gradient_checkpointing") + 1] == "false"
        settings = json.loads(words[words.index("--fsdp") + 1])
        assert settings["fsdp_config"]["activation_checkpointing"] is wanted


def test_no_two_train_in_one_run_folder() -> None:
    every = [*map(resolved, STRATEGIES), strategy_of("deepspeed", OWN | {"wall_clock_breakdown": True})]
    assert len({job(strategy).digest() for strategy in every}) == len(every)


def test_the_doctor_counts_what_each_gpu_holds() -> None:
    counts = {name: strategy.weights_of_each(70_000, 4) for name, strategy in STRATEGIES.items()}
    assert [counts[name] for name in ("ddp", "zero2", "zero3", "fsdp2")] == [70_000, 70_000, 17_500, 17_500]
    assert (counts["zero2_offload"], counts["zero3_offload"]) == (70_000, 0)


def test_what_is_on_the_gpu_and_in_main_memory() -> None:
    assert ZERO2.held("optimizer", 10, 4) == (3, 0)
    assert STRATEGIES["zero2_offload"].held("optimizer", 10, 4) == (0, 3)
    assert STRATEGIES["zero2_offload"].held("weights", 10, 4) == (10, 0)
    assert DDP.held("gradients", 10, 4) == (10, 0)


def test_a_second_copy_of_the_weights_counts_on_each_gpu() -> None:
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "zero_hpz_partition_size": 4}
    strategy = strategy_of("deepspeed", {"zero_optimization": zero})
    assert strategy.weights_of_each(80_000, 8) == 10_000 + 20_000
    assert strategy.held("gradients", 8, 8) == (1, 0)


@pytest.mark.parametrize(
    ("stage", "saved"),
    [(0, ["latest", "global_step20/mp_rank_00_model_states.pt"]), (1, SAVED["zero2"]), (3, SAVED["zero3"])],
)
def test_the_stage_decides_what_a_checkpoint_of_own_settings_has(tmp_path: Path, stage: int, saved: list[str]) -> None:
    strategy = strategy_of("deepspeed", {"zero_optimization": {"stage": stage}})
    folder = checkpoint(tmp_path, 20, states=saved)
    assert read_checkpoint(folder, 2, strategy) is not None
    (folder / saved[-1]).unlink()
    assert read_checkpoint(folder, 2, strategy) is None


def test_its_checkpoint_is_complete(tmp_path: Path, strategy: Strategy) -> None:
    folder = checkpoint(tmp_path, 20, states=SAVED[strategy.name])
    assert newest_whole_checkpoint(tmp_path, 2, strategy) == read_checkpoint(folder, 2, strategy)
    (tmp_path / "handed-on").mkdir()
    release(read_checkpoint(folder, 2, strategy).folder, tmp_path / "handed-on")
    assert len(list((tmp_path / "handed-on").iterdir())) == 2


@pytest.mark.parametrize(("name", "file"), FILES)
@pytest.mark.parametrize("damage", ["cut", "missing", "empty"])
def test_one_with_a_damaged_file_is_not(tmp_path: Path, name: str, file: str, damage: str) -> None:
    folder = checkpoint(tmp_path, 20, states=SAVED[name])
    content = (folder / file).read_bytes()
    (folder / file).unlink()
    if damage != "missing":
        (folder / file).write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    assert read_checkpoint(folder, 2, resolved(name)) is None


def test_every_process_leaves_its_shards(tmp_path: Path) -> None:
    """`latest` and the random states exist, and every file can be read."""
    for strategy in (ZERO2, ZERO3, STRATEGIES["fsdp2"]):
        folder = checkpoint(tmp_path / strategy.name, 20, processes=4, states=SAVED[strategy.name])
        assert read_checkpoint(folder, 4, strategy) is None


def test_a_checkpoint_of_another_strategy_is_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for other, strategy, lacks in ((ZERO3, DDP, "optimizer.pt"), (DDP, ZERO3, "*_optim_states.pt")):
        output = tmp_path / strategy.name / "checkpoints"
        checkpoint(output, 20, states=SAVED[other.name])
        assert newest_whole_checkpoint(output, 2, strategy) is None
        (kept,) = (output.parent / "aside").iterdir()
        assert lacks in caplog.text
        assert read_checkpoint(kept, 2, other) is not None
