import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from made_rows import form_rows
from vlmflow.config.model import Config, check_config
from vlmflow.config.raw_forms import table
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import STRATEGIES
from vlmflow.config.tables import read_sources
from vlmflow.core.errors import VlmflowError
from vlmflow.rows.chat import REASONS
from vlmflow.tools.make_docs import reference_page, with_kinds
from workflow_runs import ROOT

BASE = {
    "models": {"m": {"source": "hf://Qwen/Qwen3-8B", "model_type": "qwen3"}},
    "datasets": {"fire": {"kind": "fire", "train": "a.json"}},
    "runs": {"r": {"model": "m", "dataset": "fire"}},
}
RUN = BASE["runs"]["r"]
FIRE: dict[str, Any] = {"kind": "fire", "train": "a.json"}
TEXTS = FIRE | {"kind": "alpaca", "modality": "text"}
SPLIT_ROWS = {"sequence_parallel": 2, "attention": "flash_attention_2", "rows_per_step": 8}


def with_value(path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    place = config
    for key in parents:
        place = place.setdefault(key, {})
    place[last] = value
    return config


def fault(tmp_path: Path, path: str, value: Any) -> str:
    file = tmp_path / "my-run.yaml"
    config = with_value(path, value)
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(VlmflowError) as error:
        check_config(config, [ROOT / "config.yaml", file])
    assert "\n" not in error.value.cause
    return error.value.cause


def test_a_base_may_be_the_weights_of_another_run_but_not_in_a_circle() -> None:
    config = with_value("models.mine", {"source": "merged/r", "model_type": "qwen3"})
    config["runs"]["second"] = RUN | {"model": "mine"}
    assert check_config(copy.deepcopy(config), []).models["mine"].source == "merged/r"
    config["models"]["mine"]["dequantize"] = True
    with pytest.raises(VlmflowError, match=r"models\.mine\.dequantize: the weights of a run are not quantised"):
        check_config(copy.deepcopy(config), [])
    del config["models"]["mine"]["dequantize"]
    config["models"]["m"]["source"] = "merged/second"
    said = "models.m.source: run r is trained from merged/second; run second is trained from merged/r: no run can"
    with pytest.raises(VlmflowError, match=said):
        check_config(config, [])


def test_the_shipped_configuration_is_valid() -> None:
    config = check_config(yaml.safe_load((ROOT / "config.yaml").read_text()), [ROOT / "config.yaml"])
    runs = {name: (run.processes, config.models[run.model].source) for name, run in config.runs.items()}
    assert runs == {
        "qwen3vl-fire": (4, "hf://Qwen/Qwen3-VL-32B-Instruct"),
        "qwen3vl-fire-good": (4, "hf://Qwen/Qwen3-VL-32B-Instruct"),
        "qwen3vl-fire-general": (4, "hf://Qwen/Qwen3-VL-32B-Instruct"),
        "qwen3vl-feedback": (4, "hf://Qwen/Qwen3-VL-32B-Instruct"),
        "qwen3vl-volcano": (4, "hf://Qwen/Qwen3-VL-32B-Instruct"),
        "qwen3-alpaca": (2, "hf://Qwen/Qwen3-8B"),
        "llama-alpaca": (1, "hf://meta-llama/Llama-3.2-3B-Instruct"),
        "qwen3-30b-alpaca": (8, "hf://Qwen/Qwen3-30B-A3B"),
    }


def test_the_run_on_good_answers_differs_in_nothing_else() -> None:
    """Else a comparison of the two runs would not tell what the bad answers do."""
    config = check_config(yaml.safe_load((ROOT / "config.yaml").read_text()), [ROOT / "config.yaml"])
    every, good = config.runs["qwen3vl-fire"], config.runs["qwen3vl-fire-good"]
    assert good == every.model_copy(update={"dataset": "fire-good"})
    changes = {"min_score": 8, "single_turn": "last_good"}
    assert config.datasets["fire-good"] == config.datasets["fire"].model_copy(update=changes)


def test_the_runs_on_mixtures_differ_in_nothing_else() -> None:
    config = check_config(yaml.safe_load((ROOT / "config.yaml").read_text()), [ROOT / "config.yaml"])
    fire = config.runs["qwen3vl-fire"]
    for name, members in (("fire-general", {"fire", "alpaca"}), ("feedback", {"fire", "volcano"})):
        assert config.runs[f"qwen3vl-{name}"].model_copy(update={"dataset": "fire"}) == fire
        assert config.members(name).keys() == members


def test_the_run_on_good_answers_is_known_of_the_same_data_alone() -> None:
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    shipped = check_config(copy.deepcopy(config), [])
    assert shipped.good_run("fire") == "qwen3vl-fire-good"
    assert [shipped.good_run(name) for name in ("fire-good", "fire-timestep", "volcano")] == [None, None, None]
    config["datasets"]["fire"]["train"] = "mine.json"
    assert check_config(config, []).good_run("fire") is None


def test_the_run_on_fire_has_the_original_settings() -> None:
    """As read in its run_sft_qwen3vl_fire_4gpu.sh and prepare_fire_sharegpt.py (commit 179cae2)."""
    config = check_config(yaml.safe_load((ROOT / "config.yaml").read_text()), [ROOT / "config.yaml"])
    run = config.runs["qwen3vl-fire"]
    assert (run.processes, run.train.per_device_batch_size, run.train.gradient_accumulation_steps) == (4, 1, 16)
    assert (run.train.epochs, run.train.learning_rate, run.train.warmup_ratio) == (1, 1e-4, 0.05)
    assert (run.train.weight_decay, run.train.dtype, run.train.gradient_checkpointing) == (0.01, "bfloat16", "auto")
    assert (run.train.max_length, run.train.image_max_tokens) == (8192, 2048)
    lora = run.train.lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.target_modules) == (32, 64, 0.05, ["all-linear"])
    assert (run.train.freeze, run.train.evaluate_every) == (["vision_tower", "aligner"], 500)
    assert (run.train.keep_checkpoints, run.train.dataloader_workers) == (3, 4)
    data = config.datasets[run.dataset]
    assert (data.form, data.min_score, data.single_turn) == ("trajectory", None, None)
    assert (data.thoughts, data.feedback_form) == ("drop", "sentence")
    words = hashlib.sha256((data.system_prompt or "").encode()).hexdigest()
    assert words.startswith("024d43f3667d5cc9"), "the original's system prompt"


@pytest.mark.parametrize(
    ("lora", "dropout"), [({}, 0.05), ({"experts": True}, 0), ({"experts": True, "dropout": 0}, 0)]
)
def test_an_adapter_of_experts_has_no_dropout(lora: dict[str, Any], dropout: float) -> None:
    settings = TrainSettings(lora=lora)
    assert settings.lora.dropout == dropout
    assert TrainSettings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("own", {"archive": "https://x/y.zip"}, "picture_sources.own.members: missing; it must be a block"),
        ("own", {"members": {"a/": "{rest}"}, "size": 3}, "picture_sources.own.archive: missing; set it, or"),
        ("gqq", {"archive": "https://x/y.zip"}, "picture_sources.gqq.members: missing; "),
        ("gqq", {"archive": "https://x/y.zip"}, "; nearest known source: gqa"),
        ("gqa", {"members": {}}, "picture_sources.gqa.members: missing; "),
    ],
)
def test_a_source_of_pictures_that_lacks_something_is_refused(name: str, source: dict[str, Any], said: str) -> None:
    config = check_config(with_value(f"picture_sources.{name}", source), [])
    with pytest.raises(VlmflowError) as error:
        read_sources(config.picture_sources)
    assert said in error.value.cause
    assert "\n" not in error.value.cause


@pytest.mark.parametrize("key", ["archive", "one_by_one"])
@pytest.mark.parametrize("user", ["me:S3CRET@", "S3CRET@"])
def test_credentials_in_an_address_are_refused_and_not_shown(tmp_path: Path, key: str, user: str) -> None:
    said = fault(tmp_path, "picture_sources.gqa", {key: f"https://{user}server/x.zip"})
    assert f"picture_sources.gqa: {key}: must not hold a user name or password" in said
    assert "S3CRET" not in said


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("gqa", {"licence": "cc-by-4.0"}),
        ("gqa", {"archive": "https://mirror/images.zip"}),
        ("sam", {"members": {"sam/": "{name}"}}),
        ("own", {"members": {"own/": "all/{rest}"}, "by_hand": "ask me"}),
        ("own", {"members": {"own/one.jpg": "1.jpg"}, "licence": "mit"}),
    ],
)
def test_a_source_of_pictures_needs_no_more_than_what_is_changed(name: str, source: dict[str, Any]) -> None:
    config = check_config(with_value(f"picture_sources.{name}", source), [])
    laid_over = read_sources(config.picture_sources)[name]
    assert {key: getattr(laid_over, key) for key in source} == source


@pytest.mark.parametrize("name", ["rows#0", "rows.jsonl#abc", "a#b.jsonl", "a#0/rows.jsonl"])
def test_a_file_name_may_contain_a_hash_sign(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    dataset = check_config(with_value("datasets.fire.train", str(file)), []).datasets["fire"]
    assert dataset.addresses("train") == [str(file)]
    assert dataset.choice("train").samples is None


REFUSED: dict[str, list[Any]] = {
    "run": [{}],
    "runs": [None],
    "runs.a b": [RUN],
    "runs." + 101 * "n": [RUN],
    "stores.raw": [True, "a\0b"],
    "stores.runs": ["checkpoints"],
    "stores.pictures": [""],
    "models.m.source": ["models/m", "./merged/r", "merged/x", "merged/r", "a{b}"],
    "models.m.model_type": ["qwen3vl"],
    "picture_sources.x.size": [2**53 + 1],
    "datasets." + 101 * "n": [FIRE],
    "datasets.b.mix": [{}],
    "datasets.b.mix.b": ["all"],
    "datasets.b.mix.x": ["all"],
    "datasets.b.mix.fire": [30, 0.3, "30", "30%\n", None, "0%", "0 rows"],
    "datasets.fire.train": [
        *("hf://datasets/o/n@main/x.json", "hf://datasets/o/n#5", "https://x/y.json", "raw/fire/y.json"),
        *("~nobody-of-this-name/y.json", ".", "/", "x/..", "a{b}.jsonl", "hf://datasets/o/n/a}.json", "file:///a%00b"),
        *("rows.jsonl#0", "rows.jsonl#-3", "rows.jsonl#1.5", "rows.jsonl#", "hf://datasets/o/n/t-*-of-00002.parquet#x"),
    ],
    "datasets.fire.test": [["c.json", "b\ud800.json"]],
    "datasets.fire.fixed_rows": [
        *("hf://datasets/o/n/a.jsonl", ["a.jsonl", "hf://datasets/o/n/a.jsonl"], "data/fire/quarantine.jsonl", "a\0b"),
    ],
    "datasets.fire.image_roots": [["stores/pictures/fire"], ["a\nb"]],
    "datasets.fire.sources": [[1]],
    "datasets.fire.licence": [True],
    "datasets.fire.max_history_rounds": [-1],
    "datasets.fire.max_samples": [0],
    "datasets.fire.seed": [-1],
    "datasets.fire.test_share": [1],
    "runs.r.model": ["qwen"],
    "runs.r.processes": [0, 1.5, None, True, 10**20],
    "runs.r.strategy": ["fsdp"],
    "runs.r.tuner": ["dora"],
    "runs.r.gpu_hour_price": [1e300],
    "runs.r.smoke.steps": [10**20],
    "runs.r.verify.rows": [10**20],
    "runs.r.evaluate.answer": [True],
    "runs.r.answer.url": ["h:8000", "http://h:x/v1"],
    "runs.r.train.learning_rat": [1],
    "runs.r.train.learning_rate": ["high", ".nan", True],
    "runs.r.train.epochs": [1e300, 10**400],
    "runs.r.train.max_steps": ["many", 10**9 + 1, 10**20],
    "runs.r.train.gradient_accumulation_steps": [10**20],
    "runs.r.train.per_device_batch_size": [10**20],
    "runs.r.train.keep_checkpoints": [10**20],
    "runs.r.train.dataloader_workers": [10**20],
    "runs.r.train.micro_batch_tokens": ["atuo"],
    "runs.r.train.gradient_checkpointing": ["no?"],
    "runs.r.train.hang_minutes": [30],
    "runs.r.train.freeze": [["vit"]],
    "runs.r.train.lora.rank": [10**20],
    "runs.r.train.lora.alpha": [1e300],
    "runs.r.train.lora.target_modules": ["q_proj"],
    "runs.r.train.swift_args.dataset_shuffle": [True],
    "runs.r.train.swift_args.eval_delay": [5],
    "runs.r.train.swift_args.eval_metric": ["acc"],
    "runs.r.train.swift_args.group_by_length": [True],
    "runs.r.train.swift_args.include_num_input_tokens_seen": ["all"],
    "runs.r.train.swift_args.label_smoothing_factor": [0.1],
    "runs.r.train.swift_args.learning_rate": [1],
    "runs.r.train.swift_args.output_dir": ["x"],
    "runs.r.train.swift_args.packing": [False],
    "runs.r.train.swift_args.padding_free": [True],
    "runs.r.train.swift_args.system": [[1]],
    "runs.r.train.swift_args.template_backend": ["jinja"],
    "runs.r.train.swift_args.tuner_type": ["full"],
    "runs.r.train.swift_args.use_chat_template": [False],
    "runs.r.train.swift_args.zzzz": [1],
}
"""The values that a key refuses."""

REFUSED_TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    ("picture_sources.x", {"members": {"a/": "{nme}"}}, ": members: "),
    ("picture_sources.x", {"members": {"a/": "images/{rest"}}, ": members: "),
    ("picture_sources.x", {"members": {"a/": "images/rest}"}}, ": members: "),
    ("picture_sources.x", {"members": {"a/": ""}}, ": members: "),
    ("datasets.b", {"mix": {"fire": "all"}, "sed": 1}, ".sed: "),
    ("datasets.b", {"mix": {"fire": "all"}, "seed": "x"}, ".seed: "),
    ("datasets.b", {"kind": "fire"}, ".train: missing; "),
    ("datasets.fire", FIRE | {"modality": "text"}, ": kind fire: "),
    ("datasets.fire", FIRE | {"columns": {"image": "file"}}, ": kind fire: "),
    ("datasets.fire", FIRE | {"take": True}, ": take: True applies "),
    ("datasets.fire", FIRE | {"kind": "messages", "take": False}, ".take: "),
    ("datasets.fire", FIRE | {"kind": "messages", "take": "all"}, ".take: "),
    ("datasets.fire", FIRE | {"kind": "messages", "form": "timestep"}, ": form: 'timestep' applies "),
    ("datasets.fire", FIRE | {"kind": "text"}, ": prompt: missing; "),
    ("datasets.fire", FIRE | {"kind": "alpaca", "prompt": "Say it."}, ": prompt: 'Say it.' applies "),
    ("datasets.fire", FIRE | {"kind": "alpaca", "columns": {"question": "q"}}, ": columns: unknown key 'question'; "),
    ("datasets.fire", FIRE | {"kind": "volcano", "max_history_rounds": None}, ": max_history_rounds: None applies "),
    ("datasets.fire", TEXTS | {"image_roots": ["pictures"]}, ": image_roots: ['pictures'] applies "),
    ("datasets.fire", TEXTS | {"fetch_images": True}, ": fetch_images: True applies "),
    ("datasets.fire", TEXTS | {"skip_images": True}, ": skip_images: True applies "),
    ("datasets.fire", TEXTS | {"picture_limits": {"min_side": 17}}, ": picture_limits: {'min_side': 17, "),
    ("runs.r.answer", {"url": "http://h/v1"}, ": url_base: "),
    ("runs.r.answer", {"url_tuned": "t"}, ": url_tuned: "),
    ("runs.r.train", {"freeze": ["vision_tower", "aligner", "language_model"]}, ": freeze: "),
    ("runs.r.train", {"sequence_parallel": 2}, ": sequence_parallel: 2 needs attention "),
    ("runs.r", RUN | {"experimental": True, "train": SPLIT_ROWS}, ": train.sequence_parallel: 2 "),
    ("runs.r", RUN | {"train": SPLIT_ROWS}, ": experimental, "),
    ("runs.r", RUN | {"train": {"attention": "flash_attention_2"}}, ": experimental, "),
    ("runs.r", RUN | {"train": {"liger": True}}, ": experimental, "),
    ("runs.r", RUN | {"device": "cpu", "train": {"liger": True}}, ": train: not on device cpu: liger; "),
    ("runs.r", RUN | {"processes": 2, "train": {"rows_per_step": 7}}, ".train: rows_per_step: 7 "),
    ("runs.r", RUN | {"train": {"quantisation": {}}}, ": train.quantisation: "),
    ("runs.r.train.lora", {"experts": True, "dropout": 0.1}, ": dropout: 0.1 "),
    ("runs.r.train.lora", {"experts": True, "dora": True}, ": dora: "),
    ("runs.r", RUN | {"tuner": "qlora", "train": {"lora": {"experts": True}}}, ": train.lora.experts: "),
    ("runs.r", RUN | {"strategy": "zero3", "train": {"lora": {"experts": True}}}, ": experimental, "),
    ("runs.r", RUN | {"strategy": "zero3", "tuner": "qlora"}, ": experimental, "),
]
"""A block, its values that do not fit together, and how the message goes on behind the block's key."""


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values])
def test_a_fault_is_one_line_with_its_file_and_key(tmp_path: Path, key: str, value: Any) -> None:
    assert re.match(re.escape(f"{tmp_path}/my-run.yaml: {key}") + r"(\.0)?: ", fault(tmp_path, key, value))


@pytest.mark.parametrize(("block", "values", "said"), REFUSED_TOGETHER)
def test_values_that_do_not_fit_together_are_refused_with_a_key(
    tmp_path: Path, block: str, values: dict[str, Any], said: str
) -> None:
    assert fault(tmp_path, block, values).startswith(f"{tmp_path}/my-run.yaml: {block}{said}")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("runs.r.train.learning_rat", 1, "nearest known key: learning_rate"),
        (
            "runs.r.evaluate.answer",
            True,
            "allowed: rows, splits, require, feedback, neutral_feedback, answers; n",
        ),
        ("runs.r.processes", None, "null is not allowed; it must be a whole number at least 1"),
        ("runs.r.train.micro_batch_tokens", "atuo", "'atuo' is not allowed; it must be a whole number at least 1"),
        ("runs.r.train.micro_batch_tokens", "atuo", " or auto or null"),
        ("runs.r.strategy", "fsdp", f"it must be one of {', '.join(STRATEGIES)}"),
        ("runs.r.model", "qwen", "unknown model 'qwen'; models has: m"),
        ("runs.r.train.liger", True, "train.liger (set experimental: true"),
        ("runs.r.train.swift_args", {"packing": False}, "sets this argument itself (train.micro_batch_tokens); remove"),
        ("runs.r.train.swift_args", {"--padding-free": 1}, "has no such argument; nearest: padding_free"),
        ("runs.r.train.swift_args", {"template": "qwen3vl"}, "no chat template 'qwen3vl'; nearest: qwen3_vl"),
        ("models.m.model_type", "qwen3vl", "no model_type 'qwen3vl'; nearest: qwen3"),
        ("models.m.source", "merged/r", "run r is trained from merged/r: no run can be its own base"),
    ],
)
def test_a_fault_says_what_is_allowed(tmp_path: Path, key: str, value: Any, said: str) -> None:
    assert said in fault(tmp_path, key, value)


def test_a_key_in_an_address_is_refused_and_not_shown(tmp_path: Path) -> None:
    said = fault(tmp_path, "runs.r.answer.url", "http://me:sesame@h/v1")
    assert "runs.r.answer.url: " in said
    assert "VLMFLOW_ANSWER_KEY" in said
    assert "sesame" not in said


@pytest.mark.parametrize("name", ["*", "A=1"])
def test_what_is_no_name_of_a_variable_is_refused(tmp_path: Path, name: str) -> None:
    assert f"environment.0: {name!r} is not allowed" in fault(tmp_path, "environment", [name])


@pytest.mark.parametrize("key", ["train.packing", "train.padding_free", "cached_dataset"])
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("run", ["r", "my.run"])
def test_a_former_key_is_refused_with_what_there_is_instead(tmp_path: Path, key: str, value: bool, run: str) -> None:
    file = tmp_path / "my-run.yaml"
    config = with_value(f"runs.r.{key}", value)
    config["runs"] = {run: config["runs"]["r"]}
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(VlmflowError) as error:
        check_config(config, [file])
    instead = "no longer exists; remove it: train.micro_batch_tokens plans each step's passes"
    assert error.value.cause.startswith(f"{file}: runs.{run}.{key}: {instead}")


@pytest.mark.parametrize("files", ["a.jsonl", ["a.jsonl", "b.jsonl"]])
def test_fixed_rows_are_read_by_their_former_name(tmp_path: Path, files: str | list[str]) -> None:
    now, before = (check_config(with_value(f"datasets.fire.{key}", files), []) for key in ("fixed_rows", "mended"))
    assert now.raw_datasets["fire"].fixed_row_files == before.raw_datasets["fire"].fixed_row_files != []
    assert now.former_names == []
    assert before.former_names[0].startswith("datasets.fire.mended: is now called fixed_rows; ")
    both = {"kind": "fire", "train": "a.json", "fixed_rows": "a.jsonl", "mended": "b.jsonl"}
    assert "datasets.fire: mended: the former name of fixed_rows" in fault(tmp_path, "datasets.fire", both)


@pytest.mark.parametrize("key", ["hub_token", "swanlab_secret", "swanlab_webhook_url"])
@pytest.mark.parametrize("value", ["hf_x", ["hf_x"], {"hf_x": "hf_x"}])
def test_a_token_is_in_no_message(tmp_path: Path, key: str, value: Any) -> None:
    file = tmp_path / "my-run.yaml"
    config = with_value("runs.r.train.swift_args", {key: value})
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(VlmflowError) as error:
        check_config(config, [file])
    assert f"{key}: its value is not allowed" in str(error.value)
    assert "hf_x" not in str(error.value)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"prompt": "x", "completion": "x"}, "columns.completion: 'x' would be read as both prompt and completion"),
        ({"prompt": "completion"}, "columns.prompt: 'completion' would be read as both prompt and completion"),
        ({"completion": "source"}, "columns.completion: 'source' would be read as both completion and source"),
        ({"prompt": 'a"b'}, "columns.prompt: 'a\"b' holds '\"'; rename the column"),
        ({"source": "a\\b"}, r"columns.source: 'a\\b' holds '\\'"),
        ({"image": "a\tb"}, r"columns.image: 'a\tb' holds '\t'"),
        ({"images": "\ud800"}, r"columns.images: '\ud800' holds '\ud800'"),
    ],
)
def test_columns_that_no_row_can_be_read_by_are_refused(tmp_path: Path, columns: dict[str, str], said: str) -> None:
    line = fault(tmp_path, "datasets.fire", {"kind": "prompt_completion", "train": "a.csv", "columns": columns})
    assert line.startswith(f"{tmp_path}/my-run.yaml: datasets.fire: ")
    assert said in line


@pytest.mark.parametrize("columns", [{"prompt": "completion", "completion": "prompt"}, {"prompt": "é / ü"}])
def test_other_columns_are_taken(columns: dict[str, str]) -> None:
    config = with_value("datasets.fire", {"kind": "prompt_completion", "train": "a.csv", "columns": columns})
    assert check_config(config, []).datasets["fire"].columns == columns
    form_rows("prompt_completion", "text", columns, None, None)


def test_names_may_be_long() -> None:
    config = with_value("datasets." + 100 * "n", {"kind": "fire", "train": "b.json"})
    assert len(check_config(config, []).datasets) == 2


def test_a_value_from_the_command_line_is_named_so() -> None:
    with pytest.raises(VlmflowError, match=r"^--config: run: unknown key"):
        check_config(BASE | {"run": 1}, [])


def test_every_fault_is_reported(tmp_path: Path) -> None:
    config = with_value("runs.r.processes", 0)
    config["runs"]["r"]["device"] = "tpu"
    with pytest.raises(VlmflowError) as error:
        check_config(config, [])
    assert len(error.value.cause.splitlines()) == 2


@pytest.mark.parametrize("written", ["2e-5", 2e-5, "0.00002", ".2E-4"])
def test_numbers_are_taken_in_exponent_form(written: Any) -> None:
    """YAML reads 2e-5 as text, the command line as a number."""
    config = check_config(with_value("runs.r.train.learning_rate", written), [])
    assert config.runs["r"].train.learning_rate == 2e-5


@pytest.mark.parametrize("written", ["1e3", 1e3, 1000, "1000"])
def test_whole_numbers_are_taken_in_exponent_form(written: Any) -> None:
    assert check_config(with_value("runs.r.train.max_steps", written), []).runs["r"].train.max_steps == 1000


@pytest.mark.parametrize(
    ("train", "most", "address", "samples"),
    [
        ("a.json", None, "a.json", None),
        ("a.json#500", None, "a.json", 500),
        ("a.json#500", 20, "a.json", 20),
        ("a#5/b#0.json", 7, "a#5/b#0.json", 7),
    ],
)
def test_a_number_after_an_address_is_how_many_rows_are_drawn(
    train: str, most: int | None, address: str, samples: int | None
) -> None:
    config = with_value("datasets.fire", {"kind": "fire", "train": train, "max_samples": most, "seed": 3})
    fire = check_config(config, []).datasets["fire"]
    assert fire.addresses("train") == [address]
    assert fire.choice("train").samples == samples
    assert fire.choice("train").seed == (0 if samples is None else 3)  # a seed that draws nothing reruns nothing


def test_two_splits_must_not_become_one_file() -> None:
    config = with_value("datasets.fire.test", "elsewhere/a.json")
    with pytest.raises(VlmflowError, match=r"would both become raw/fire/a\.json"):
        check_config(config, [])


def test_a_mixture_is_of_data_sets_that_are_no_mixtures() -> None:
    config = with_value("datasets.b", {"mix": {"fire": "all"}})
    config["datasets"]["c"] = {"mix": {"b": "30%"}}
    with pytest.raises(VlmflowError, match=r"datasets\.c\.mix\.b: 'b' is a mixture, too; mix its data sets"):
        check_config(config, [])
    config["datasets"]["c"] = {"mix": {"fire": "30%"}}
    assert check_config(config, []).members("c").keys() == {"fire"}


def test_a_mixture_has_what_its_data_sets_have_together() -> None:
    config = with_value("datasets.blend", {"mix": {"fire": "all", "chats": "30%"}})
    config["datasets"]["fire"] |= {"licence": "cc-by-4.0", "source_licences": {"gqa": "mit"}, "form": "timestep"}
    config["datasets"]["fire"] |= {"picture_limits": {"max_pixels": 50_000_000}, "train": ["a.json", "b.json"]}
    config["datasets"]["chats"] = {"kind": "messages", "modality": "text", "train": "chats.jsonl"}
    config["runs"]["r"]["dataset"] = "blend"
    blend = check_config(copy.deepcopy(config), []).datasets["blend"]
    assert (blend.kinds, blend.modality, blend.has_manifests, blend.form) == (
        ["fire", "messages"],
        None,
        True,
        "trajectory",
    )
    assert blend.all_addresses == ["a.json", "b.json", "chats.jsonl"]
    assert blend.licence == "fire: cc-by-4.0; chats: unknown"
    assert blend.source_licences == {"fire/gqa": "mit"}
    assert (blend.picture_limits.max_pixels, blend.picture_limits.min_side) == (50_000_000, 28)
    config["runs"]["r"]["over_long"] = "shorten"
    with pytest.raises(VlmflowError, match=r"runs\.r\.over_long: 'shorten' drops earlier attempts"):
        check_config(copy.deepcopy(config), [])
    config["datasets"]["blend"] = {"mix": {"fire": "all"}}
    blend = check_config(config, []).datasets["blend"]
    assert (blend.form, blend.licence) == ("timestep", "cc-by-4.0")


def test_the_documentation_names_every_reason_of_a_reject() -> None:
    data = (ROOT / "docs" / "data.md").read_text()
    assert [reason for reason in REASONS if f"`{reason}`" not in data] == []


def test_the_pages_made_from_the_model_are_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference_page(), "make docs"
    published = json.loads((ROOT / "docs" / "config.schema.json").read_text())
    assert published == Config.model_json_schema(), "make docs"
    data = (ROOT / "docs" / "data.md").read_text()
    assert table() in data, "make docs"
    assert with_kinds(data) == data
