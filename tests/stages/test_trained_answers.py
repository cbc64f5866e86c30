"""Which texts are trained, and read, and which answers of FIRE's rows: our rows, as ms-swift itself encodes them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unicodedata import normalize

import msgspec
import pytest

from made_rows import FOLDER, fire_row, fire_rows, form_rows, training_form, write_picture
from tiny_trainings import QUICK
from vlmflow.config.data_settings import DatasetSettings
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.settings import RowLimits
from vlmflow.config.strategies import DDP
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.lengths.against_swift import check_lengths
from vlmflow.lengths.count import TokenCounter, measure_rows
from vlmflow.pictures.manifest import PictureEntry
from vlmflow.raw.json_file import JsonRows
from vlmflow.rows.convert import ConvertedRow
from vlmflow.rows.forms.fire import read_trajectory
from vlmflow.rows.sharegpt import as_line, first_fault
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.train import report, train
from vlmflow.swift.arguments import BaseModel, Training
from vlmflow.swift.chat_form import ChatForm
from vlmflow.swift.child_process import environment

REAL = FOLDER / "FIRE-train-100K.json"
"""Real rows of FIRE, where the project's shared data is."""

ENCODE = """
import json, sys
from itertools import groupby
from swift import get_processor, get_template
from swift.dataset import load_dataset
from vlmflow.swift.own_template import read_rows_by_type
read_rows_by_type()
model, *cases = sys.argv[1:]
for loss_scale, file, wanted in map(json.loads, cases):
    template = get_template(get_processor(model, model_type="qwen3_vl"), max_length=32768, loss_scale=loss_scale)
    template.set_mode("train")
    rows, _ = load_dataset([file], strict=True)
    found, read = [], []
    for number in wanted or range(len(rows)):
        encoded = template.encode(rows[number])
        runs = [list(run) for trained, run in groupby(encoded["labels"], lambda label: label != -100) if trained]
        found.append([template.tokenizer.decode(run) for run in runs])
        read.append(template.tokenizer.decode(encoded["input_ids"]))
    print("trained:", json.dumps(found if file[-12:] != "/texts.jsonl" else read))
"""


def raw_row(*scores: int, **changes: Any) -> bytes:
    row = fire_row(rounds=len(scores), **changes)
    for turn, score in zip(row["conversations"][1::2], scores, strict=True):
        turn["value"] = f"Score: {score}.\nFeedback: hint {score}\n"
    return json.dumps(row).encode()


def some_rows() -> list[bytes]:
    real: list[bytes] = []
    if REAL.exists() or os.environ.get("CI") == "true":  # there it must not be missing
        with JsonRows(REAL) as rows:
            real = list(rows)
    return [raw_row(3, 9), raw_row(2, 8, 5, 10, 4), raw_row(8), raw_row(9, 3, 7), raw_row(1, 2), *real]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny Qwen3-VL and a picture."""
    folder = tmp_path_factory.mktemp("base")
    texts = ["Thought: What is it? Answer: the picture shows the hint. Score: Feedback: You should look again."]
    write_tiny_model(folder / "model", texts, TinyShape(merges=64), seed=1)
    write_picture(folder / "pictures" / "p.png")
    return folder


def converted(raw: Iterable[bytes], form: DatasetSettings) -> list[ConvertedRow]:
    make = fire_rows(form, RowLimits(max_turns=1_000), "Look at it.")
    made = [make(f"r{number}", number, row) for number, row in enumerate(raw)]
    return [row for rows in made if isinstance(rows, list) for row in rows]


def good_answers(raw: bytes) -> list[str]:
    """Return the answers of a raw row that the teacher gives at least 8, with what ends an answer."""
    return [f"{attempt.answer}<|im_end|>\n" for attempt in read_trajectory(raw).attempts if attempt.score >= 8]


FEW = [raw_row(3, 9), raw_row(2, 8, 5, 10, 4), raw_row(9, 3)]

DAY = {"id": "r" * 18_000, "source": "2024-01-15", "images": []} | {
    "conversations": [{"from": "human", "value": "2024-01-15"}, {"from": "gpt", "value": "2024-01-16"}]
}
"""A row of 18 kB in which everything looks like a date, without a picture."""

ODD = [
    *(
        "    y = 1\n    return y",
        "\u3000\u3000一。\n\u3000\u3000二。",
        " It.",
        "\n\n  a",
        "a \n",
        "a\r\nb\rc",
        "\t\u2028a",
        "a\n\n\n b",
    ),
    *(
        "{{ROUND0}}",
        "a {{ROUND1}}",
        "{{QUERY}} {{SYSTEM}}",
        "{{RESPONSE}}",
        "{{x}} {ROUND0}",
        "<img>a.png</img>",
        "<img>b",
    ),
    *(
        "<image>",
        "a <video> b",
        "<audio>",
        "<bbox>",
        "<ref-object>",
        "<cot-process>",
        "a<start-image>",
        "<|im_end|>",
        "<b>&amp;",
    ),
    *(
        "Picture 1: <img></img>",
        "a \u0000 b",
        "</think>",
        "<tool_call>",
        "\ufeffa",
        "e\u0301 \ufb01 \xb2",
        "\ud83d\ude42",
        "None",
        "%s {} \\n",
    ),
]
"""Texts that a reader, a template or a tokenizer might change."""


def odd_rows() -> list[ConvertedRow]:
    """Return the usable rows of those that have an odd text as question, answer, later question, or system prompt."""
    make = form_rows("messages", "text", {}, None, None)
    roles = ("system", "user", "assistant", "user", "assistant")
    rows = [[odd if n == place else "plain" for n in range(5)] for odd in ODD for place in range(5)]
    raw = [{"messages": [{"role": who, "content": text} for who, text in zip(roles, row, strict=True)]} for row in rows]
    made = [make(f"r{number}", number, json.dumps(row).encode()) for number, row in enumerate(raw)]
    return [found[0] for found in made if isinstance(found, list) and first_fault(found[0], RowLimits()) is None]


CASES: dict[str, tuple[list[bytes], DatasetSettings, list[int]]] = {
    "trajectory": (some_rows(), training_form("trajectory", min_score=8), []),
    "timestep": (some_rows(), training_form("timestep", 6, min_score=8), []),
    "trajectory and single turns": (FEW, training_form("trajectory", None, 8, "last_good"), []),
    "timestep and single turns": (FEW, training_form("timestep", None, 8, "last_good"), []),
    "late": ([raw_row(3, 9)], training_form("trajectory", min_score=8), [0, 600]),
}
"""Raw rows by the case's name, how they are converted, and the rows to encode; [] for all. Before those of `late`
stand more than 10 MB of DAY."""


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, list[str]]]]:
    """Return the rows of each case: the id, and the trained texts, one for each unbroken piece of labels."""
    folder = tmp_path_factory.mktemp("encoded")
    words, ids = [], []
    for name, (raw, form, wanted) in CASES.items():
        rows = converted(raw, form)
        lines = [
            *([json.dumps(DAY).encode()] * 600 if name == "late" else []),
            *(as_line(row, ["p.png"]) for row in rows),
        ]
        file = folder / f"{name}.jsonl"
        file.write_bytes(b"\n".join(lines) + b"\n")
        words.append(json.dumps(["last_round" if form.form == "timestep" else "default", str(file), wanted]))
        ids.append([json.loads(lines[place])["id"] for place in wanted or range(len(rows))])
    (folder / "texts.jsonl").write_bytes(b"\n".join(as_line(row, []) for row in odd_rows()) + b"\n")
    words.append(json.dumps(["default", str(folder / "texts.jsonl"), []]))
    ids.append([row.id for row in odd_rows()])
    done = subprocess.run(
        [sys.executable, "-c", ENCODE, str(base / "model"), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment(base / "pictures", 16, folder / "cache", threads=1),
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    said = [line.removeprefix("trained:") for line in done.stdout.splitlines() if line.startswith("trained:")]
    found = [list(zip(*each, strict=True)) for each in zip(ids, map(json.loads, said), strict=True)]
    return dict(zip([*CASES, "texts"], found, strict=True))


def test_of_a_conversation_the_good_answers_are_trained_and_nothing_else(trained: dict[str, Any]) -> None:
    expected = [answers for answers in map(good_answers, some_rows()) if answers]
    assert [texts for _, texts in trained["trajectory"]] == expected
    assert len(expected) < len(some_rows())


def test_in_the_timestep_form_each_good_answer_is_trained_once(trained: dict[str, Any]) -> None:
    expected = [[answer] for raw in some_rows() for answer in good_answers(raw)]
    assert [texts for _, texts in trained["timestep"]] == expected


def test_every_text_is_read_as_the_row_has_it(trained: dict[str, Any]) -> None:
    """Whatever ms-swift's reader and template would replace is in no row; Qwen's tokenizer makes NFC of the rest."""
    rows = odd_rows()
    assert [text for _, text in trained["texts"]] == [normalize("NFC", ChatForm().text(row)) for row in rows]
    kept = {turn.value for row in rows for turn in row.conversations}
    assert kept > {ODD[0], ODD[1], " It.", "  a", "a", "a\nb\nc", "{{x}} {ROUND0}", "{{ROUND0}}", "<img>b", "None"}
    assert kept.isdisjoint({"<img>a.png</img>", "<image>"})


@pytest.mark.parametrize("form", ["trajectory", "timestep"])
def test_the_last_good_answer_is_trained_once_more_without_feedback(trained: dict[str, Any], form: str) -> None:
    alone = [texts for row, texts in trained[f"{form} and single turns"] if row.endswith("-single")]
    assert alone == [good_answers(FEW[0]), good_answers(FEW[1])[-1:]]


def test_what_begins_after_ten_megabytes_is_read_as_it_is(trained: dict[str, Any]) -> None:
    """A source and texts that are no dates, a picture, an answer that is not trained: the reader guesses nothing."""
    assert 600 * len(json.dumps(DAY)) > 10 << 20
    assert [texts for _, texts in trained["late"]] == [["2024-01-16<|im_end|>\n"], good_answers(raw_row(3, 9))]


def test_every_run_compares_what_it_trains_with_ms_swift(base: Path, tmp_path: Path) -> None:
    """Before a GPU is asked for. If it trains an attempt that is history by our count, the run stops."""
    rows = converted(FEW, training_form("trajectory", None, 8, "last_good"))
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"\n".join(as_line(row, ["p.png"]) for row in rows) + b"\n")
    picture = PictureEntry(path="p", rows=1, name="p.png", width=64, height=48, sha256="0" * 64)
    counter = TokenCounter(base / "model", [picture], 16)
    lengths = list(measure_rows(file, counter, 1))
    data = TrainingData(file, file, base / "pictures", "digest", last_answer_only=False)
    model = BaseModel(base / "model", "qwen3_vl", "digest")
    assert check_lengths({file: lengths}, data, model, 16, {}, 1)[:3] == (None, None, True)
    off = [*lengths[:-1], msgspec.structs.replace(lengths[-1], trained_tokens=lengths[-1].trained_tokens + 1)]
    differs = str(check_lengths({file: off}, data, model, 16, {}, 1).differs)
    assert differs.startswith(f"1 of {len(rows)} checked rows train other tokens in ms-swift's own template: ")
    assert lengths[-1].id in differs


def test_the_trainer_s_validation_loss_is_over_the_good_answers_alone(base: Path, tmp_path: Path) -> None:
    """The real trainer: it counts the tokens with a label."""
    rows = converted(FEW, training_form("trajectory", None, 8, "last_good"))
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(as_line(row, ["p.png"]) for row in rows) + b"\n")
    data = TrainingData(file, file, base / "pictures", "digest", last_answer_only=False)
    settings = TrainSettings(**QUICK, max_steps=1, max_length=2_048).scheduled(1)
    training = Training(data, BaseModel(base / "model", "qwen3_vl", "digest"), settings, "cpu", 1, DDP)
    told = report(training, train(training, tmp_path / "runs", 1, "the trainer"))
    assert told.eval_tokens == sum(TokenCounter(base / "model", [], 16).count_trained(rows))
