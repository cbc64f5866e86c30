"""Trackers get a run once and whole: a real MLflow server, killed in the middle, which also collects the traces."""

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from finished_runs import RUN, send, tracked_run
from tracker_servers import MlflowServer, fatal_proxy, mlflow_server
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.tools.track_run import main as track_run

STEPS, ROWS = 1500, 300
"""Enough for several requests to each tracker, so that there is a middle."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running


@pytest.fixture(autouse=True)
def _an_experiment_for_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-mlflow-experiment-id=0")


def count(server: MlflowServer, table: str) -> int:
    with closing(sqlite3.connect(f"file:{server.database}?mode=ro", uri=True, timeout=30)) as database:
        return int(database.execute(f"select count(*) from {table}").fetchone()[0])  # noqa: S608 (our own words)


def killed_while(server: MlflowServer, path: str, number: int, sending: Callable[[str], Any]) -> None:
    """Send to an address whose server is killed after a request, and try again only shortly."""
    with pytest.MonkeyPatch.context() as patch, fatal_proxy(server, path, number) as proxy:
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10")
        with pytest.raises(PassingError, match=r"did not reach every tracker"):
            sending(proxy.url)


def runs_of(server: MlflowServer, experiment: str = "vlmflow") -> list[dict[str, Any]]:
    known = server.ask(f"2.0/mlflow/experiments/get-by-name?experiment_name={experiment}")
    question = {"experiment_ids": [known["experiment"]["experiment_id"]], "max_results": 100}
    return server.ask("2.0/mlflow/runs/search", question)["runs"]


def test_a_server_that_dies_in_the_middle_gets_every_figure_once(server: MlflowServer, tmp_path: Path) -> None:
    folder = tracked_run(tmp_path, steps=STEPS)
    killed_while(server, "/runs/log-batch", 4, lambda url: send(folder, mlflow=url))  # params, tags, 1000 metrics each
    assert not (folder / "tracked" / f"{RUN}.json").exists()
    before = count(server, "metrics")
    server.start()
    [half] = runs_of(server)
    assert half["info"]["status"] == "RUNNING"
    sent = send(folder, mlflow=server.url).mlflow
    assert sent is not None
    assert sent.new
    [run] = runs_of(server)
    assert run["info"]["run_id"] == sent.name
    assert (run["info"]["status"], run["info"]["run_name"]) == ("FINISHED", RUN)
    assert 0 < before < count(server, "metrics") == sent.figures
    params = {each["key"]: each["value"] for each in run["data"]["params"]}
    tags = {each["key"]: each["value"] for each in run["data"]["tags"]}
    assert (params["lora.rank"], tags["dataset"]) == ("16", "fire")
    latest = {each["key"]: each["value"] for each in run["data"]["metrics"]}
    assert latest["train/loss"] == pytest.approx(1 / STEPS)
    assert latest["evaluate/val/uses_feedback/difference"] == pytest.approx(0.25)

    again = send(folder, mlflow=server.url).mlflow
    assert again is not None
    assert (again.new, again.name) == (False, sent.name)
    assert count(server, "metrics") == sent.figures
    assert len(runs_of(server)) == 1


def test_a_collector_that_dies_in_the_middle_gets_every_span_once(server: MlflowServer, tmp_path: Path) -> None:
    folder = tracked_run(tmp_path, count=ROWS)
    killed_while(server, "/v1/traces", 1, lambda url: send(folder, otlp=url))
    server.start()
    assert 0 < count(server, "spans") < 1202
    sent = send(folder, otlp=server.url).otlp
    assert sent is not None
    assert sent.figures == 2 * ROWS + 2 * ROWS + 2  # a row and its gold answer, for each model; one answered turn
    assert count(server, "spans") == sent.figures
    assert count(server, "trace_info") == 2 * ROWS
    with closing(sqlite3.connect(f"file:{server.database}?mode=ro", uri=True)) as database:
        spans = [json.loads(content) for (content,) in database.execute("select content from spans")]
    asked = [span for span in spans if span["name"] == "after 1 round"]
    answers = Counter(json.loads(span["attributes"]["output.value"]) for span in asked)
    assert answers == {"wrong": 1, "gold 1": 1}
    [right] = [span for span in asked if "gold 1" in span["attributes"]["output.value"]]
    assert "mine tuned" in right["attributes"]["session.id"]
    assert "ab" * 32 in str(right["attributes"])
    assert {event["name"] for event in right["events"]} == {"gen_ai.evaluation.result"}
    roots = {span["name"]: span["attributes"] for span in spans if not span["parent_span_id"]}
    assert len(roots) == 2 * ROWS, "base and tuned have other names"
    outputs = {name: json.loads(root["output.value"]) for name, root in roots.items() if "output.value" in root}
    assert outputs == {"row-1 base": "wrong", "row-1 tuned": "gold 1"}, "only what the models said"
    kinds = Counter(json.loads(span["attributes"]["openinference.span.kind"]) for span in spans)
    assert kinds == {"CHAIN": 2 * ROWS, "EVALUATOR": 2 * ROWS, "LLM": 2}
    assert json.loads(roots["row-1 tuned"]["vlmflow.score.right"]) == 1.0


def test_an_offline_run_is_written_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tracked_run(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    sent = send(folder, wandb="my project").wandb
    assert sent is not None
    [file] = (folder / "stores" / "trackers").rglob("run-*.wandb")
    content = file.read_bytes()
    for told in (b"train/loss", b"lora.rank", b"evaluate/val/uses_feedback/difference", b"my project"):
        assert told in content
    assert not [each for each in (folder / "stores").rglob("*") if each.is_file() and b"kkkkkkkk" in each.read_bytes()]
    again = send(folder, wandb="my project").wandb
    assert again is not None
    assert (again.new, again.figures) == (False, sent.figures)
    assert [*(folder / "stores" / "trackers").rglob("run-*.wandb")] == [file]
    # The evaluation is done again with another result: the run's folder is replaced.
    report = folder / "eval" / RUN / "val" / "report.json"
    report.write_text(report.read_text().replace("0.75", "0.625"))
    other = send(folder, wandb="my project").wandb
    assert other is not None
    assert other.new
    assert len([*(folder / "stores" / "trackers").rglob("run-*.wandb")]) == 1


def test_a_deleted_experiment_is_no_passing_failure(server: MlflowServer, tmp_path: Path) -> None:
    made = server.ask("2.0/mlflow/experiments/create", {"name": "old"})
    server.ask("2.0/mlflow/experiments/delete", {"experiment_id": made["experiment_id"]})
    with pytest.raises(VlmflowError, match="experiment 'old' is deleted in MLflow") as caught:
        send(tracked_run(tmp_path), mlflow=server.url, experiment="old")
    assert type(caught.value) is VlmflowError
    assert "mlflow: restore it there, or set runs.NAME.track.experiment" in caught.value.next_step


def test_a_run_of_the_past_goes_to_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tracked_run(tmp_path)
    for _ in range(2):
        track_run(RUN, [], folder, {"mlflow": f"sqlite:///{tmp_path}/new/mlflow.db"})
    with closing(sqlite3.connect(tmp_path / "new" / "mlflow.db")) as database:
        assert database.execute("select name from runs").fetchall() == [(RUN,)]


def test_without_a_tracker_it_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match="no tracker is named"):
        track_run(RUN, [], tracked_run(tmp_path), {})
    with pytest.raises(VlmflowError, match="user, password or query"):
        track_run(RUN, [], tmp_path, {"mlflow": "http://ann:secret@localhost"})
