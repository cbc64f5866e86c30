"""Writes docs/models.md: which small models went from rows to proven weights, and when.

    PYTHONPATH=tests/helpers pytest -p models_page -m slow …

Tests of the whole road (`ROADS`) that passed get their row anew; all others keep theirs.
"""

import hashlib
import inspect
import json
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import families
import tiny_models
from families import FAMILIES
from seeing_families import SEEING

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

LIBRARIES = ("ms-swift", "transformers", "peft", "torch")

HEAD = """\
# Models that were tried

For people who choose a base model. Each of these models went from rows to `merged/RUN` through the workflow's own
rules, on the CPU: lengths, smoke run, training, merge, the proof of every tensor and of the logits. They are small
models, with the architecture, the layout on disk, the special tokens and the processor of published ones.
`make test-slow` writes the table. `code` is the digest of the code that makes the small model; a test fails if this
code has changed since. `make test` and `make demo` train models of Qwen3-VL.

| model | model_type | template | ways | on | with | code |
|---|---|---|---|---|---|---|
"""


class Road(NamedTuple):
    """A test of the whole road: model_type and template, what was trained, and a digest of the code of its model."""

    model_type: str
    template: str
    ways: str
    code: str


def roads() -> dict[str, Road]:
    """Return all by the name of their model; a test has it as its parameter."""
    of_text = [families.write_family, families.made_tokenizer]
    found = {
        name: Road(
            *(family.model_type, family.template),
            "LoRA, LoRA with experts, full" if family.experts else "LoRA, full",
            _digest(family, of_text),
        )
        for name, family in FAMILIES.items()
    }
    for name, seeing in SEEING.items():
        writers = [seeing.write, seeing.write_files, families.made_tokenizer]
        code = _digest((seeing.model_type, seeing.template), writers)
        found[name] = Road(seeing.model_type, seeing.template, "LoRA, full", code)
    for form, template in (("plain", "default"), ("chatml", "chatml")):
        code = _digest(form, [families.write_gpt2, families.made_tokenizer])
        found[f"gpt2-{form}"] = Road("polylm", template, "LoRA, full", code)
    for kind in ("qwen3", "qwen3-moe"):
        code = _digest(FAMILIES[kind], [*of_text, tiny_models.in_fp8])
        found[f"{kind}-fp8"] = Road(FAMILIES[kind].model_type, FAMILIES[kind].template, "LoRA", code)
    return dict(sorted(found.items()))


def _digest(settings: Any, functions: list[Callable[..., Any]]) -> str:
    text = [repr(settings), *map(inspect.getsource, functions)]
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:8]


def rows() -> dict[str, list[str]]:
    """Return the page's cells by the model's name."""
    lines = PAGE.read_text().splitlines() if PAGE.is_file() else []
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {each[0]: each[1:] for each in cells if each[0] != "model"}


class Passed:
    """The models whose road passed in this session."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that passed."""
        properties = dict(report.user_properties)
        if report.when == "call" and report.passed and "road" in properties:
            self.names.add(str(properties["road"]))

    def pytest_sessionfinish(self) -> None:
        """Write the page."""
        known, before = roads(), rows()
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
        found = {name: [*road[:3], today, versions, road.code] for name, road in known.items() if name in self.names}
        kept = {name: before[name] for name in known if name in before}
        lines = [f"| {' | '.join([name, *cells])} |" for name, cells in sorted((kept | found).items())]
        PAGE.write_text(HEAD + "\n".join(lines) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Collect what passes, in the process that gets all reports."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Passed())
