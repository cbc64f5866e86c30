"""What messages advise can be done: commands are understood, keys are in the schema, steps lead to the end.

For each kind of advice one test does what the message says; those are here that need no training.
"""

import argparse
import ast
import fcntl
import json
import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from snakemake.cli import get_argument_parser

from hub_server import TOKEN, served_hub
from texts_of_code import VALUE, next_steps, texts
from vlmflow.config.source import HubSource
from vlmflow.config.yaml_file import read_yaml
from vlmflow.core import files
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import whole_file
from vlmflow.fetch import hub
from vlmflow.pictures.roots import PictureRoots
from workflow_runs import ROOT, refusal

pytestmark = pytest.mark.lengthy

SCRIPTS = ROOT / "scripts"
RULES = [ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk"))]


# --- commands


def commands(pattern: str) -> list[tuple[str, Any]]:
    said = [(place, text) for place, text in texts() if "(?P<" not in text]
    return [(place, found) for place, text in said for found in re.findall(pattern, text)]


MAKE = r"\bmake ((?:[a-z][a-z-]*(?:VALUE)?|\.venv/[\w./]+)(?: [A-Z]+=(?:\"[^\"]*\"|[^\s;,)`]+))*)"
PROSE = {"it", "them", "a", "an", "the", "one", "two", "links", "hard", "up", "sure", "by", "no"}
"""What stands behind "make" where it is no command."""


def test_make_has_every_target_and_variable_that_a_message_names() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = re.findall(r"^([a-z.][\w./% -]*):(?!=)", makefile, re.MULTILINE)
    targets = [target.replace("%", VALUE) for line in lines for target in line.split()]
    found = [(place, shlex.split(command)) for place, command in commands(MAKE)]
    assert len(found) > 3
    for place, (target, *variables) in found:
        if not variables and target in PROSE:
            continue
        assert any(fits(target, known) or fits(known, target) for known in targets), f"{place}: make {target}"
        for variable in variables:
            name = variable.partition("=")[0]
            assert re.search(rf"\$\(?\$?{name}\b", makefile), f"{place}: make {target} {variable}: no recipe reads it"


VLMFLOW = r"\bvlmflow ((?:cluster )?[a-z-]+)((?: (?:-[\w-]+(?: \w+)?|[A-Z]+|…|[\w:]*/[\w/]+|[\w-]+\.yaml))*)"
OF_VLMFLOW = {"did", "may", "published", "training", "writes", "wrote"}
"""What stands behind "vlmflow" where it is no command."""


def test_vlmflow_has_every_command_and_option_that_a_message_names() -> None:
    found = [(place, name.split(), words.split()) for place, (name, words) in commands(VLMFLOW)]
    assert len(found) > 40
    assert {name[0] for _, name, _ in found} > OF_VLMFLOW | {"run", "cluster", "doctor", "env"}
    for place, name, words in found:
        if name[0] not in OF_VLMFLOW and "harness/stage.py" not in place:  # test_screen.py looks at those
            said = refusal([*name, *words])
            assert said == "" or (not words and "Missing" in said), (
                f"{place}: vlmflow {' '.join([*name, *words])}: {said}"
            )


SNAKEMAKE = r"\bsnakemake ([^`;,)\n]*)"


def test_snakemake_understands_every_command_of_a_message() -> None:
    parser = get_argument_parser()
    rules = set(re.findall(r"^\s*(?:rule|checkpoint) (\w+)", "\n".join(map(Path.read_text, RULES)), re.MULTILINE))
    found = [
        (place, command.strip())
        for place, command in commands(SNAKEMAKE)
        if command.startswith(("-", "…")) and "[^" not in command
    ]
    assert len(found) > 10
    for place, command in found:
        words = [word for word in shlex.split(command.split(" shows ")[0]) if word != "…"]
        try:
            given = parser.parse_args(words)
        except (SystemExit, argparse.ArgumentError) as error:
            pytest.fail(f"{place}: snakemake {command}: {error}")
        unknown = {rule for rule in given.forcerun or () if rule != VALUE} - rules
        assert not unknown, f"{place}: {unknown}: no such rule"
        for target in set(given.targets) - {VALUE, "TARGET"}:
            assert any(fits(target, output) for output in outputs()), f"{place}: no rule makes {target}"


@cache
def outputs() -> list[str]:
    """Return the targets that rules make, with their wildcards."""
    blocks = re.findall(r"^    output:\n((?:        .*\n)+)", "\n".join(map(Path.read_text, RULES)), re.MULTILINE)
    return re.findall(r'"([^"\n]+/[^"\n]+)"', "".join(blocks))


ANYTHING = re.compile(rf"\\{{.*?\\}}|{VALUE}")
"""A wildcard of Snakemake, after re.escape, or a value."""


def fits(target: str, output: str) -> bool:
    """Return whether a target is an output or a file in it, or may be one, for a value stands for any name."""
    ours, theirs = target.split("/"), output.split("/")
    return len(ours) >= len(theirs) and all(
        one == VALUE or re.fullmatch(ANYTHING.sub("[^/]+", re.escape(other)), one)
        for one, other in zip(ours, theirs, strict=False)
    )


PROGRAMS = (r"\bpython3? -m ([\w.]+)", r"\bscripts/([\w/]+)\.py")


def test_every_program_that_a_message_names_is_there() -> None:
    for place, name in [found for pattern in PROGRAMS for found in commands(pattern)]:
        path = SCRIPTS / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{place}: {name}"


# --- keys

SCHEMA = json.loads((ROOT / "docs" / "config.schema.json").read_text())


def opened(block: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the blocks of a schema that a value may be of."""
    if "$ref" in block:
        return opened(SCHEMA["$defs"][block["$ref"].rpartition("/")[2]])
    inner = [*block.get("anyOf", []), *block.get("oneOf", [])]
    return [block, *(each for one in inner for each in opened(one))]


def at_key(key: str) -> list[dict[str, Any]]:
    """Return the schema's blocks of a key, as `runs.NAME.train.lora.rank`; [] if there is no such key."""
    blocks = opened(SCHEMA)
    for part in key.split("."):
        blocks = [
            each
            for block in blocks
            for found in [block.get("properties", {}).get(part), *block.get("patternProperties", {}).values()]
            if found is not None
            for each in opened(found)
        ]
    return blocks


FULL_KEY = re.compile(r"\b((?:runs|datasets|models|search|picture_sources)\.(?:NAME|VALUE)(?:\.[a-z_]+)+)")
SHORT_KEY = re.compile(
    r"(?<![\w./])((?:train|smoke|verify|evaluate|lora|quantisation|picture_limits|row_limits)\.[a-z_.]+)"
)
PARENTS = ("runs.NAME", "datasets.NAME", "runs.NAME.train")
"""Where a message that is about one block begins."""

NO_KEYS = ("train.jsonl", "train.lengths.jsonl", "train.lock", "train.text_args")
"""Files, and what settings say together."""

OPEN = ("runs.NAME.deepspeed.", "runs.NAME.train.swift_args.")
"""Their keys are others'."""


def test_every_key_that_a_message_names_is_in_the_schema() -> None:
    found = Counter(
        (place, key.rstrip(".")) for place, text in texts() for key in FULL_KEY.findall(text) if "{" not in key
    )
    assert len(found) > 80
    for place, key in found:
        known = key.replace(VALUE, "NAME")
        assert at_key(known) or known.startswith(OPEN), f"{place}: {key}: there is no such key"


def test_every_short_key_that_a_message_names_is_in_the_schema() -> None:
    found = [(place, key.rstrip(".")) for place, text in texts() for key in SHORT_KEY.findall(text)]
    found = [(place, key) for place, key in found if key not in NO_KEYS]
    assert len(found) > 50
    for place, key in found:
        assert any(at_key(f"{parent}.{key}") for parent in PARENTS), f"{place}: {key}: there is no such key"


SET = re.compile(r"\bset (?!aside|it\b)((?:[a-z_]+\.(?:NAME\.|VALUE\.)?)*[a-z_]+): ([\w.-]+)")


def test_every_value_that_a_message_sets_is_allowed() -> None:
    found = [(place, *each) for place, text in texts() for each in SET.findall(text) if "kubernetes/" not in place]
    assert len(found) > 5
    for place, key, value in found:
        known = key.replace(VALUE, "NAME")
        blocks = at_key(known) or [block for one in SCHEMA["$defs"].values() for block in in_block(one, known)]
        assert blocks, f"{place}: {key}: there is no such key"
        choices = [choice for block in blocks for choice in [*block.get("enum", []), *const_of(block)]]
        types = {block.get("type") for block in blocks}
        free = types - {None, "null", "string" if choices else "null"}
        assert value == VALUE or value in map(str, choices) or allowed(value, free), f"{place}: {key}: {value}"


def in_block(block: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = block.get("properties", {}).get(key.rpartition(".")[2])
    return opened(found) if found else []


def const_of(block: dict[str, Any]) -> list[Any]:
    return [block["const"]] if "const" in block else []


def allowed(value: str, types: set[str | None]) -> bool:
    """Return whether a word is a value of one of a schema's types."""
    if value in ("true", "false"):
        return "boolean" in types
    if re.fullmatch(r"-?\d+", value):
        return bool({"integer", "number"} & types)
    return "string" in types or "object" in types or "array" in types


HERE = "tests/unit/test_advice.py::"

KINDS: dict[str, tuple[str, str]] = {
    "make it again": (
        r"snakemake (?:…|--forcerun)|vlmflow (?:run|refresh)|(?:made|make|fit|tell|ask|evaluate|train)\b.* again",
        "tests/workflow/test_swapped_files.py::test_the_command_in_a_refusal_checks_the_picture_again",
    ),
    "remove what is damaged": (
        r"\b(?:remove|delete|rename|move|unset|restore|put it back|leave \w+ out|empty)\b",
        "tests/unit/in_trainer/test_logs.py::test_a_damaged_line_is_named_and_costs_no_training",
    ),
    "set a key": (
        r"\b(?:runs|datasets|models|search|stores|cluster)\.|\b(?:train|smoke|verify)\.\w|config: |objective:|"
        r"nodes: |picture_sources|swift_args|pins\.yaml|VALUE: true|^set (?:VALUE$|the folders)",
        "tests/unit/lengths/test_planned_steps.py::test_rows_that_are_left_out_are_counted_and_named",
    ),
    "give an option or a variable": (
        r"--[a-z]|\b[A-Z]+=|\bTMPDIR\b|KUBECONFIG|\bvlmflow \w+",
        "tests/workflow/test_swapped_files.py::test_the_command_in_a_refusal_checks_the_picture_again",
    ),
    "name another file, folder or name": (
        r"\b(?:name|give|put|use|choose|take|say|write|ask|work)\b",
        HERE + "test_a_folder_that_is_named_as_advised_is_taken",
    ),
    "fix a file": (
        r"\badd keys|\b(?:fix|save|fetch|correct|close|copy|convert|change|merge it)\b|must hold|must be JSON",
        HERE + "test_a_file_that_is_saved_as_advised_is_read",
    ),
    "wait": (r"\bwait\b|later\b|after that time", HERE + "test_who_waits_as_advised_writes"),
    "run the same command again": (
        r"same command|run again|run it again|resumes",
        "tests/stages/test_trainer.py::test_an_interrupted_training_saves_and_resumes",
    ),
    "make room": (
        r"\bfree\b|\bdisk\b|\bmemory\b|\bhours\b|\bGPUs\b",
        "tests/stages/test_trainer.py::test_a_full_disk_stops_the_training_which_resumes_when_there_is_room",
    ),
    "train in another way": (
        r"learning rate|\btrain (?:without|the|otherwise|again)|\btraining\b|start trainers",
        "tests/stages/test_training_faults.py::test_a_step_without_a_finite_number_ends_the_training_before_it_is_saved",
    ),
    "look": (
        r"\b(?:see|look|read|check|find out|says? why)\b|the stacks are",
        "tests/unit/serving/test_server.py::test_a_server_that_ends_is_explained_by_its_output",
    ),
    "install": (
        r"\binstall|\bupdate\b|vlmflow env|same version",
        "tests/workflow/test_search_plan.py::test_a_missing_environment_is_said_by_a_dry_run",
    ),
    "set a token": (r"token|\bkey\b|\bset it\b", HERE + "test_a_token_that_is_set_as_advised_opens_the_repository"),
    "apply to the cluster": (r"kubectl|administrator|overlay", "tests/remote/cluster/test_doctor.py"),
    "report": (r"\breport (?:it|this)\b", ""),
    "do not use it": (r"do not (?:use|trust|publish)|publish its", ""),
}
"""Kinds of next steps: how they are recognised, and the test that follows one to its end. The last two leave nothing to
do here."""


def test_every_next_step_is_of_a_kind_that_a_test_follows() -> None:
    found = {
        place: [kind for kind, (words, _) in KINDS.items() if re.search(words, text)] for place, text in next_steps()
    }
    assert len(found) > 250
    assert [place for place, kinds in found.items() if not kinds] == []
    for kind, (_, followed) in KINDS.items():
        assert any(kind in kinds for kinds in found.values()), kind
        file, _, name = followed.partition("::")
        if followed:
            names = {
                node.name
                for node in ast.walk(ast.parse((ROOT / file).read_text()))
                if isinstance(node, ast.FunctionDef)
            }
            assert not name or name in names, followed


def said_by(error: pytest.ExceptionInfo[VlmflowError], words: str) -> None:
    assert words in error.value.next_step


def test_a_folder_that_is_named_as_advised_is_taken(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError) as error:
        PictureRoots([str(tmp_path / "pictures")], "datasets.x.image_roots")
    said_by(error, "name a folder that can be read: datasets.x.image_roots")
    (tmp_path / "pictures").mkdir()
    PictureRoots([str(tmp_path / "pictures")], "datasets.x.image_roots")


def test_a_file_that_is_saved_as_advised_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("a: ä", encoding="latin-1")
    with pytest.raises(VlmflowError) as error:
        read_yaml(file)
    said_by(error, "save the file as UTF-8")
    file.write_text(file.read_text(encoding="latin-1"), encoding="utf-8")
    assert read_yaml(file) == {"a": "ä"}


def test_who_waits_as_advised_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.2)
    file = tmp_path / "rows.jsonl"
    with files.unfinished(file).open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(PassingError) as error, whole_file(file):
            pass
    said_by(error, "wait for it to end, or stop it; then run the same command again")
    with whole_file(file) as written:
        written.write(b"{}")
    assert file.read_bytes() == b"{}"


def test_a_token_that_is_set_as_advised_opens_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    with served_hub(monkeypatch) as server:
        server.add("o/m", {"config.json": b"{}"}, plain=("config.json",))
        monkeypatch.setenv("HF_TOKEN", "hf_old")
        with pytest.raises(VlmflowError) as error:
            hub.describe(HubSource("model", "o/m", None))
        said_by(error, "set a token for it: HF_TOKEN")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert hub.describe(HubSource("model", "o/m", None))
