"""The demo's base and tuned model are asked: by servers of their own, and by one at an address."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pydantic
import pytest

from chat_server import chat_server
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.report import AnswerReport
from workflow_runs import ROOT, RUN, words_of

answer, choose = (
    pydantic.validate_call(importlib.import_module(f"stages.{name}").main) for name in ("answer", "choose_rows")
)


def settings(**changed: Any) -> dict[str, Any]:
    """Return the demo's settings with small limits, and others for the block `answer`."""
    limits = {"rows": 2, "rounds": 1, "max_tokens": 4}
    return {
        "answer": {**limits, **changed.pop("answer", {})},
        "rows": 1000,
        "seed": 42,
        "text_args": {},
        "image_max_tokens": 64,
        "max_length": 512,
        "device": "cpu",
        "dtype": "float32",
        **changed,
    }


@pytest.fixture(scope="module")
def files(demo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The inputs of the stage for the demo's test split, with its rows as `choose_rows` chooses them."""
    given: dict[str, Any] = {
        "fitted": demo_run / "fitted" / RUN,
        "rows": demo_run / "data" / "fire" / "test.jsonl",
        "stats": demo_run / "data" / "fire" / "stats.json",
        "picture_store": demo_run / "stores" / "pictures",
        "pictures": [demo_run / "images" / "fire" / f"{split}.jsonl" for split in ("train", "test")],
        "chosen": tmp_path_factory.mktemp("chosen") / RUN / "test",
    }
    raw = {"raw_train": ["FIRE-train-100K.json"], "raw_test": ["FIRE-test.json"]}
    choose(
        **given,
        **{name: [demo_run / "raw" / "fire" / file for file in some] for name, some in raw.items()},
        settings={"feedback": None, "seed": 42},
    )
    return given | {"verified": demo_run / "verified" / RUN, "model": demo_run / "models" / "tiny"}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def asked_now(caplog: pytest.LogCaptureFixture) -> list[list[int]]:
    """Return of each model how many answers were asked for, and how many there are, since the last call."""
    said = re.findall(r"answers of the [a-z ]+: (\d+) of (\d+) were asked for now", "\n".join(caplog.messages))
    caplog.clear()
    return [list(map(int, numbers)) for numbers in said]


def test_both_models_answer_by_servers_of_their_own(
    files: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And are not asked again; each making is a look at test."""
    caplog.set_level("INFO", "vlmflow")
    first, again = tmp_path / "first" / RUN / "test", tmp_path / "again" / RUN / "test"
    given = files | {"evaluation_store": tmp_path / "store", "threads": 2}
    answer(answered=first, settings=settings(), **given)
    report = read_account(first / "report.json", AnswerReport)
    rows = lines(first / "rows.jsonl")
    turns = [turn for row in rows for turn in row["turns"]]
    assert (report.run, report.split, report.dataset, report.looks) == (RUN, "test", "fire", 1)
    assert (report.server, report.picture_limits) == ("transformers serve", "4 to 64 tokens")
    assert report.gold_from_raw == report.rows == len(rows) >= 2
    assert report.base.overlap.answers == len(turns)
    assert asked_now(caplog) == [[len(turns)] * 2] * 2
    assert [after.rounds for after in report.all] == [0, 1]
    assert any(turn["base"]["text"] != turn["tuned"]["text"] for turn in turns), "two models answered"
    assert all(turn["tuned"]["text"] for turn in turns)
    answer(answered=again, settings=settings(), **given)
    repeated = read_account(again / "report.json", AnswerReport)
    assert asked_now(caplog) == [[0, len(turns)]] * 2
    assert repeated == msgspec.structs.replace(report, looks=2)
    assert (again / "rows.jsonl").read_bytes() == (first / "rows.jsonl").read_bytes()
    assert not list((tmp_path / "store").rglob("*.log")), "the output of servers that did their work is not kept"


def test_a_given_server_is_asked_and_its_picture_limits_are_unknown(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every row of the split is answered, or named with the reason."""
    monkeypatch.setenv("VLMFLOW_ANSWER_KEY", "sesame\n")
    answered, given = tmp_path / RUN / "test", files | {"evaluation_store": tmp_path / "store"}
    with chat_server(lambda model, messages: f"{len(messages)}. Answer: {model}") as server:
        block = {"url": server.url, "url_base": "b", "url_tuned": "t", "rows": 9}
        answer(answered=answered, settings=settings(answer=block, max_length=150), **given)
        assert set(server.keys) == {"Bearer sesame"}
        assert [body["messages"][0]["content"][0]["type"] for body in server.requests] == (
            ["image_url"] * len(server.requests)
        )
        with pytest.raises(VlmflowError, match=r"no row can be evaluated: .* over_long"):
            answer(answered=answered, settings=settings(answer=block, max_length=9), **given)
    report = read_account(answered / "report.json", AnswerReport)
    rows, out = lines(answered / "rows.jsonl"), lines(answered / "left_out.jsonl")
    assert (report.server, report.picture_limits, report.versions) == (server.url, "unknown", {})
    assert [turn["tuned"]["answer"] for turn in rows[0]["turns"]] == ["t", "t"]
    assert [turn["base"]["text"] for turn in rows[0]["turns"]] == ["1. Answer: b", "3. Answer: b"]
    assert report.left_out["over_long"] > 0
    assert sum(report.left_out.values()) == len(out)
    assert sorted(row["id"] for row in [*rows, *out]) == sorted(row["id"] for row in lines(given["rows"]))
    not_drawn = {row["detail"] for row in out if row["reason"] == "not_drawn"}
    assert not_drawn == {f"9 rows were to be drawn (runs.{RUN}.answer.rows)"}
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"sesame" not in written


@pytest.mark.slow
def test_a_server_that_is_killed_is_named_and_its_answers_are_kept(files: dict[str, Any], tmp_path: Path) -> None:
    given = files | {"evaluation_store": tmp_path / "store", "threads": 2}
    given |= {name: json.dumps(list(map(str, given[name]))) for name in ("pictures",)}
    block = json.dumps(settings(answer={"rows": 3, "max_tokens": 64}))
    answered = tmp_path / RUN / "test"
    given |= {"answered": answered, "settings": block}
    words = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    call = [sys.executable, str(ROOT / "scripts" / "stages" / "answer.py"), *words]
    stage = subprocess.Popen(call, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    give_up = time.monotonic() + 300
    while not any(file.stat().st_size for file in (tmp_path / "store").rglob("*.jsonl")):
        assert stage.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.01)
    for child in psutil.Process(stage.pid).children(recursive=True):
        if "serving/guarded.py" in words_of(child):
            child.kill()
    _, said = stage.communicate(timeout=300)
    assert stage.returncode == 1
    assert "after " in said
    assert re.search("the server of the (base|tuned model) ended with code -9", said)
    assert not answered.exists()
    (log,) = (tmp_path / "store").rglob("*.log")
    assert str(log) in said
    kept = sum(len(lines(file)) for file in (tmp_path / "store").rglob("*.jsonl"))
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = read_account(answered / "report.json", AnswerReport)
    now = re.findall(r"answers of the [a-z ]+: (\d+) of \d+ were asked for now", done.stderr)
    assert sum(map(int, now)) == 2 * report.base.overlap.answers - kept
