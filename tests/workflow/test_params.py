"""What rules tell their scripts: just the settings that these use, so that any other makes nothing stale.

Some settings also say which files a rule needs.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from snakemake.iocontainers import Wildcards

from rules import read_rules
from vlmflow.config.raw_forms import modules_of
from vlmflow.config.settings import Settings
from vlmflow.harness.stage import PARAMS_FOR_SNAKEMAKE
from vlmflow.harness.staleness import settings_of, texts_of

COMMIT = "0" * 40
BASE: dict[str, Any] = {
    "models": {"m": {"source": f"hf://a/b@{COMMIT}", "model_type": "qwen3_vl"}},
    "datasets": {
        "fire": {"kind": "fire", "train": f"hf://datasets/a/b@{COMMIT}/t.json"},
        "volcano": {"kind": "volcano", "train": f"hf://datasets/a/b@{COMMIT}/t.json"},
        "text": {"kind": "text", "modality": "text", "prompt": "Go on.", "train": f"hf://datasets/a/b@{COMMIT}/t.json"},
        "blend": {"mix": {"fire": "all", "text": "30%"}},
    },
    "runs": {name: {"model": "m", "dataset": name} for name in ("fire", "volcano", "text", "blend")},
    "search": {
        name: {"run": name, "space": {"learning_rate": {"low": 1e-5, "high": 1e-3, "log": True}, "lora.rank": [4, 8]}}
        for name in ("fire", "volcano", "text", "blend")
    },
}
"""A data set of each sort, and a run and a search of the same name on it."""

LOOKING = {"fetch_images", "resolve_images"}
MEASURED = {"measure_lengths", "fit_rows"}
TRIED = {"propose", "trial", "judge_best"}
TRAINED = {"train_smoke", "train_model", *TRIED}
CHOSEN_BY = {"search": "s", "trial": 3, "trials": 4, "study": "0" * 64, "settings": {}}
ESTIMATED = {"estimate_run", "estimate_page"}
EVALUATED = {"evaluate", "answer"}

CHANGES: dict[str, tuple[Any, set[str]]] = {
    "datasets.fire.form": ("timestep", {"convert_rows", "validate_sharegpt"}),
    "datasets.fire.max_history_rounds": (3, {"convert_rows", "validate_sharegpt"}),
    "datasets.fire.min_score": (8, {"convert_rows", "validate_sharegpt"}),
    "datasets.fire.single_turn": ("last_good", {"convert_rows", "validate_sharegpt"}),
    "datasets.fire.thoughts": ("keep", {"convert_rows", "validate_sharegpt"}),
    "datasets.fire.feedback_form": ("raw", {"convert_rows", "validate_sharegpt"}),
    "datasets.fire.row_limits.max_turns": (8, {"convert_rows", "validate_sharegpt"}),
    "datasets.fire.row_limits.max_turn_chars": (9, {"convert_rows", "validate_sharegpt"}),
    "datasets.volcano.row_limits.max_turns": (8, {"validate_sharegpt"}),
    "datasets.fire.system_prompt": ("Be brief.", {"convert_rows"}),
    "datasets.volcano.system_prompt": ("Be brief.", {"convert_rows"}),
    "datasets.text.prompt": ("Continue.", {"convert_rows"}),
    "datasets.volcano.columns": ({"image": "pic"}, {"convert_rows", "validate_sharegpt", *LOOKING}),
    "datasets.volcano.ignore_keys": (["system"], {"convert_rows"}),
    "datasets.volcano.take": ("chosen", {"convert_rows", *LOOKING}),
    "datasets.volcano.frames_as_pictures": (8, {"convert_rows", *LOOKING}),
    "datasets.fire.ignore_keys": (["weight"], {"convert_rows"}),
    "datasets.fire.sources": (["gqa"], {"convert_rows", *LOOKING}),
    "datasets.volcano.max_samples": (9, {"convert_rows", *LOOKING}),
    "datasets.fire.seed": (7, {"validate_sharegpt"}),
    "datasets.fire.val_share": (0.3, {"validate_sharegpt"}),
    "datasets.fire.test_share": (0.3, {"validate_sharegpt"}),
    "datasets.fire.max_reject_share": (0.3, {"validate_sharegpt"}),
    "datasets.fire.skip_images": (True, {"validate_sharegpt"}),
    "datasets.fire.image_roots": (["elsewhere"], LOOKING),
    "datasets.fire.fetch_images": (True, {"resolve_images"}),
    "datasets.fire.picture_limits.max_bytes": (9, {*LOOKING, "data_page", "eval_page"}),
    "datasets.fire.picture_limits.min_side": (29, {"resolve_images", "data_page", "eval_page"}),
    "datasets.fire.near_duplicates.drop": (True, {"validate_sharegpt", "data_page"}),
    "datasets.fire.near_duplicates.picture_distance": (6, {"find_near_duplicates", "data_page"}),
    "datasets.fire.licence": ("mit", {"publish_merged"}),
    "datasets.fire.source_licences": ({"gqa": "mit"}, {"publish_merged"}),
    "datasets.blend.mix.text": ("40%", {"mix_rows"}),
    "datasets.blend.seed": (7, {"mix_rows"}),
    "picture_sources.coco-train2017.licence": ("mit", {"publish_merged"}),
    "models.m.template_differs": (True, {"measure_lengths"}),
    "models.m.template": ("qwen2_5_vl", {*ESTIMATED, *EVALUATED, *MEASURED, "verify_merged", *TRAINED}),
    "models.m.model_type": ("gemma3_vision", {*MEASURED, "verify_merged", *TRAINED - {"propose"}, "evaluate"}),
    "runs.fire.train.learning_rate": (0.5, {*ESTIMATED, *TRAINED - TRIED, "propose"}),
    "runs.fire.train.lora.rank": (8, {*ESTIMATED, *TRAINED - TRIED, "propose"}),
    "runs.fire.train.lora.alpha": (8, {*ESTIMATED, *TRAINED}),
    "search.fire.rounds": (5, set()),
    "search.fire.together": (5, {"propose"}),
    "search.fire.rungs": (2, {"propose", "tell"}),
    "search.fire.objective": ("uses_feedback", {"tell", "trial"}),
    "search.fire.limits.hours": (2, {"propose", "tell", "judge_best", "choose_best", "search_page"}),
    "search.fire.limits.gpu_hours": (2, {"propose", "tell", "judge_best", "choose_best", "search_page"}),
    "search.fire.seed": (2, {"propose", "choose_best"}),
    "runs.fire.train.seed": (7, {*ESTIMATED, *EVALUATED, *TRAINED}),
    "runs.fire.train.dtype": ("float32", {*ESTIMATED, "verify_merged", *EVALUATED, *TRAINED}),
    "runs.fire.train.max_length": (400, {*ESTIMATED, "fit_rows", "lengths_page", *EVALUATED, *TRAINED}),
    "runs.fire.train.image_max_tokens": (32, {*ESTIMATED, "verify_merged", *EVALUATED, *MEASURED, *TRAINED}),
    "runs.fire.train.swift_args": (
        {"template": "qwen3_vl"},
        {*ESTIMATED, *EVALUATED, *MEASURED, "verify_merged", *TRAINED},
    ),
    "runs.text.train.swift_args": ({"lora_ga_batch_size": 3}, {*ESTIMATED, *TRAINED}),
    "runs.fire.smoke.steps": (30, {"train_smoke"}),
    "runs.fire.device": ("cpu", {*ESTIMATED, "verify_merged", *EVALUATED, *TRAINED, "search_page"}),
    "runs.fire.processes": (3, {*ESTIMATED, *TRAINED}),
    "runs.fire.evaluate": ({"rows": 9}, {*ESTIMATED, *EVALUATED, "judge_best"}),
    "runs.fire.chosen_by": (CHOSEN_BY, {"evaluate", "publish_merged"}),
    "runs.fire.evaluate.require": ("learned", {*ESTIMATED, "publish_merged"}),
    "runs.fire.evaluate.feedback": (False, {*ESTIMATED, *EVALUATED, "judge_best"}),
    "runs.fire.evaluate.splits": (["val", "test"], ESTIMATED),
    "runs.fire.evaluate.answers": (True, ESTIMATED),
    "runs.fire.answer.rounds": (1, {"answer"}),
    "runs.fire.track": ({"wandb": "fire"}, {"track"}),
    "runs.fire.nodes": (3, {*ESTIMATED, *TRAINED}),
    "runs.fire.network_gbit": (400, ESTIMATED),
    "runs.fire.strategy": ("zero2", {*ESTIMATED, *TRAINED - {"propose"}}),
    "runs.fire.tuner": ("qlora", {*ESTIMATED, *TRAINED - {"propose"}}),
    "runs.fire.train.freeze": (["aligner"], {*ESTIMATED, *TRAINED}),
    "runs.fire.experimental": (True, set()),
    "runs.fire.over_long": ("leave_out", {*ESTIMATED, "fit_rows"}),
    "runs.fire.gpu": ("h100", ESTIMATED),
    "runs.fire.estimate": ("ignore", ESTIMATED),
    "runs.fire.verify.rows": (9, {"verify_merged"}),
    "runs.fire.verify.logits": (False, {"verify_merged"}),
    "runs.fire.resources.weights_mb": (9_000, set()),
    "integrity": ("full", set()),
    "environment": (["IBV_*"], set()),
}
"""A setting, another value for it, and the rules that have it among their params. Stages behind these are stale too,
by their files."""


def changed(key: str, value: Any) -> dict[str, Any]:
    """Give BASE with another value of a key."""
    first, _, rest = key.partition(".")
    return _merged(BASE, {first: _nested(rest, value) if rest else value})


def _nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = below.keys() & above.keys()
    return below | above | {key: _merged(below[key], above[key]) for key in both if isinstance(above[key], dict)}


def params_of(rule: Any, name: str) -> dict[str, Any]:
    """Give a rule's params for the run and the data set of a name, without those that nobody records."""
    wildcards = Wildcards(
        fromdict={"dataset": name, "run": name, "split": "train", "model": "m", "file": "t.json"}
        | {"search": name, "round": "0", "rung": "0", "slot": "0"},
    )
    return settings_of(rule, wildcards)


def texts(folder: Path, name: str, **settings: Any) -> dict[str, set[str]]:
    """Give what Snakemake would record of each rule's params for a data set and its run."""
    return {rule.name: set(texts_of(params_of(rule, name))) for rule in rules_for(folder, name, **settings)}


def rules_for(folder: Path, name: str, **settings: Any) -> list[Any]:
    """Give the rules that may make something for a data set and its run: a mixture has no raw rows."""
    found = read_rules(folder, **settings)
    allowed = [rule.workflow.wildcard_constraints | rule.wildcard_constraints for rule in found]
    return [rule for rule, of in zip(found, allowed, strict=True) if re.fullmatch(of["dataset"], name)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[str]]]:
    return {name: texts(tmp_path_factory.mktemp(name), name, **BASE) for name in BASE["runs"]}


@pytest.mark.parametrize("key", CHANGES)
def test_a_setting_is_recorded_by_just_the_rules_that_use_it(
    recorded: dict[str, dict[str, set[str]]], key: str, tmp_path: Path
) -> None:
    value, expected = CHANGES[key]
    name = key.split(".")[1] if key.startswith(("datasets.", "runs.", "search.")) else "fire"
    before, now = recorded[name], texts(tmp_path, name, **changed(key, value))
    assert {rule for rule in now if now[rule] != before[rule]} == expected


@pytest.mark.parametrize("rule", sorted(EVALUATED))
def test_an_evaluation_depends_on_the_module_of_its_form(tmp_path: Path, rule: str) -> None:
    """No import statement names it: it says whether rows have feedback, and reads right answers."""
    (found,) = [one for one in read_rules(tmp_path, **BASE) if one.name == rule]
    for name, kinds in (("fire", ["fire"]), ("volcano", ["volcano"]), ("blend", ["fire", "text"])):
        wildcards = Wildcards(fromdict={"run": name, "split": "val"})
        assert found.params.modules(wildcards) == [module for kind in kinds for module in modules_of(kind)]


def test_only_a_job_that_asks_another_server_gets_the_template_with_its_key(tmp_path: Path) -> None:
    def template(name: str, **answer: Any) -> str:
        settings = changed("runs.fire.answer", answer)
        (rule,) = [one for one in read_rules(tmp_path / name, **settings) if one.name == "answer"]
        return rule.resources["pod_template"].evaluate(Wildcards(fromdict={"run": "fire"})).value

    assert template("own", rounds=1) == "gpu"
    assert template("another", url="http://host:8000/v1", url_base="b", url_tuned="t") == "answer"


@pytest.mark.parametrize(
    ("rule", "key", "files"),
    [
        ("resolve_images", "datasets.fire.fetch_images", {"images/fire/train.fetched.json"}),
        (
            "validate_sharegpt",
            "datasets.fire.near_duplicates.drop",
            {f"images/fire/{split}.hashes.jsonl" for split in ("train", "test")},
        ),
        ("publish_merged", "runs.fire.evaluate", {"eval/fire/val"}),
        (
            "track",
            "runs.fire.evaluate",
            {
                *("eval/fire/val", "answers/fire/val", "data/fire/val.jsonl"),
                *("images/fire/train.jsonl", "images/fire/test.jsonl"),
            },
        ),
    ],
)
def test_a_setting_lets_a_rule_need_more_files(tmp_path: Path, rule: str, key: str, files: set[str]) -> None:
    more = changed(key, {"answers": True} if key.endswith("evaluate") else True)
    without = needs(tmp_path / "without", rule, "fire", **BASE)
    assert needs(tmp_path / "with", rule, "fire", **more) == without | files
    assert not without & files


@pytest.mark.parametrize(("name", "made_by"), [("fire", "converted"), ("blend", "data")])
def test_near_duplicates_are_searched_among_the_rows_that_a_data_set_itself_made(
    tmp_path: Path, name: str, made_by: str
) -> None:
    account = {"converted": "train.unread.json", "data": "stats.json"}[made_by]
    found = needs(tmp_path, "find_near_duplicates", name, **BASE)
    assert {f"{made_by}/{name}/train.jsonl", f"{made_by}/{name}/{account}"} <= found
    assert f"{'data' if made_by == 'converted' else 'converted'}/{name}/train.jsonl" not in found


def needs(folder: Path, name: str, of: str, **settings: Any) -> set[str]:
    """Give the files that a rule needs for a data set, or a run, and its split train."""
    folder.mkdir(exist_ok=True)
    (rule,) = [one for one in read_rules(folder, **settings) if one.name == name]
    files, *_ = rule.expand_input(Wildcards(fromdict={"dataset": of, "run": of, "split": "train"}))
    return {str(file) for file in files}


def test_a_changed_address_shows_just_its_source(tmp_path: Path) -> None:
    address = "https://example.org/train2017.zip"
    before, now = (
        {text for text in texts(tmp_path, "fire", **settings)["fetch_images"] if text.startswith("revision")}
        for settings in (BASE, changed("picture_sources.coco-train2017.archive", address))
    )
    assert len(before) == len(now) > 10
    (old,), (new,) = before - now, now - before
    assert old.startswith("revision.coco-train2017=")
    assert address in new


def test_snakemake_itself_compares_no_block(tmp_path: Path) -> None:
    """It would also compare the order of the keys; `recorded` does not. The only one that it sees has fixed keys."""
    seen = set()
    for rule in rules_for(tmp_path, "fire", **BASE):
        values = params_of(rule, "fire")
        for name, value in rule.params.items():
            derived = callable(value) and "output" in inspect.signature(value).parameters
            if not derived and isinstance(values.get(name), dict):
                seen.add(f"{rule.name}.{name}")
    assert seen == {"resolve_images.limits"}


def test_a_script_gets_just_the_settings_that_it_takes(tmp_path: Path) -> None:
    looked = set()
    for name in ("fire", "blend"):
        (tmp_path / name).mkdir()
        for rule in rules_for(tmp_path / name, name, **BASE):
            main = importlib.import_module(f"stages.{Path(rule.script).stem}").main
            types, given = inspect.get_annotations(main), params_of(rule, name)
            for key in given.keys() - PARAMS_FOR_SNAKEMAKE:
                TypeAdapter(types[key]).validate_python(given[key])
            if block := types.get("settings"):
                assert given["settings"].keys() == block.model_fields.keys(), rule.name
                assert issubclass(block, Settings)
            looked.add(rule.name)
    assert looked >= {"convert_rows", "mix_rows", "train_smoke", "train_model", "publish_merged"}
