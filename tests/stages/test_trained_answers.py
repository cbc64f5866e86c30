"""Which answers of FIRE's rows are trained: our rows, as ms-swift itself reads and encodes them."""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fire_rows import fire_row, write_picture
from vlmflow.config.row_settings import RowLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.lengths.against_swift import check_lengths
from vlmflow.lengths.chat_form import ChatForm
from vlmflow.lengths.count import TokenCounter, measure_rows
from vlmflow.pictures.image_manifest import PictureEntry
from vlmflow.raw.json_file import JsonRows
from vlmflow.rows.converted import ConvertedRow
from vlmflow.rows.fire_rows import TrainingForm, fire_rows
from vlmflow.rows.forms.fire import read_trajectory
from vlmflow.rows.sharegpt import as_line
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift.arguments import BaseModel
from vlmflow.swift.child_process import environment
from workflow_runs import ROOT

REAL = ROOT.parent / "shared" / "data" / "fire-demo" / "FIRE-train-100K.json"
"""Real rows of FIRE, where the project's shared data is."""

ENCODE = """
import json, sys
from itertools import groupby
from swift import get_processor, get_template
from swift.dataset import load_dataset
model, loss_scale, file, *wanted = sys.argv[1:]
template = get_template(get_processor(model, model_type="qwen3_vl"), max_length=32768, loss_scale=loss_scale)
template.set_mode("train")
rows, _ = load_dataset([file], strict=True)
for number in map(int, wanted) if wanted else range(len(rows)):
    labels = template.encode(rows[number])["labels"]
    runs = [list(run) for trained, run in groupby(labels, lambda label: label != -100) if trained]
    print("trained:", json.dumps([template.tokenizer.decode(run) for run in runs]))
"""


def raw_row(*scores: int, **changes: Any) -> bytes:
    row = fire_row(rounds=len(scores), **changes)
    for turn, score in zip(row["conversations"][1::2], scores, strict=True):
        turn["value"] = f"Score: {score}.\nFeedback: hint {score}\n"
    return json.dumps(row).encode()


def some_rows() -> list[bytes]:
    real: list[bytes] = []
    if REAL.exists():
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


def trained_by_ms_swift(
    base: Path, rows: Iterable[ConvertedRow], folder: Path, loss_scale: str, only: Sequence[int] = ()
) -> list[list[str]]:
    """Return the trained texts of each row: a text for each unbroken piece of labels. only: the rows to encode."""
    file = folder / "rows.jsonl"
    file.write_bytes(b"\n".join(as_line(row, ["p.png"]) for row in rows) + b"\n")
    done = subprocess.run(
        [sys.executable, "-c", ENCODE, str(base / "model"), loss_scale, str(file), *map(str, only)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment(base / "pictures", 16, folder / "cache", threads=1),
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    lines = done.stdout.splitlines()
    return [json.loads(line.removeprefix("trained: ")) for line in lines if line.startswith("trained: ")]


def converted(raw: Iterable[bytes], form: TrainingForm) -> list[ConvertedRow]:
    make = fire_rows(form, RowLimits(max_turns=1_000), "Look at it.")
    made = [make(f"r{number}", number, row) for number, row in enumerate(raw)]
    return [row for rows in made if isinstance(rows, list) for row in rows]


def good_answers(raw: bytes) -> list[str]:
    """Return the answers of a raw row that the teacher gives at least 8, with what ends an answer."""
    return [f"{attempt.answer}<|im_end|>\n" for attempt in read_trajectory(raw).attempts if attempt.score >= 8]


def test_of_a_conversation_the_good_answers_are_trained_and_nothing_else(base: Path, tmp_path: Path) -> None:
    raw = some_rows()
    rows = converted(raw, TrainingForm("trajectory", min_score=8))
    expected = [answers for answers in map(good_answers, raw) if answers]
    assert len(rows) == len(expected) < len(raw)
    assert trained_by_ms_swift(base, rows, tmp_path, "default") == expected


def test_in_the_timestep_form_each_good_answer_is_trained_once(base: Path, tmp_path: Path) -> None:
    raw = some_rows()
    rows = converted(raw, TrainingForm("timestep", 6, min_score=8))
    trained = trained_by_ms_swift(base, rows, tmp_path, "last_round")
    assert trained == [[answer] for each in raw for answer in good_answers(each)]


@pytest.mark.parametrize(("form", "loss_scale"), [("trajectory", "default"), ("timestep", "last_round")])
def test_the_last_good_answer_is_trained_once_more_without_feedback(
    base: Path, tmp_path: Path, form: str, loss_scale: str
) -> None:
    raw = [raw_row(3, 9), raw_row(2, 8, 5, 10, 4), raw_row(9, 3)]
    rows = converted(raw, TrainingForm(form, None, 8, "last_good"))
    trained = trained_by_ms_swift(base, rows, tmp_path, loss_scale)
    alone = [answers for row, answers in zip(rows, trained, strict=True) if row.id.endswith("-single")]
    assert alone == [good_answers(raw[0]), good_answers(raw[1])[-1:]]


@pytest.mark.parametrize("form", [TrainingForm("trajectory", None, 8, "last_good"), TrainingForm("timestep", 6)])
def test_every_run_compares_what_it_trains_with_ms_swift(base: Path, tmp_path: Path, form: TrainingForm) -> None:
    """Before a GPU is asked for. If it trains an attempt that is history by our count, the run stops."""
    rows = converted([raw_row(3, 9), raw_row(2, 8, 5, 10, 4)], form)
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"\n".join(as_line(row, ["p.png"]) for row in rows) + b"\n")
    picture = PictureEntry(path="p", rows=1, name="p.png", width=64, height=48, sha256="0" * 64)
    counter = TokenCounter(base / "model", [picture], 16, ChatForm.of({}, form.form == "timestep"))
    lengths = list(measure_rows(file, counter, 1))
    data = TrainingData(file, file, base / "pictures", "digest", last_answer_only=form.form == "timestep")
    model = BaseModel(base / "model", "qwen3_vl", "digest")
    assert check_lengths({file: lengths}, data, model, 16, {}, 1) == len(rows)
    off = [*lengths[:-1], msgspec.structs.replace(lengths[-1], trained_tokens=lengths[-1].trained_tokens + 1)]
    with pytest.raises(VlmflowError, match=rf"1 of {len(rows)} checked rows train other tokens .*{lengths[-1].id}"):
        check_lengths({file: off}, data, model, 16, {}, 1)


def test_a_bad_attempt_after_ten_megabytes_of_good_ones_stops_nothing(base: Path, tmp_path: Path) -> None:
    """ms-swift's reader fixes the keys of turns by the first 10 MB."""
    long = "why " * 4_900
    raw = [*(raw_row(9, 9, question=long + str(number)) for number in range(600)), raw_row(3, 9)]
    rows = converted(raw, TrainingForm("trajectory", min_score=8))
    assert sum(len(msgspec.json.encode(row)) for row in rows[:-1]) > 11_000_000
    trained = trained_by_ms_swift(base, rows, tmp_path, "default", only=[0, 600])
    assert trained == [good_answers(raw[0]), good_answers(raw[600])]
