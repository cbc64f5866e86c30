"""A run that is sent again to a real MLflow is the same run; a real Phoenix shows its evaluated rows."""

import json
import logging
import os
import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from finished_runs import BEGAN, RUN, STEPS, send, tracked_run
from tracker_servers import phoenix_server
from vlmflow.core.files import sha256_of
from vlmflow.tools.track_run import main as track_run


def rows_of(database: Path, query: str) -> list[tuple]:
    with closing(sqlite3.connect(database)) as opened:
        return opened.execute(query).fetchall()


def metrics(database: Path) -> list[tuple]:
    return rows_of(database, "select key, value, timestamp, step from metrics order by key, step, timestamp")


def change(file: Path, before: str, after: str) -> None:
    content = file.read_text()
    assert before in content
    file.write_text(content.replace(before, after))


def forget_that_it_was_sent(database: Path) -> None:
    with closing(sqlite3.connect(database)) as opened, opened:
        assert opened.execute("delete from tags where key = 'vlmflow.content'").rowcount == 1


def copied(folder: Path) -> None:
    """Give every file another time, as a copy or a download from an object store has."""
    for place in folder.rglob("*"):
        os.utime(place, (2_000_000_000, 2_000_000_000))


def without_its_times(folder: Path) -> None:
    """Make the events those of an older version, which did not record when a session began."""
    full = folder / "checkpoints" / RUN / "full"
    events = [json.loads(line) for line in (full / "progress.jsonl").read_text().splitlines()]
    before = sha256_of(full / "progress.jsonl")
    lines = ({key: value for key, value in event.items() if key != "at"} for event in events)
    (full / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for file in (full / "report.json", folder / "merged" / RUN / "provenance.json"):
        change(file, before, sha256_of(full / "progress.jsonl"))


@pytest.mark.parametrize("older", [False, True])
def test_a_copy_of_a_run_repeats_no_figure(tmp_path: Path, older: bool) -> None:
    folder, database = tracked_run(tmp_path / "run"), tmp_path / "mlflow.db"
    if older:
        without_its_times(folder)
    track_run(RUN, [], folder, {"mlflow": f"sqlite:///{database}"})
    sent, [(start,)] = metrics(database), rows_of(database, "select start_time from runs")
    forget_that_it_was_sent(database)
    copied(folder)
    # The same files of the base model, from another place.
    change(folder / "merged" / RUN / "provenance.json", "hf://Qwen/Qwen3-8B", "/models/qwen")
    track_run(RUN, [], folder, {"mlflow": f"sqlite:///{database}"})
    assert metrics(database) == sent
    assert rows_of(database, "select start_time from runs") == [(start,)]
    assert rows_of(database, "select value from tags where key = 'base_model'") == [("/models/qwen",)]
    if not older:
        # The second session began 100 s after the first; its last figure came so many seconds later.
        seconds = 10 * (STEPS - 2) + 5
        assert start == 1000 * (BEGAN + 100 - 30)
        assert {time for key, _, time, _ in sent if key.startswith("evaluate/")} == {1000 * (BEGAN + 100 + seconds)}


def test_an_evaluation_that_was_made_again_is_what_mlflow_shows(tmp_path: Path) -> None:
    """Its figure is smaller: of two figures with one time MLflow would show the larger one."""
    folder, database = tracked_run(tmp_path / "run"), tmp_path / "mlflow.db"
    report = folder / "eval" / RUN / "val" / "report.json"
    name, shown = "evaluate/val/uses_feedback/difference", []
    for before, mean in pairwise((0.25, 0.25, 0.125, 0.125)):
        change(report, f'"mean": {before},', f'"mean": {mean},')
        track_run(RUN, [], folder, {"mlflow": f"sqlite:///{database}"})
        forget_that_it_was_sent(database)
        shown += [value for key, value in rows_of(database, "select key, value from latest_metrics") if key == name]
    assert shown == [0.25, 0.125, 0.125]
    assert [value for key, value, *_ in metrics(database) if key == name] == [0.25, 0.125]


def test_a_file_of_the_configuration_is_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the rule, which runs there; a file of the command line is in the current folder."""
    folder, here = tracked_run(tmp_path / "run"), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    config = here / "my-run.yaml"
    config.write_text(
        f"runs:\n  {RUN}: {{dataset: fire, model: qwen3vl-32b, track: {{mlflow: sqlite:///mlflow.db}}}}\n"
    )
    track_run(RUN, [config], Path("../run"), {})
    assert rows_of(folder / "mlflow.db", "select name from runs") == [(RUN,)]
    assert not (here / "mlflow.db").exists()
    track_run(RUN, [config], Path("../run"), {"mlflow": "sqlite:///mlflow.db"})
    assert rows_of(here / "mlflow.db", "select name from runs") == [(RUN,)]


def test_a_run_of_the_past_is_sent_without_what_is_of_other_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tracked_run(tmp_path / "runs")
    report = folder / "answers" / RUN / "val" / "report.json"
    change(report, json.loads(report.read_text())["tuned"]["digest"], "older")
    caplog.set_level(logging.INFO, "vlmflow")
    database = tmp_path / "mlflow.db"
    track_run(RUN, [], folder, {"mlflow": f"sqlite:///{database}"})
    keys = {key.split("/")[0] for key, *_ in metrics(database)}
    assert "evaluate" in keys
    assert "answer" not in keys
    [said] = [line for line in caplog.messages if "of other weights" in line]
    assert f"answers/{RUN}/val" in said
    assert f"vlmflow run … answers/{RUN}/val" in said


@pytest.mark.slow
def test_phoenix_shows_what_the_models_said(tmp_path: Path) -> None:
    folder = tracked_run(tmp_path / "run")
    (tmp_path / "phoenix").mkdir()
    with phoenix_server(tmp_path / "phoenix") as phoenix:
        for _ in range(2):  # a second sending adds nothing
            send(folder, otlp=phoenix.url, experiment="pictures")
        spans = phoenix.spans("pictures", 14)
        assert phoenix.spans("default", 0) == []
        rows = "parent_id is None and attributes['vlmflow']['score']"
        assert phoenix.filtered("pictures", f"{rows}['right'] == 1.0") == ["row-1 tuned"]
        assert phoenix.filtered("pictures", f"{rows}['margin_own'] > 0.5") == [f"row-{n} tuned" for n in range(3)]
    assert len(spans) == 14
    roots = {span["name"]: span for span in spans if span["parent_id"] is None}
    assert sorted(roots) == sorted(f"row-{number} {model}" for number in range(3) for model in ("base", "tuned"))
    assert {name: span["attributes"].get("output.value") for name, span in roots.items()} == {
        **dict.fromkeys(roots),
        "row-1 base": "wrong",
        "row-1 tuned": "gold 1",
    }
    kinds = {(span["name"], span["span_kind"]) for span in spans if span["parent_id"]}
    assert kinds == {("after 1 round", "LLM"), ("gold answer", "EVALUATOR")}
    assert {span["span_kind"] for span in roots.values()} == {"CHAIN"}
    for span in spans:
        if span["span_kind"] == "EVALUATOR":
            assert "output.value" not in span["attributes"], "no model said it"
            assert span["attributes"]["langfuse.observation.metadata.gold"].startswith("gold ")
    of_tuned = roots["row-1 tuned"]["attributes"]
    assert (of_tuned["vlmflow.score.right"], of_tuned["vlmflow.score.margin_own"]) == (1.0, 1.0)
