from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from made_accounts import TRAINING_DATA as DATA
from made_accounts import some_training as job
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import STRATEGIES, TUNERS
from vlmflow.config.swift_args import SET_BY_THE_WORKFLOW
from vlmflow.core.errors import VlmflowError
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.launch import command, environment, refuse_small_shared_memory, shared_memory_needed
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.supervisor.train import refuse_slow_torch
from vlmflow.supervisor.watch import end_of_whole_lines
from vlmflow.swift.arguments import Targets


def value(arguments: list[str], name: str) -> str | None:
    return arguments[arguments.index(f"--{name}") + 1] if f"--{name}" in arguments else None


def test_what_a_model_with_experts_adapts_is_named_and_in_the_digest() -> None:
    plain = job()
    assert "--target_parameters" not in plain.arguments()
    own = replace(plain, targets=Targets(["q_proj", "k_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
    words = " ".join(own.arguments())
    assert " --target_modules q_proj k_proj " in words
    assert " --target_parameters mlp.experts.gate_up_proj mlp.experts.down_proj " in words
    assert own.digest() != plain.digest() == replace(plain, targets=None).digest()


def test_the_trainer_is_strict_and_uses_no_network() -> None:
    """Broken and over-long rows stop ms-swift instead of being replaced; no network."""
    arguments = job().arguments()
    assert value(arguments, "strict") == "true"
    assert value(arguments, "check_model") == "false"
    env = environment(job(), RunFolder(Path("run")), threads=8)
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["USE_HF"] == "1"
    assert {env[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"2"}
    assert env["ROOT_IMAGE_DIR"] == str(Path("pictures/fire").absolute())


@pytest.mark.parametrize(
    ("device", "strategy", "expected"),
    [
        ("cpu", "ddp", {"use_cpu": "true", "ddp_backend": "gloo", "deepspeed": None}),
        ("cuda", "ddp", {"use_cpu": None, "ddp_backend": "nccl", "deepspeed": None}),
        ("cuda", "zero2", {"use_cpu": None, "ddp_backend": "nccl", "deepspeed": "zero2"}),
        ("cuda", "zero3", {"use_cpu": None, "ddp_backend": "nccl", "deepspeed": "zero3"}),
    ],
)
def test_strategies_are_ms_swifts_own_flags(device: str, strategy: str, expected: dict[str, str | None]) -> None:
    arguments = job(device, strategy=strategy).arguments()
    assert {name: value(arguments, name) for name in expected} == expected


def test_32_bit_weights_are_trained_in_32_bits() -> None:
    """ms-swift would use fp16 with them (swift/arguments/base_args/model_args.py, `_init_mixed_precision`)."""
    for dtype, flags in (
        ("float32", ("false", "false")),
        ("bfloat16", ("false", "true")),
        ("float16", ("true", "false")),
    ):
        arguments = job(dtype=dtype).arguments()
        assert (value(arguments, "fp16"), value(arguments, "bf16")) == flags


def test_a_hang_ends_and_nobody_loads_the_best_checkpoint() -> None:
    """Loading it is collective, but each rank would decide alone; ms-swift's own timeout is 208 days."""
    arguments = job().arguments()
    assert value(arguments, "ddp_timeout") == "1800"
    assert value(arguments, "load_best_model_at_end") is None
    assert value(arguments, "metric_for_best_model") == "loss"


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        ({}, "500"),
        ({"checkpoint_steps": 60}, "540"),
        ({"evaluation_steps": 250}, "300"),
        ({"checkpoint_steps": 7, "evaluation_steps": 7}, "7"),
        ({"checkpoint_steps": 10, "evaluation_steps": 3}, "10"),
    ],
)
def test_every_evaluated_step_is_saved(settings: dict[str, int], every: str) -> None:
    assert value(job(**settings).arguments(), "eval_steps") == every


@pytest.mark.parametrize("steps", [*range(1, 130), 164, 199, 999, 1_001, 4_999, 5_000, 6_000, 123_456])
def test_a_run_is_evaluated_ten_times_where_its_steps_allow_it(steps: int) -> None:
    """And saved at each of them; a long run as before, and hardly more often than ten times."""
    settings = TrainSettings().scheduled(steps)
    assert settings.evaluate_every % settings.save_every == 0
    assert settings.evaluation_steps == settings.evaluate_every
    assert settings.checkpoint_steps == settings.save_every <= 100
    evaluations = -(-steps // settings.evaluate_every)
    assert evaluations >= min(10, steps)
    assert evaluations < 20 or settings.evaluate_every == 500
    assert settings.scheduled(9) == settings, "what is decided stays"
    if steps >= 5_000:
        assert (settings.save_every, settings.evaluate_every) == (100, 500)


@pytest.mark.parametrize("steps", [6, 44, 700, 10**6])
@pytest.mark.parametrize(
    "given", [{"checkpoint_steps": 20}, {"evaluation_steps": 30}, {"checkpoint_steps": 100, "evaluation_steps": 500}]
)
def test_steps_that_are_configured_stay(given: dict[str, int], steps: int) -> None:
    settings = TrainSettings(**given).scheduled(steps)
    assert {key: getattr(settings, key) for key in given} == given
    assert settings.evaluate_every % settings.save_every == 0


BREAKING = (
    *("adapters", "auto_find_batch_size", "cached_dataset", "cached_val_dataset", "columns", "custom_dataset_info"),
    *("custom_register_path", "dataloader_drop_last", "deepspeed", "deepspeed_autotp_size", "early_stop_interval"),
    *("enable_jit_checkpoint", "eval_on_start", "external_plugins", "fsdp", "fsdp_config", "hub_token"),
    *("ignore_data_skip", "label_names", "lisa_activated_layers", "load_args", "load_best_model_at_end"),
    *("load_data_args", "local_repo_path", "logging_dir", "logging_strategy", "max_epochs", "model_kwargs"),
    *("new_special_tokens", "num_labels", "packing_length", "packing_num_proc", "packing_strategy", "push_to_hub"),
    *("resume_only_model", "rope_scaling", "router_aux_loss_coef", "safe_serialization", "save_only_model"),
    *("split_dataset_ratio", "streaming", "swanlab_secret", "swanlab_token", "swanlab_webhook_url"),
    *("target_parameters", "task_type", "tuner_backend", "use_flash_ckpt", "use_galore", "use_swift_lora"),
    *("warmup_steps", "zero_hpz_partition_size"),
    *("use_chat_template", "init_strategy", "device_map", "response_prefix", "template_backend"),
)


@pytest.mark.parametrize("name", BREAKING)
def test_arguments_that_break_a_run_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        TrainSettings(swift_args={name: 1})
    assert [fault["loc"] for fault in refusal.value.errors()] == [("swift_args", name, "[key]")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_weights", "pissa"),
        ("system", "a\0b"),
        ("system", "a\ud800b"),
        ("adam_beta1", float("nan")),
        ("adam_beta1", float("-inf")),
    ],
)
def test_values_that_break_a_run_are_refused_by_name(name: str, value: str | float) -> None:
    with pytest.raises(ValidationError, match=f"Value error, {name}: "):
        TrainSettings(swift_args={name: value})


@pytest.mark.parametrize("value", ["gaussian", True])
def test_first_weights_that_leave_the_base_as_it_is_are_taken(value: str | bool) -> None:
    assert TrainSettings(swift_args={"init_weights": value}).swift_args == {"init_weights": value}


def test_torchrun_starts_one_worker_per_process() -> None:
    words = command(job(processes=2), RunFolder(Path("run")), Path("run/checkpoints/checkpoint-3"))
    assert words[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert value(words, "resume_from_checkpoint") == str(Path("run/checkpoints/checkpoint-3").absolute())
    assert value(words, "output_dir") == str(Path("run/checkpoints").absolute())


def test_the_timestep_form_trains_only_its_last_answer() -> None:
    timestep = TrainingData(DATA.train, DATA.val, DATA.pictures, DATA.digest, last_answer_only=True)
    assert value(job(data=timestep).arguments(), "loss_scale") == "last_round"
    assert value(job().arguments(), "loss_scale") == "default"


def test_the_digest_changes_with_what_matters_and_with_no_path() -> None:
    same = job().digest()
    moved = TrainingData(Path("x"), Path("y"), Path("z"), DATA.digest, False)
    assert job(data=moved).digest() == same
    other_data = TrainingData(DATA.train, DATA.val, DATA.pictures, "other", False)
    for changed in (
        job(learning_rate=2e-4),
        job(processes=2),
        job(device="cpu"),
        job(strategy="zero2"),
        job(image_max_tokens=64),
        job(swift_args={"use_cache": True}),
        job(early_stop_after=3),
        job(data=other_data),
    ):
        assert changed.digest() != same


def test_further_arguments_are_passed_on_and_cannot_undo_ours() -> None:
    """The configuration refuses every argument that any training sets."""
    assert value(job(swift_args={"use_cache": True}).arguments(), "use_cache") == "true"
    jobs = [job(strategy=name) for name in STRATEGIES]
    jobs += [replace(job(), tuner=tuner) for tuner in TUNERS.values()]
    jobs += [job(device="cpu"), job(max_steps=1), replace(job(), targets=Targets(["q_proj"], ["down_proj"]))]
    words = [word for one in jobs for word in command(one, RunFolder(Path("run")), resume=Path("checkpoint-1"))]
    torchruns = {"standalone", "nproc_per_node=4"}
    assert {word[2:] for word in words if word.startswith("--")} - torchruns == set(SET_BY_THE_WORKFLOW)


@pytest.mark.parametrize(
    ("name", "text"),
    [("use_cache", "--model=/another"), ("agent_template", "--push_to_hub"), ("system", "-- Hello")],
)
def test_a_text_that_looks_like_an_argument_stays_a_value(name: str, text: str) -> None:
    """ms-swift takes the word behind a name that needs no value for an argument of its own."""
    arguments = job(swift_args={name: text}).arguments()
    assert f"--{name}={text}" in arguments
    assert text not in arguments
    with pytest.raises(ValidationError, match="target_modules"):
        TrainSettings(lora={"target_modules": ["all-linear", text]})


def test_a_slow_torch_is_refused() -> None:
    """Qwen3-VL's vision tower on torch 2.9."""
    refuse_slow_torch("2.13.0")
    refuse_slow_torch("2.90.0")
    with pytest.raises(VlmflowError, match=r"torch 2\.9\.1"):
        refuse_slow_torch("2.9.1")


def test_small_shared_memory_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Two batches per worker of the loaders of train and val, with a picture's pixels as the processor returns them."""
    settings = TrainSettings(dataloader_workers=4, image_max_tokens=1024)
    assert shared_memory_needed(settings, 4) == 4 * 2 * 4 * 2 * (4096 * 1536 * 4)
    with pytest.raises(VlmflowError, match="dataloader_workers to 0"):
        refuse_small_shared_memory(settings, 10_000_000, folder=tmp_path)
    refuse_small_shared_memory(TrainSettings(dataloader_workers=0), 10_000_000, folder=tmp_path)


def test_a_progress_line_that_a_full_disk_cut_is_replaced(tmp_path: Path) -> None:
    """Otherwise the next session would write after the incomplete line, and no report could be made."""
    progress = tmp_path / "progress.jsonl"
    assert end_of_whole_lines(progress) == 0
    progress.write_text('{"event": "begin"}\n{"event": "lo')
    assert end_of_whole_lines(progress) == 19
    assert progress.read_text() == '{"event": "begin"}\n'
