"""What rules tell their scripts: just the settings that these use, so that any other makes nothing stale.

Some settings also say which files a rule needs.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter
from snakemake.iocontainers import Wildcards

from rules import read_rules
from vlmflow.config.raw_forms import modules_of
from vlmflow.config.search_settings import SearchSettings
from vlmflow.config.settings import Settings
from vlmflow.harness.stage import PARAMS_FOR_SNAKEMAKE
from vlmflow.harness.staleness import Code, Definition, settings_of, texts_of
from vlmflow.rows.stats import RulesUsed
from workflow_runs import ROOT

COMMIT = "0" * 40
BASE: dict[str, Any] = {
    "models": {
        "m": {"source": f"hf://a/b@{COMMIT}", "model_type": "qwen3_vl"},
        "deep": {"source": f"hf://a/b@{COMMIT}", "model_type": "qwen3"},
    },
    "datasets": {
        "fire": {"kind": "fire", "train": f"hf://datasets/a/b@{COMMIT}/t.json"},
        "volcano": {"kind": "volcano", "train": f"hf://datasets/a/b@{COMMIT}/t.json"},
        "text": {"kind": "text", "modality": "text", "prompt": "Go on.", "train": f"hf://datasets/a/b@{COMMIT}/t.json"},
        "blend": {"mix": {"fire": "all", "text": "30%"}},
        "own": {"kind": "messages", "train": f"hf://datasets/a/b@{COMMIT}/t.json"},
        "deep": {"kind": "messages", "modality": "text", "train": f"hf://datasets/a/b@{COMMIT}/t.json"},
    },
    "runs": {
        **{name: {"model": "m", "dataset": name} for name in ("fire", "volcano", "text", "blend")},
        "own": {
            "model": "m",
            "dataset": "own",
            "tuner": "qlora",
            "gpu": "h100",
            "evaluate": {},
            "answer": {"url": "http://host:8000/v1", "url_base": "b", "url_tuned": "t"},
            "chosen_by": {"search": "s", "trial": 3, "trials": 4, "study": "0" * 64, "settings": {}},
            "track": {"mlflow": "https://host", "otlp": "https://host/otlp"},
        },
        "deep": {
            "model": "deep",
            "dataset": "deep",
            "strategy": "deepspeed",
            "deepspeed": {"zero_optimization": {"stage": 2}},
            "experimental": True,
            "processes": 2,
            "train": {"attention": "flash_attention_2"},
        },
    },
    "search": {
        name: {"run": name, "space": {"learning_rate": {"low": 1e-5, "high": 1e-3, "log": True}, "lora.rank": [4, 8]}}
        for name in ("fire", "volcano", "text", "blend", "own", "deep")
    },
}
"""A data set of each sort, and a run and a search of the same name on it; `own` and `deep` have what few runs have."""


CHANGES: dict[str, tuple[Any, list[str]]] = yaml.safe_load(Path(__file__).with_name("reruns.yaml").read_text())
"""A key, another value for it, and the rules that have it among their params."""


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
        fromdict={
            "dataset": name,
            "run": name,
            "split": "train",
            "model": BASE["runs"][name]["model"],
            "file": "t.json",
        }
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


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[pytest.mark.slow] * (number % 5 > 0)) for number, key in enumerate(CHANGES)]
)
def test_a_setting_is_recorded_by_just_the_rules_that_use_it(
    recorded: dict[str, dict[str, set[str]]], key: str, tmp_path: Path
) -> None:
    value, expected = CHANGES[key]
    name = next((name for name in recorded if key.split(".")[1:2] == [name]), "fire")
    before, now = recorded[name], texts(tmp_path, name, **changed(key, value))
    rules = before.keys() | now.keys()
    assert {rule for rule in rules if now.get(rule) != before.get(rule)} == set(expected)


def test_every_key_of_the_configuration_is_changed_once() -> None:
    named = [re.sub(r"^(models|datasets|picture_sources|runs|search)\.[^.]+", r"\1.NAME", key) for key in CHANGES]
    keys = list(documented_keys())
    assert len(keys) > 150
    assert not [key for key in keys if not any(f"{one}.".startswith(f"{key}.") for one in named)]


def documented_keys() -> Iterator[str]:
    """Yield the keys of docs/config.md, but for those of blocks that have a table of their own."""
    above = ""
    for line in (ROOT / "docs" / "config.md").read_text().splitlines():
        if found := re.match(r"## `(.*)`", line):
            above = f"{found[1].replace('MIXTURE', 'NAME')}."
        elif found := re.match(r"\| `(\w+)` \| (?!a block, see below)", line):
            yield f"{above}{found[1]}"


def test_the_choice_of_evaluated_rows_depends_on_the_module_of_their_form(tmp_path: Path) -> None:
    """No import statement names it: it says whether rows have feedback, and reads right answers."""
    (found,) = [one for one in read_rules(tmp_path, **BASE) if one.name == "choose_rows"]
    for name, kinds in (("fire", ["fire"]), ("volcano", ["volcano"]), ("blend", ["fire", "text"])):
        wildcards = Wildcards(fromdict={"run": name, "split": "val"})
        assert found.params.modules(wildcards) == [module for kind in kinds for module in modules_of(kind)]


def test_the_rows_of_the_whole_chain_of_bases_are_read(tmp_path: Path) -> None:
    chain = {
        "models": {name: {"source": f"merged/{run}"} for name, run in (("one", "fire"), ("two", "second"))},
        "runs": {"second": {"model": "one", "dataset": "volcano"}, "third": {"model": "two", "dataset": "text"}},
    }
    settings = BASE | {key: BASE[key] | value for key, value in chain.items()}
    (found,) = [rule for rule in read_rules(tmp_path, **settings) if rule.name == "choose_rows"]
    for run, bases, pictures in (
        ("fire", [], []),
        ("second", ["fire"], ["fire"]),
        ("third", ["second", "fire"], ["volcano", "fire"]),
    ):
        wildcards = Wildcards(fromdict={"run": run, "split": "val"})
        assert found.input.bases(wildcards) == [f"fitted/{base}" for base in bases]
        assert found.input.base_pictures(wildcards) == [f"images/{dataset}/train.jsonl" for dataset in pictures]


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
            if isinstance(block := types.get("settings"), type):
                assert given["settings"].keys() == block.model_fields.keys(), rule.name
                assert issubclass(block, Settings)
            looked.add(rule.name)
    assert looked >= {"convert_rows", "mix_rows", "train_smoke", "train_model", "publish_merged"}


READ_UNSEEN = {
    "validate_sharegpt": {"DatasetSettings": set(RulesUsed.__struct_fields__)},
    "propose": {"SearchSettings": set(SearchSettings.model_fields)},
    "evaluate": {"FlatRun": {"text_args"}},
}
"""What a stage reads of a part of the settings where it is not called one: as a whole, or as any settings."""


def test_of_a_part_of_the_settings_a_rule_passes_just_the_keys_that_its_code_reads(tmp_path: Path) -> None:
    """No type checker sees which keys a part has: another one that a stage reads would have its default."""
    code, looked = Code(ROOT / "scripts"), set()
    for rule in rules_for(tmp_path, "fire", **BASE):
        stage, given = Path(rule.script).stem, params_of(rule, "fire")
        parts = [(part_in(arg.annotation), arg.arg) for arg in arguments_of_main(stage)]
        passed = {model: set(given[name]) for model, name in parts if model}
        if passed:
            read = keys_read(code, f"stages.{stage}", *given.get("modules", []))
            for model, keys in passed.items():
                seen, unseen = read.get(model, set()), READ_UNSEEN.get(stage, {}).get(model, set())
                assert seen <= keys <= seen | unseen, (stage, seen ^ keys)
            looked.add(stage)
    assert looked >= {"convert_rows", "validate_sharegpt", "estimate_run", "train_model", "trial", "evaluate", "tell"}


def arguments_of_main(stage: str) -> list[ast.arg]:
    nodes = statements(ROOT / "scripts" / "stages" / f"{stage}.py")
    (main,) = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "main")
    return main.args.kwonlyargs


def keys_read(code: Code, *modules: str) -> dict[str, set[str]]:
    """Give what the code of a stage reads of parts of the settings, by their class."""
    nodes = [node for definition in code.reached(*modules) for node in nodes_of(definition, code)]
    holders = {}  # fields of classes that hold such a part
    for node in nodes:
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(field, ast.AnnAssign) and (model := part_in(field.annotation)):
                holders[node.name] = (f".{ast.unparse(field.target)}", model)
    read: dict[str, set[str]] = {}
    for function in (one for node in nodes for one in ast.walk(node) if isinstance(one, ast.FunctionDef)):
        for arg in [*function.args.args, *function.args.kwonlyargs]:
            annotation = ast.unparse(arg.annotation) if arg.annotation else ""
            field, model = holders.get(annotation, ("", part_in(arg.annotation)))
            for one in ast.walk(function) if model else ():
                if isinstance(one, ast.Attribute) and ast.unparse(one.value) == f"{arg.arg}{field}":
                    read.setdefault(model, set()).add(one.attr)
    return {model: keys - {"model_dump", "model_dump_json", "model_copy"} for model, keys in read.items()}


def nodes_of(definition: Definition, code: Code) -> list[Any]:
    """Give the statements of a definition of one statement."""
    names = code.names(definition) if definition.number is not None else []
    file = ROOT / "scripts" / f"{definition.module.replace('.', '/')}.py"
    return [node for node in statements(file) if getattr(node, "name", None) in names] if names else []


@cache
def statements(file: Path) -> list[Any]:
    return ast.parse(file.read_bytes()).body if file.is_file() else []


def part_in(annotation: ast.expr | None) -> str:
    """Give the class of which an annotation means a part; "" for another."""
    found = re.match(r"'?PartOf\[(\w+)\]", ast.unparse(annotation)) if annotation else None
    return found[1] if found else ""
