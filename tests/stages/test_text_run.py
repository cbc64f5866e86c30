"""A text model really trained on rows without pictures: no stage needs a picture or a manifest."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from forked_snakemake import called
from tiny_models import write_text_model
from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.against_swift import check_lengths
from vlmflow.lengths.chat_form import ChatForm
from vlmflow.lengths.count import TokenCounter, measure_rows
from vlmflow.reports.provenance import FOLDER, how_to_ask
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift.arguments import BaseModel
from workflow_runs import ROOT

CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
SWIFT_ARGS = CONFIG["runs"]["qwen3-alpaca"]["train"]["swift_args"]
TRAIN = {
    "max_steps": 8,
    "checkpoint_steps": 4,
    "evaluation_steps": 4,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2,
    "dtype": "float32",
    "max_length": 512,
    "dataloader_workers": 0,
}


def run(folder: Path, target: str) -> None:
    """Make a target of the text run with Snakemake."""
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    files = ["--configfile", str(folder / "mine.yaml"), "--cores", "2", "--"]
    done = called([*call, *files, target])
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a Qwen3 with 60,000 weights up to its smoke gate, with the real run's template."""
    folder = tmp_path_factory.mktemp("text")
    write_text_model(folder)
    rows = [{"instruction": f"Say {n}.", "input": "", "output": f"It is {n}, and again {n}."} for n in range(80)]
    (folder / "rows.json").write_text(json.dumps(rows))
    mine = {
        "models": {"tiny": {"source": "tiny", "model_type": "qwen3"}},
        "datasets": {"alpaca": {"train": "rows.json#60", "system_prompt": "Be brief.", "val_share": 0.1}},
        "runs": {
            "text": {
                "model": "tiny",
                "dataset": "alpaca",
                "device": "cpu",
                "processes": 2,
                "train": TRAIN | {"swift_args": SWIFT_ARGS},
                "smoke": {"steps": 6, "longest": 4, "sample": 4},
            }
        },
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(mine))
    run(folder, "checkpoints/text/smoke")
    return folder


def test_the_gate_opens_for_rows_without_pictures(trained: Path) -> None:
    """Two parallel processes; neither waits for the other's pictures."""
    gate = json.loads((trained / "checkpoints" / "text" / "smoke" / "gate.json").read_text())
    assert gate["passed"]
    assert not (trained / "images").exists()


def test_lengths_have_only_text_tokens(trained: Path) -> None:
    summary = json.loads((trained / "lengths" / "text" / "summary.json").read_text())
    assert summary["train"]["picture_tokens"] == summary["val"]["picture_tokens"] == 0
    assert summary["train"]["text_tokens"] == summary["train"]["tokens"] > 0
    assert summary["text_args"] == SWIFT_ARGS
    assert summary["max_length"]["covers_all"] < TRAIN["max_length"]


@pytest.mark.parametrize(
    "text_args",
    [
        SWIFT_ARGS,
        {"template": "qwen3"},  # an empty think block is put before answers
        {"template": "qwen3", "system": "Be long.\\nAnd kind."},
        {"template": "qwen3_nothinking", "system": "Be long."},
    ],
)
@pytest.mark.parametrize("last_answer_only", [False, True])
def test_lengths_are_those_of_the_trainer(
    trained: Path, tmp_path: Path, text_args: dict[str, Any], last_answer_only: bool
) -> None:
    """To the token: with the real run's template and options and without, with a system turn and without."""
    rows = [json.loads(line) for line in (trained / "data" / "alpaca" / "val.jsonl").read_text().splitlines()]
    asked, answered = rows[0]["conversations"][-2:]
    thought = answered | {"value": f"<think>\nWell, 3.\n</think>\n\n{answered['value']}"}
    again = asked | {"value": "Again?"}
    rows.append(rows[0] | {"conversations": [asked, answered, again, answered]})
    rows.append(rows[0] | {"conversations": [asked, answered, again, thought]})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    counter = TokenCounter(trained / "tiny", [], 64, ChatForm.of(text_args, last_answer_only))
    lengths = list(measure_rows(file, counter, 1))
    data = TrainingData(file, file, tmp_path, "digest", last_answer_only)
    base = BaseModel(trained / "tiny", "qwen3", "digest")
    assert check_lengths({file: lengths}, data, base, 64, text_args, 2) == len(rows) > 6


@pytest.mark.parametrize(("model", "modality"), [("tiny", "text"), ("vl", "text"), ("vl", "image")])
def test_the_model_card_says_how_to_ask_this_model(trained: Path, model: str, modality: str) -> None:
    """Its lines run unchanged, on a model of each kind."""
    picture = next((trained / "sample").rglob("*.jpg"))
    code = how_to_ask(model == "vl", modality).replace(FOLDER, str(trained / model))
    assert ("PICTURE" in code) == (modality == "image")
    code = code.replace("PICTURE", str(picture)).replace('device_map="auto"', 'device_map="cpu"')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_another_chat_form_is_refused_with_what_to_do(trained: Path, tmp_path: Path) -> None:
    """A template that lengths.py does not know is refused, however similar its lengths are."""
    text_args = {"template": "qwen2_5"}  # says "You are Qwen" where a row has no system turn
    row = json.loads((trained / "data" / "alpaca" / "val.jsonl").read_text().splitlines()[0])
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row | {"conversations": row["conversations"][-2:]}) + "\n")
    counter = TokenCounter(trained / "tiny", [], 64, ChatForm.of(text_args, False))
    data = TrainingData(file, file, tmp_path, "digest", False)
    base = BaseModel(trained / "tiny", "qwen3", "digest")
    with pytest.raises(VlmflowError, match="1 of 1 checked rows have a different length") as error:
        check_lengths({file: list(measure_rows(file, counter, 1))}, data, base, 64, text_args, 2)
    assert "train.swift_args (template)" in error.value.next_step


def test_rows_without_pictures_are_cached(trained: Path) -> None:
    """A text model's trainer would tokenize every row before its first step; the cache has lengths and order."""
    run(trained, "cached/text")
    from datasets import load_from_disk

    lengths = [json.loads(line) for line in (trained / "lengths/text/train.jsonl").read_text().splitlines()]
    cached = load_from_disk(str(trained / "cached" / "text" / "train"))["lengths"]
    assert sorted(cached) == sorted([row["text_tokens"]] for row in lengths)
