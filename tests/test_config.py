import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlmflow.config.model import Config, check_config
from vlmflow.config.reference import reference_page
from vlmflow.errors import VlmflowError

ROOT = Path(__file__).parents[1]
BASE = {
    "models": {"m": {"source": "hf://Qwen/Qwen3-8B", "model_type": "qwen3"}},
    "datasets": {"fire": {"kind": "fire", "train": "a.json"}},
    "runs": {"r": {"model": "m", "dataset": "fire"}},
}


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


def test_the_shipped_configuration_is_sound() -> None:
    config = check_config(yaml.safe_load((ROOT / "config.yaml").read_text()), [ROOT / "config.yaml"])
    runs = {name: (run.processes, config.models[run.model].source) for name, run in config.runs.items()}
    assert runs == {
        "qwen3vl-fire": (4, "hf://Qwen/Qwen3-VL-32B-Instruct"),
        "qwen3vl-volcano": (4, "hf://Qwen/Qwen3-VL-32B-Instruct"),
        "qwen3-alpaca": (2, "hf://Qwen/Qwen3-8B"),
    }


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("runs.r.train.learning_rat", 1, "unknown key; allowed: epochs, "),
        ("runs.r.train.learning_rat", 1, "nearest known key: learning_rate"),
        ("run", {}, "unknown key; allowed: stores, cluster, models, datasets, runs; nearest known key: runs"),
        ("runs.r.train.learning_rate", "high", "'high' is not allowed; it must be a number more than 0"),
        ("runs.r.train.learning_rate", ".nan", "must be a number more than 0"),
        ("runs.r.processes", 0, "0 is not allowed; it must be a whole number at least 1"),
        ("runs.r.processes", 1.5, "1.5 is not allowed; it must be a whole number at least 1"),
        ("runs.r.processes", True, "must be a whole number at least 1"),
        ("runs.r.train.learning_rate", True, "must be a number more than 0"),
        ("runs.r.strategy", "fsdp", "'fsdp' is not allowed; it must be one of ddp, zero2, zero3"),
        ("runs.r.train.max_steps", "many", "must be a whole number at least 1 or null"),
        ("runs.r.train.lora.target_modules", "q_proj", "'q_proj' is not allowed; it must be a list"),
        ("runs.r.train.swift_args", {"x": [1]}, "must be a text or a whole number or a number or true or false"),
        ("datasets.fire.max_history_rounds", -1, "must be a whole number at least 0 or null"),
        ("datasets.fire", {"kind": "fire"}, "datasets.fire.train: missing; it must be a text"),
        ("datasets.fire.train", "https://x/y.json", "no known form of address"),
        ("datasets.fire.train", "~nobody-of-this-name/y.json", "no known form of address"),
        ("datasets.fire.train", "raw/fire/y.json", "lies in raw/, which the workflow makes and removes"),
        ("models.m.source", "models/m", "lies in models/, which the workflow makes and removes"),
        ("stores.runs", "checkpoints", "lies in checkpoints/, which the workflow makes and removes"),
        ("stores.pictures", "", "'' is no folder"),
        ("datasets.fire.image_roots", ["stores/pictures/fire"], "lies in stores.pictures"),
        ("datasets.fire.seed", -1, "must be a whole number at least 0"),
        ("runs.a b", {"model": "m", "dataset": "fire"}, "the name is not allowed"),
        ("runs", None, "must be a block of keys"),
        ("runs.r.model", "qwen", "'qwen' stands not under models: m"),
    ],
)
def test_a_fault_is_one_line_with_file_key_value_and_what_is_allowed(
    tmp_path: Path, path: str, value: Any, said: str
) -> None:
    line = fault(tmp_path, path, value)
    assert line.startswith(f"{tmp_path}/my-run.yaml: ")
    assert path.rsplit(".", 1)[0] in line
    assert said in line


def test_a_value_from_the_command_line_is_named_so() -> None:
    with pytest.raises(VlmflowError, match=r"^--config: run: unknown key"):
        check_config(BASE | {"run": 1}, [])


def test_every_fault_is_said(tmp_path: Path) -> None:
    config = with_value("runs.r.processes", 0)
    config["runs"]["r"]["device"] = "tpu"
    with pytest.raises(VlmflowError) as error:
        check_config(config, [])
    assert len(error.value.cause.splitlines()) == 2


@pytest.mark.parametrize("written", ["2e-5", 2e-5, "0.00002", ".2E-4"])
def test_numbers_are_taken_in_exponent_form(written: Any) -> None:
    """YAML reads 2e-5 as a text, the command line as a number."""
    config = check_config(with_value("runs.r.train.learning_rate", written), [])
    assert config.runs["r"].train.learning_rate == 2e-5


@pytest.mark.parametrize("written", ["1e3", 1e3, 1000, "1000"])
def test_whole_numbers_are_taken_in_exponent_form(written: Any) -> None:
    assert check_config(with_value("runs.r.train.max_steps", written), []).runs["r"].train.max_steps == 1000


def test_two_splits_must_not_become_one_file() -> None:
    config = with_value("datasets.fire.test", "elsewhere/a.json")
    with pytest.raises(VlmflowError, match=r"would both become raw/fire/a\.json"):
        check_config(config, [])


def test_sharding_needs_gpus() -> None:
    config = with_value("runs.r", {"model": "m", "dataset": "fire", "device": "cpu", "strategy": "zero3"})
    with pytest.raises(VlmflowError, match="strategy zero3 needs device cuda"):
        check_config(config, [])


def test_the_pages_made_from_the_model_are_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference_page(), "make docs"
    published = json.loads((ROOT / "docs" / "config.schema.json").read_text())
    assert published == Config.model_json_schema(), "make docs"
