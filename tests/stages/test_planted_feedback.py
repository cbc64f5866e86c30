"""Two trainings by the workflow's own trainer: the loss tells the run that could learn from feedback from the other."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from planted_feedback import CODES, ROWS, RUNS
from vlmflow.rows.chat import ROLES

CHANCE = math.log(len(CODES))

Turns = list[dict[str, str]]


def rows_of(folder: Path, run: str, split: str) -> list[Turns]:
    lines = (folder / "data" / run / f"{split}.jsonl").read_text().splitlines()
    return [json.loads(line)["conversations"] for line in lines]


def with_feedback_of_others(rows: list[Turns]) -> list[Turns]:
    """Return each row with the feedback of the nearest later row that has another last answer."""
    count = len(rows)
    donors = [
        next(donor for step in range(1, count) if (donor := rows[(number + step) % count])[-1] != row[-1])
        for number, row in enumerate(rows)
    ]
    return [[*row[:-2], donor[-2], row[-1]] for row, donor in zip(rows, donors, strict=True)]


def loss_of_last_answers(folder: Path, rows: list[Turns]) -> float:
    """Return the mean loss of the rows' last answers, each a single token, in nats. folder: the model's."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for row in rows:
        said = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row]
        prompt = tokenizer.apply_chat_template(said[:-1], add_generation_prompt=True, return_dict=False)
        (answer,) = tokenizer.encode(row[-1]["value"])
        whole = tokenizer.apply_chat_template(said, return_dict=False)
        assert whole[: len(prompt) + 1] == [*prompt, answer]
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        losses.append(-logits.log_softmax(-1)[answer].item())
    return statistics.fmean(losses)


@pytest.fixture(scope="module")
def losses(planted_runs: Path) -> dict[str, tuple[float, float]]:
    """Return the losses on val of both runs and of the untrained model: with the row's own feedback, and another's."""
    models = {"base": "real", **{f"verified/{run}": run for run in RUNS}}
    found = {}
    for model, run in models.items():
        rows = rows_of(planted_runs, run, "val")
        own, other = (
            loss_of_last_answers(planted_runs / model, each) for each in (rows, with_feedback_of_others(rows))
        )
        found[model] = own, other
        print(f"{model}: {own:.3f} nats with the row's own feedback, {other:.3f} with another row's")
    return found


def test_the_run_on_real_feedback_uses_it(losses: dict[str, tuple[float, float]]) -> None:
    own, other = losses["verified/real"]
    assert own < 0.3
    assert own - other <= -1


def test_the_run_on_shuffled_feedback_does_not(losses: dict[str, tuple[float, float]]) -> None:
    """It learned that a code comes last, and nothing about which: its loss is that of a guess."""
    own, other = losses["verified/shuffled"]
    assert own == pytest.approx(CHANCE, abs=0.15)
    assert own == pytest.approx(other, abs=0.1)


def test_the_untrained_model_does_not_either(losses: dict[str, tuple[float, float]]) -> None:
    own, other = losses["base"]
    assert own > CHANCE
    assert own == pytest.approx(other, abs=0.1)


@pytest.mark.parametrize("split", ROWS)
def test_the_runs_differ_in_the_code_in_the_feedback_alone(planted_runs: Path, split: str) -> None:
    real, shuffled = (rows_of(planted_runs, run, split) for run in RUNS)
    assert len(real) == ROWS[split]
    dealt_its_own = 0
    for row, other in zip(real, shuffled, strict=True):
        question, wrong, feedback, right = (turn["value"] for turn in row)
        assert right in CODES
        assert feedback.split().count(right) == 1
        assert right not in f"{question} {wrong}".split()
        assert (other[:2], other[3]) == (row[:2], row[3])
        held = other[2]["value"].split("\n")[1]
        assert other[2]["value"] == feedback.replace(f"\n{right}\n", f"\n{held}\n")
        dealt_its_own += held == right
    assert dealt_its_own / len(real) < 0.05
