"""What messages advise can be done: commands are understood by what they call, and keys are in the schema."""

import argparse
import json
import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from snakemake.cli import get_argument_parser

from texts_of_code import VALUE, texts
from workflow_runs import ROOT

pytestmark = pytest.mark.lengthy

SCRIPTS = ROOT / "scripts"
RULES = [ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk"))]


# --- commands


def commands(pattern: str) -> list[tuple[str, str]]:
    return [(place, found) for place, text in texts() for found in re.findall(pattern, text)]


MAKE = r"\bmake ((?:[a-z][a-z-]*(?:VALUE)?|\.venv/[\w./]+)(?: [A-Z]+=(?:\"[^\"]*\"|[^\s;,)`]+))*)"
PROSE = {"it", "them", "a", "an", "the", "one", "two", "links", "hard", "up", "sure", "by", "no"}
"""What stands behind "make" where it is no command."""


def test_make_has_every_target_and_variable_that_a_message_names() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = re.findall(r"^([a-z.][\w./% -]*):(?!=)", makefile, re.MULTILINE)
    targets = [target.replace("%", VALUE) for line in lines for target in line.split()]
    found = [(place, shlex.split(command)) for place, command in commands(MAKE)]
    assert len(found) > 30
    for place, (target, *variables) in found:
        if not variables and target in PROSE:
            continue
        assert any(fits(target, known) or fits(known, target) for known in targets), f"{place}: make {target}"
        for variable in variables:
            name = variable.partition("=")[0]
            assert re.search(rf"\$\(?\$?{name}\b", makefile), f"{place}: make {target} {variable}: no recipe reads it"


SNAKEMAKE = r"\bsnakemake ([^`;,)\n]*)"


def test_snakemake_understands_every_command_of_a_message() -> None:
    parser = get_argument_parser()
    rules = set(re.findall(r"^\s*(?:rule|checkpoint) (\w+)", "\n".join(map(Path.read_text, RULES)), re.MULTILINE))
    found = [
        (place, command.strip())
        for place, command in commands(SNAKEMAKE)
        if command.startswith(("-", "…")) and "[^" not in command
    ]
    assert len(found) > 15
    for place, command in found:
        words = [word for word in shlex.split(command.split(" shows ")[0]) if word != "…"]
        try:
            given = parser.parse_args(words)
        except (SystemExit, argparse.ArgumentError) as error:
            pytest.fail(f"{place}: snakemake {command}: {error}")
        unknown = {rule for rule in given.forcerun or () if rule != VALUE} - rules
        assert not unknown, f"{place}: {unknown}: no such rule"
        for target in set(given.targets) - {VALUE}:
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

FILES = ("train.jsonl", "train.lengths.jsonl", "train.lock")
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
    found = [(place, key) for place, key in found if key not in FILES]
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
