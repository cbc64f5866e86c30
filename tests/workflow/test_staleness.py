"""What Snakemake records of a job's params, and how it reports changed ones."""

import re
from pathlib import Path
from typing import Any

import pytest

from small_workflow import make_rows, snakemake
from vlmflow.harness.staleness import texts_of
from workflow_runs import ROOT, clone

SHARES = {"val_share": 0.1, "test_share": 0.2}


def test_every_key_is_a_text_of_its_own() -> None:
    block = {"settings": {"rate": 1e-4, "lora": {"rank": 8}, "args": {}}, "dataset": "a b", "part": [1, 2], "seed": "1"}
    assert set(texts_of(block)) == {
        *("settings.rate=0.0001", "settings.lora.rank=8", "settings.args={}"),
        *('dataset="a b"', "part=[1, 2]", 'seed="1"'),
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_rows(tmp_path_factory.mktemp("finished"))
    snakemake(folder, "data/x/stats.json", **SHARES)
    return folder


def changes(folder: Path, root: Path = ROOT, **settings: Any) -> list[tuple[str, str]]:
    """Return the changed params of each job in a plan, before and now; jobs that follow from another have no reason."""
    said = snakemake(folder, "data/x/stats.json", "-n", root=root, **(SHARES | settings))
    assert said.count("Reason: ") == said.count("before: ")
    assert "provenance information" not in said
    return re.findall(r"before: (.*?) now: (.*?) *$", said, re.MULTILINE)


def test_a_plan_shows_the_setting_that_changed_and_no_other(finished: Path) -> None:
    assert changes(finished) == []
    assert changes(finished, row_limits={"max_turns": 8}) == [
        ("settings.row_limits.max_turns=64", "settings.row_limits.max_turns=8"),
    ]


def test_swapped_values_are_a_change(finished: Path) -> None:
    """Snakemake itself compares the set of values, which is the same."""
    ((before, now),) = changes(finished, val_share=0.2, test_share=0.1)
    assert set(before.split(",")) == {"settings.val_share=0.1", "settings.test_share=0.2"}
    assert set(now.split(",")) == {"settings.val_share=0.2", "settings.test_share=0.1"}


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("rows/row_check.py", "casefold()", "lower()"),
        ("rows/forms/prompt_completion.py", "completion: str", "completion: int | str"),
    ],
)
def test_changed_code_is_shown_as_such(finished: Path, tmp_path: Path, file: str, old: str, new: str) -> None:
    """A module that a script reaches indirectly, and one that no import statement names. No rule names its code."""
    root = clone(tmp_path / "clone")
    module = root / "scripts" / "vlmflow" / file
    assert old in module.read_text()
    module.write_text(module.read_text().replace(old, new))
    ((before, now),) = changes(finished, root)
    assert re.fullmatch('code="[0-9a-f]{16}"', before)
    assert re.fullmatch('code="[0-9a-f]{16}"', now)
    assert before != now
