"""notebooks/look.ipynb, executed on runs with and without results."""

import json
import re
from pathlib import Path

import pytest

from executed_notebook import NOTEBOOK, executed
from made_accounts import some_checks, some_evaluation, some_fitted, some_gate, some_report, some_stats
from vlmflow.core.account import write_account
from vlmflow.merging.proof import Proof
from workflow_runs import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a working directory with the accounts of the run `mine`, without an evaluation."""
    write_account(tmp_path / "data/fire/stats.json", some_stats())
    write_account(tmp_path / "fitted/mine/account.json", some_fitted())
    talk = [{"from": "human", "value": "<image>\nWhat is it?\x1b[31m"}, {"from": "gpt", "value": "A ball."}]
    row = {"id": "a", "source": "gqa", "images": ["a.jpg"], "attempts": [1], "scores": [], "conversations": talk}
    (tmp_path / "fitted/mine/val.jsonl").write_text(json.dumps(row) + "\n")
    lengths = {"id": "a", "start": 0, "end": 9, "text_tokens": 90, "picture_tokens": 9}
    (tmp_path / "lengths/mine").mkdir(parents=True)
    for split in ("train", "val"):
        (tmp_path / f"lengths/mine/{split}.jsonl").write_text(json.dumps(lengths) + "\n")
    write_account(tmp_path / "checkpoints/mine/smoke/gate.json", some_gate())
    write_account(tmp_path / "checkpoints/mine/full/report.json", some_report())
    write_account(tmp_path / "verified/mine/proof.json", Proof(some_checks(), {}, None, {}))
    return tmp_path


def test_it_shows_a_run_that_was_not_evaluated(folder: Path) -> None:
    said = executed(folder, "mine")
    assert "raw train: 1 rows = 1 kept + 0 rejected + 0 left out on purpose" in said
    assert "human: <image> What is it?�[31m\ngpt: A ball." in said
    assert "the gate is open; the full run: 2 h" in said
    assert "lowest validation loss 2.000, at step 8" in said
    assert "9 tensors proven" in said
    assert "not evaluated" in said
    assert "titles: ['', '']" in said, "lengths and losses"


def test_it_shows_an_evaluation(folder: Path) -> None:
    write_account(folder / "eval/mine/val/report.json", some_evaluation())
    contexts = {name: {"right": {"nats": 4.0, "tokens": 2}, "wrong": None} for name in ("own", "other")}
    row = {"id": "a", "source": "", "images": [], "group": "g", "right": "r", "wrong": None, "donor": "b"}
    row |= {"picture_donor": None, "gold_in_feedback": False, "base": contexts, "tuned": contexts}
    with_picture = row | {"tuned": contexts | {"other_picture": contexts["own"]}}
    lines = [json.dumps(each) + "\n" for each in (row, row, with_picture)]
    (folder / "eval/mine/val/rows.jsonl").write_text("".join(lines))
    said = executed(folder, "mine")
    assert "val: learned, 400 rows. The tuned model learned to use feedback." in said
    assert "not evaluated" not in said
    assert "titles: ['', '', 'rows of val']" in said


def test_it_shows_a_run_that_has_not_begun(folder: Path) -> None:
    said = executed(folder, "other")
    assert "fitted/other/account.json does not exist yet" in said
    assert "lengths: not measured yet" in said
    assert "not evaluated" in said
    assert "titles: []" in said


def test_a_damaged_account_is_named(folder: Path) -> None:
    (folder / "checkpoints/mine/full/report.json").write_text("{")
    assert "checkpoints/mine/full/report.json: Expecting" in executed(folder, "mine", ends_well=False)


def test_it_is_stored_without_outputs() -> None:
    """They would show somebody's rows."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert 8 <= len(cells) <= 14
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


def test_its_environment_has_the_versions_of_the_others() -> None:
    """envs/jupyter.lock is installed into the same .venv, and the image above the data environment."""
    locked = {
        name: set(re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", (ROOT / f"envs/{name}.lock").read_text(), re.MULTILINE))
        for name in ("data", "dev", "jupyter")
    }
    assert locked["data"] <= locked["jupyter"]
    known = {name for name, _ in locked["dev"]}
    assert {one for one in locked["jupyter"] if one[0] in known} <= locked["dev"]
    assert "jupyterlab" in {name for name, _ in locked["jupyter"]}
