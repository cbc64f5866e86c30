"""The evaluation of the demo's run, on the real rules: its files, its card, its resume, and what it stops."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from cluster.shell import wait_for
from forked_snakemake import called
from stages.evaluate import main as evaluate
from tracker_servers import trace_sink
from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.settings import part_of
from vlmflow.core.account import read_account
from vlmflow.evaluation.answer_losses import Pass, Work
from vlmflow.evaluation.measure import TOGETHER, Measurement, ScoredModel, measure
from vlmflow.evaluation.report import (
    NEUTRAL,
    OTHER_PICTURE,
    OTHERS,
    OWN,
    QUESTION,
    EvaluatedRow,
    EvaluationReport,
    read_looks,
)
from vlmflow.reports.provenance import Provenance
from vlmflow.rows.chat import IMAGE_TAG, ROLES, Turn
from vlmflow.rows.sharegpt import ShareGptRow, lines_of
from vlmflow.track.story import Tracked
from warm_programs import fresh
from workflow_runs import ROOT, RUN, command, copy_folder, snakemake

SETTINGS: dict[str, Any] = {
    "rows": 1000,
    "feedback": None,
    "seed": 42,
    "model_type": "qwen3_vl",
    "text_args": {},
    "image_max_tokens": 64,
    "max_length": 512,
    "device": "cpu",
    "dtype": "float32",
}


def with_evaluation(**block: Any) -> list[str]:
    return ["--config", f"runs={json.dumps({RUN: {'evaluate': block}})}"]


@pytest.fixture(scope="module")
def evaluated(demo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the demo's folder in which its run was evaluated on val and test, and published again."""
    folder = copy_folder(demo_run, tmp_path_factory.mktemp("evaluated") / "demo")
    said = snakemake(
        folder, *with_evaluation(splits=["val", "test"]), "--", f"merged/{RUN}", f"reports/eval-{RUN}.html"
    )
    (folder / "evaluated.txt").write_text(said)
    return folder


def report(folder: Path, split: str) -> EvaluationReport:
    return read_account(folder / "eval" / RUN / split / "report.json", EvaluationReport)


def test_only_what_the_evaluation_needs_is_made(evaluated: Path) -> None:
    said = (evaluated / "evaluated.txt").read_text()
    for rule in ("train_smoke", "train_model", "merge_weights", "verify_merged"):
        assert f"rule {rule}" not in said
        assert f"\n{rule} " not in said


@pytest.mark.parametrize("split", ["val", "test"])
def test_every_row_of_the_split_is_evaluated_or_left_out(evaluated: Path, split: str) -> None:
    folder = evaluated / "eval" / RUN / split
    rows = list(lines_of(folder / "rows.jsonl", EvaluatedRow))
    out = [json.loads(line) for line in (folder / "left_out.jsonl").read_text().splitlines()]
    all_rows = [row.id for row in lines_of(evaluated / "data" / "fire" / f"{split}.jsonl", ShareGptRow)]
    assert sorted([row.id for row in rows] + [row["id"] for row in out]) == sorted(all_rows)
    found = report(evaluated, split)
    assert (found.rows, sum(found.left_out.values())) == (len(rows), len(out))
    assert rows
    for row in rows:
        assert row.base.keys() == row.tuned.keys()
        others = OTHERS[: len(row.donors)]
        assert row.base.keys() | {OTHER_PICTURE} == {QUESTION, OWN, NEUTRAL, *others, OTHER_PICTURE}
        assert row.right
        assert row.wrong
        for margins in (row.base, row.tuned):
            assert len({margin.right.tokens for margin in margins.values()}) == 1
            assert len({margin.wrong.tokens for margin in margins.values() if margin.wrong}) == 1
    change = found.figures.all.losses[QUESTION].difference
    assert change.mean < -1, "nine steps teach the tiny model much"


def test_a_run_that_its_val_cannot_judge_is_refused_with_the_plan(evaluated: Path) -> None:
    """The val of this sample has 18 pictures. What a finished run has shown is judged by its evaluation."""

    def planned(require: object, *words: str) -> str:
        block = {RUN: {"evaluate": {"require": require}}}
        done = called(command(evaluated, "-n", *words, "--config", f"runs={json.dumps(block)}", "--", f"merged/{RUN}"))
        return done.stdout + done.stderr

    again = ("--forcerun", "train_smoke")
    said = planned(["not_worse", "learned"], *again)
    assert f"runs.{RUN}.evaluate.require: learned cannot be shown on val of data set fire" in said
    assert "its rows without echo that can judge have 13 different pictures or questions, and 100 are needed" in said
    assert "cannot be shown" not in planned("not_worse", *again)
    assert "cannot be shown" not in planned("learned")


def test_looks_at_test_are_counted_and_shown(evaluated: Path) -> None:
    assert (report(evaluated, "val").looks, report(evaluated, "test").looks) == (None, 1)
    (look,) = read_looks(evaluated / "stores" / "evaluations")
    assert (look.what, look.run, look.dataset) == ("evaluate", RUN, "fire")
    card = (evaluated / "merged" / RUN / "README.md").read_text()
    assert "had been looked at 1 time with this evaluation" in card


def test_the_card_and_the_provenance_hold_the_evaluation(evaluated: Path) -> None:
    facts = read_account(evaluated / "merged" / RUN / "provenance.json", Provenance)
    assert facts.evaluations == {split: report(evaluated, split) for split in ("val", "test")}
    assert "model-index" in (evaluated / "merged" / RUN / "README.md").read_text()
    page = (evaluated / "reports" / f"eval-{RUN}.html").read_text()
    assert page.count("its own feedback helps the right answer more") >= 2, "of val and test"


def with_trackers(**block: Any) -> list[str]:
    runs = {RUN: {"evaluate": {"splits": ["val", "test"]}, "track": block}}
    return ["--config", f"runs={json.dumps(runs)}", "--", f"tracked/{RUN}.json", f"reports/eval-{RUN}.html"]


def test_a_tracker_that_is_away_fails_nothing_else(evaluated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    page = evaluated / "reports" / f"eval-{RUN}.html"
    page.unlink()
    first = ["--cores", "1", "--prioritize", f"tracked/{RUN}.json"]
    # Nobody listens on port 9 (discard).
    done = called(command(evaluated, *first, *with_trackers(otlp="http://127.0.0.1:9", wandb="demo")))
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert f"run {RUN} did not reach every tracker (it reached: wandb). otlp: " in said
    assert not (evaluated / "tracked" / f"{RUN}.json").exists()
    assert page.is_file()


def test_the_run_is_sent_to_its_trackers_once(evaluated: Path) -> None:
    with trace_sink() as sink:
        words = with_trackers(mlflow="sqlite:///mlflow.db", wandb="demo", otlp=sink.url)
        said = snakemake(evaluated, *words)
        assert "rule train_model" not in said
        assert sink.bytes > 0
        again = snakemake(evaluated, *words)
    assert "Nothing to be done" in again
    tracked = read_account(evaluated / "tracked" / f"{RUN}.json", Tracked)
    assert tracked.mlflow is not None
    assert tracked.otlp is not None
    assert tracked.otlp.figures == 4 * sum(report(evaluated, split).rows for split in ("val", "test"))
    with closing(sqlite3.connect(evaluated / "mlflow.db")) as database:
        metrics = dict(database.execute("select key, value from latest_metrics"))
    uses = report(evaluated, "test").figures.all.uses_feedback
    assert uses is not None
    assert metrics["evaluate/test/uses_feedback/difference"] == pytest.approx(uses.difference.mean)
    assert metrics["best/eval_loss"] < metrics["train/loss"] + 1


def test_weights_that_fall_short_are_not_published(evaluated: Path) -> None:
    required = with_evaluation(splits=["val", "test"], require="learned")
    done = subprocess.run(
        command(evaluated, *required, "--", f"merged/{RUN}"), capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1
    shown = report(evaluated, "val").verdict
    assert f"eval/{RUN}/val: runs.{RUN}.evaluate.require: learned, but the verdict is '{shown}'" in said
    assert not (evaluated / "merged" / RUN).exists()


def words(folder: Path, store: Path, to: Path) -> list[str]:
    """Return the command of the script, on test, with a store of its own."""
    data = folder / "data" / "fire"
    values = {
        "verified": folder / "verified" / RUN,
        "full": folder / "checkpoints" / RUN / "full",
        "fitted": folder / "fitted" / RUN,
        "model": folder / "models" / "tiny",
        "chosen": folder / "chosen" / RUN / "test",
        "rows": data / "test.jsonl",
        "stats": data / "stats.json",
        "evaluated": to / RUN / "test",
        "settings": json.dumps(SETTINGS),
        "picture-store": folder / "stores" / "pictures",
        "evaluation-store": store,
        "pictures": json.dumps([str(folder / "images" / "fire" / f"{split}.jsonl") for split in ("train", "test")]),
    }
    named = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / "scripts" / "stages" / "evaluate.py"), *named]


@pytest.mark.slow
def test_a_killed_evaluation_measures_no_row_again(evaluated: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"

    def kept() -> int:
        return sum(file.read_bytes().count(b"\n") for file in store.rglob("*.jsonl"))

    with fresh(), (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(words(evaluated, store, tmp_path), stdout=log, stderr=subprocess.STDOUT)
    wait_for("rows are measured", lambda: kept() > 3 or first.poll() is not None, 120, pause=0.02)
    children = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    before = kept()
    assert not (tmp_path / RUN / "test").exists()
    done = subprocess.run(words(evaluated, store, tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    again = read_account(tmp_path / RUN / "test" / "report.json", EvaluationReport)
    now = re.findall(rf"losses of the [a-z ]+: (\d+) of {again.rows} rows were measured now", done.stderr)
    assert sum(map(int, now)) == 2 * again.rows - before
    for name in ("rows.jsonl", "left_out.jsonl", "report.json"):
        ours, theirs = (folder / RUN / "test" / name for folder in (tmp_path, evaluated / "eval"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_another_run_does_not_measure_the_base_again(
    evaluated: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder's store has the losses of both models, and fewer rows are among those of before."""
    folder = evaluated / "data" / "fire"
    caplog.set_level("INFO", "vlmflow")
    evaluate(
        verified=evaluated / "verified" / RUN,
        full=evaluated / "checkpoints" / RUN / "full",
        fitted=evaluated / "fitted" / RUN,
        model=evaluated / "models" / "tiny",
        chosen=evaluated / "chosen" / RUN / "test",
        rows=folder / "test.jsonl",
        stats=folder / "stats.json",
        evaluated=tmp_path / "other" / "val",
        settings=part_of(FlatRun, SETTINGS | {"rows": 5}),
        picture_store=evaluated / "stores" / "pictures",
        evaluation_store=evaluated / "stores" / "evaluations",
        pictures=[evaluated / "images" / "fire" / f"{split}.jsonl" for split in ("train", "test")],
    )
    other = read_account(tmp_path / "other" / "val" / "report.json", EvaluationReport)
    now = [line for line in caplog.messages if line.startswith("losses of ")]
    assert [line.partition(": ")[2].split()[:3] for line in now] == [["0", "of", str(other.rows)]] * 2
    out = [json.loads(line) for line in (tmp_path / "other" / "val" / "left_out.jsonl").read_text().splitlines()]
    drawn_out = [row["detail"] for row in out if row["reason"] == "not_drawn"]
    assert other.left_out["not_drawn"] == len(drawn_out) > 0
    assert set(drawn_out) == {"5 rows were to be drawn (runs.other.evaluate.rows)"}


def test_conversations_of_a_row_in_one_sequence_have_the_same_losses(
    evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; with and without a picture, and with the beginning of an answer given."""
    pictures = evaluated / "stores" / "pictures" / "fire"
    (picture, *_) = sorted(str(file.relative_to(pictures)) for file in pictures.rglob("*.jpg"))
    asked, answer = Turn("human", "Is it red?"), Turn("gpt", "It is green and blue.")
    passes = {
        "seen": Pass([Turn("human", f"{IMAGE_TAG}\nIs it red?"), answer], [picture]),
        "told": Pass([asked, answer, Turn("human", "Look again."), Turn("gpt", "No.")], []),
        "begun": Pass([asked, answer], [], given="It is"),
    }
    how = Measurement("qwen3_vl", {}, "last_round", pictures, 64, 512, "cpu", "float32", 1, 1)
    losses = {}
    for together in (0, 10_000):
        monkeypatch.setitem(TOGETHER, "cpu", together)
        model = ScoredModel("it", evaluated / "verified" / RUN, "digest")
        found, new = measure(model, [Work("key", passes)], how, tmp_path / "store")
        assert new == 1, "losses of the other way are not taken for these"
        losses[together] = found["key"].losses
    assert losses[0]["seen"].tokens > losses[0]["begun"].tokens > 0
    for name, loss in losses[0].items():
        assert losses[10_000][name].tokens == loss.tokens
        assert losses[10_000][name].nats == pytest.approx(loss.nats, rel=1e-5)


def test_the_loss_of_an_answer_is_that_of_plain_transformers(evaluated: Path, tmp_path: Path) -> None:
    """Its tokens and the end token are scored, and nothing that the chat template adds after it."""
    verified = evaluated / "verified" / RUN
    turns = [Turn("human", "Is it red?"), Turn("gpt", "No."), Turn("human", "Look again."), Turn("gpt", "It is green.")]
    how = Measurement("qwen3_vl", {}, "last_round", tmp_path, 64, 512, "cpu", "float32", 1, 1)
    (work,) = [Work("key", {"own right": Pass(turns, [])})]
    found, _ = measure(ScoredModel("it", verified, "digest"), [work], how, tmp_path / "store")
    tokenizer = AutoTokenizer.from_pretrained(verified)
    messages = [{"role": ROLES[turn.speaker], "content": turn.value} for turn in turns]
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    before, answer = (tokenizer(text)["input_ids"] for text in (prompt, "It is green.<|im_end|>"))
    model = AutoModelForImageTextToText.from_pretrained(verified, dtype="float32")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([before + answer])).logits[0, len(before) - 1 : -1]
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
    loss = found["key"].losses["own right"]
    assert loss.tokens == len(answer)
    assert loss.nats == pytest.approx(float(nats), rel=1e-4)
