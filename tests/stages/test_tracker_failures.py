"""Trackers that fail, are broken or are none: they hold no sending, fill no log, and get no other key."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from finished_runs import RUN, send, tracked_run
from tracker_servers import REFUSES_TWO, Reply, trace_sink
from vlmflow.core.errors import PassingError, VlmflowError

PAGE = b"<html>It works! \x1b[2J</html>"
JSON = "application/json; charset=utf-8"


def test_one_that_fails_keeps_no_other_from_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "very-secret")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    folder = tracked_run(tmp_path)
    with pytest.raises(PassingError) as caught:
        send(folder, mlflow="http://127.0.0.1:9", wandb="mine")  # nobody listens on port 9 (discard)
    assert "it reached: wandb" in caught.value.cause
    assert "127.0.0.1" in caught.value.cause
    assert "very-secret" not in str(caught.value)
    assert "mlflow: see that the server runs" in caught.value.next_step
    assert [*(folder / "stores").rglob("run-*.wandb")]
    assert not (folder / "tracked").exists()


@pytest.mark.parametrize(
    ("reply", "says", "step", "passes"),
    [
        (REFUSES_TWO, "2 spans refused: too old", "the spans that it takes", False),
        (
            Reply(b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}', JSON),
            "2 spans refused: too old",
            "the spans that it takes",
            False,
        ),
        (Reply(PAGE, "text/html; charset=utf-8"), "is no OTLP but text/html: <html>It", "without /v1/traces", False),
        (Reply(PAGE, JSON), "its answer is no OTLP", "without /v1/traces", False),
        (Reply(PAGE), "its answer is no OTLP", "without /v1/traces", False),
        (Reply(b"", "", 302, "http://127.0.0.1:9/"), "it redirects to http://127.0.0.1:9", "without /v1/traces", False),
        (Reply(b"no \x1b[2J", "text/plain", 401), "HTTP 401: no", "OTEL_EXPORTER_OTLP_HEADERS", False),
        (Reply(path="/elsewhere"), "HTTP 404: Not Found", "without /v1/traces", False),
        (Reply(b"", status=500), "HTTP 500: Internal Server Error", "see that the server runs", True),
    ],
)
def test_an_answer_that_takes_not_all_spans_is_no_success(
    reply: Reply, says: str, step: str, passes: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with trace_sink(reply) as sink, pytest.raises(VlmflowError, match=re.escape(says)) as caught:
        send(tracked_run(tmp_path), otlp=sink.url)
    assert f"{sink.url}/v1/traces" in caught.value.cause
    assert step in caught.value.next_step
    assert type(caught.value) is (PassingError if passes else VlmflowError)
    assert "\x1b" not in str(caught.value) + "".join(capfd.readouterr())


@pytest.mark.parametrize("reply", [Reply(b"{}", JSON), Reply(b'{"message": "OK"}', JSON), Reply(kind="", status=202)])
def test_an_answer_without_refused_spans_is_a_success(reply: Reply, tmp_path: Path) -> None:
    with trace_sink(reply) as sink:
        sent = send(tracked_run(tmp_path), otlp=sink.url).otlp
    assert sent is not None
    assert sent.figures == 14
    assert sink.bytes


def test_an_endpoint_that_is_away_is_named_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    with pytest.raises(PassingError, match=r"otlp: http://127\.0\.0\.1:9/v1/traces: .*Connection refused"):
        send(tracked_run(tmp_path), otlp="http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("reply", "says", "step"),
    [
        (Reply(b"no key", "text/plain", 401, path=""), "no key", "mlflow: set the key .*MLFLOW_TRACKING_TOKEN"),
        (Reply(b"no", "text/plain", 405, path=""), "405", "is the address of an MLflow server"),
        (Reply(PAGE, "text/html", path=""), "It works!", "is the address of an MLflow server"),
    ],
)
def test_what_is_no_mlflow_is_not_tried_again(reply: Reply, says: str, step: str, tmp_path: Path) -> None:
    with trace_sink(reply) as sink, pytest.raises(VlmflowError, match=says) as caught:
        send(tracked_run(tmp_path), mlflow=sink.url)
    assert sink.url in caught.value.cause
    assert re.search(step, caught.value.next_step)
    assert type(caught.value) is VlmflowError


def test_each_failure_keeps_its_next_step_and_the_others_their_turn(tmp_path: Path) -> None:
    folder = tracked_run(tmp_path)
    (folder / "a file").write_text("no folder")
    with trace_sink() as sink, pytest.raises(VlmflowError, match="it reached: otlp") as caught:
        send(folder, "a file/stores", wandb="mine", otlp=sink.url)
    assert sink.bytes
    assert "wandb: [Errno 20] Not a directory" in caught.value.cause
    assert "wandb: see that this folder is there" in caught.value.next_step
    assert type(caught.value) is VlmflowError
    with (folder / "data" / "fire" / "val.jsonl").open("a") as rows:
        rows.write("\n")
    with pytest.raises(VlmflowError, match="it reached: wandb") as caught:
        send(folder, wandb="mine", otlp="http://127.0.0.1:9")
    assert f"otlp: evaluate again: remove {folder / 'eval' / RUN / 'val'}" in caught.value.next_step
    assert type(caught.value) is VlmflowError


def test_a_key_is_sent_without_its_line_break_and_stays_out_of_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tracked_run(tmp_path)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login ann password another\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))  # requests would take it in place of the key
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "Authorization=Basic%20very-secret\n")
    with trace_sink(Reply(b"you sent Basic very-secret", "text/plain", 403)) as sink:
        with pytest.raises(VlmflowError, match=r"you sent \*\*\*"):
            send(folder, otlp=sink.url)
        assert sink.keys == ["Basic very-secret"]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "Authorization=Basic%20very%0Asecret")
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "very\nsecret")
        with pytest.raises(VlmflowError) as caught:
            send(folder, otlp=sink.url, mlflow=sink.url)
        assert len(sink.keys) == 1, "nothing was sent"
    for name in ("mlflow: MLFLOW_TRACKING_TOKEN: its value", "otlp: OTEL_EXPORTER_OTLP_TRACES_HEADERS: its entry"):
        assert name in caught.value.cause
    assert type(caught.value) is VlmflowError
    assert "secret" not in str(caught.value) + "".join(capfd.readouterr())


PLAIN_JSON = "application/json"
LONG = "odd " * 15_000
"""Nearly what a line of HTTP may have."""


def test_a_collector_that_drips_is_left_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    with trace_sink(Reply(b" ", PLAIN_JSON, pause=0.1)) as sink, pytest.raises(PassingError, match="end in time"):
        send(tracked_run(tmp_path), otlp=sink.url)


def test_an_answer_without_end_is_not_kept(tmp_path: Path) -> None:
    with (
        trace_sink(Reply(b" " * 100_000, PLAIN_JSON, pause=0)) as sink,
        pytest.raises(VlmflowError, match="its answer has more than 1,000,000 bytes") as caught,
    ):
        send(tracked_run(tmp_path), otlp=sink.url)
    assert type(caught.value) is VlmflowError


def test_an_answer_of_mlflow_without_end_is_not_kept(tmp_path: Path) -> None:
    with (
        trace_sink(Reply(b" " * 100_000, PLAIN_JSON, path="", pause=0)) as sink,
        pytest.raises(VlmflowError, match=r"mlflow: .*its answer has more than 8,000,000 bytes") as caught,
    ):
        send(tracked_run(tmp_path), mlflow=sink.url)
    assert type(caught.value) is VlmflowError


def test_an_mlflow_that_drips_is_left_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmflow.track.send.LONGEST", 10.0)
    with (
        trace_sink(Reply(b" ", PLAIN_JSON, path="", pause=0.5)) as sink,
        pytest.raises(PassingError, match=r"mlflow: .*it did not end within 10 seconds"),
    ):
        send(tracked_run(tmp_path), mlflow=sink.url)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (
            Reply(f'{{"partialSuccess": {{"rejectedSpans": 2, "errorMessage": "{LONG}"}}}}'.encode(), PLAIN_JSON),
            "2 spans",
        ),
        (Reply(b"", status=400, reason=LONG), "HTTP 400: odd odd"),
        (Reply(b"", status=302, place=LONG), "it redirects to odd odd"),
        (Reply(b"", LONG), "no OTLP but odd odd"),
        (Reply(LONG.encode(), PLAIN_JSON), "is no OTLP: Failed to load JSON"),
    ],
)
def test_no_part_of_an_answer_fills_the_message(
    reply: Reply, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with trace_sink(reply) as sink, pytest.raises(VlmflowError, match=says) as caught:
        send(tracked_run(tmp_path), otlp=sink.url)
    assert len(str(caught.value)) < 2_000
    assert len("".join(capfd.readouterr())) < 4_000


def test_letters_that_nobody_can_read_hide_no_status(tmp_path: Path) -> None:
    with (
        trace_sink(Reply(b"no .\xff", "text/plain; charset=undefined", 401)) as sink,
        pytest.raises(VlmflowError, match=r"HTTP 401: no \.") as caught,
    ):
        send(tracked_run(tmp_path), otlp=sink.url)
    assert "OTEL_EXPORTER_OTLP_HEADERS" in caught.value.next_step


@pytest.mark.parametrize(("tracker", "shown"), [("otlp", 500), ("mlflow", 1000)])
def test_a_key_at_the_end_of_what_is_shown_is_masked_whole(
    tracker: str, shown: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "0123456789" * 100
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"Authorization={key}")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", key)
    content = f"{'odd ' * (shown // 5)}{key}".encode()
    with (
        trace_sink(Reply(content, "text/plain", 403, path="")) as sink,
        pytest.raises(VlmflowError, match=r"odd \*\*\*") as caught,
    ):
        send(tracked_run(tmp_path), **{tracker: sink.url})
    assert "0123" not in str(caught.value)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(b'{"experiment": 5}', PLAIN_JSON, path=""),
        Reply(b'{"experiment": {"experiment_id": "1", "tags": [5]}}', PLAIN_JSON, path=""),
        Reply(b"{}", f"{PLAIN_JSON}; charset=undefined", path=""),
    ],
)
def test_what_no_client_of_mlflow_expects_is_told_in_two_lines(
    reply: Reply, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with trace_sink(reply) as sink, pytest.raises(VlmflowError, match=rf"mlflow: {sink.url}: ") as caught:
        send(tracked_run(tmp_path), mlflow=sink.url)
    assert type(caught.value) is VlmflowError
    assert "mlflow: see that runs.NAME.track.mlflow is the address of an MLflow server" in caught.value.next_step
    assert "Traceback" not in str(caught.value) + "".join(capfd.readouterr())


@pytest.mark.parametrize("kind", ["garbage", "device", "of another program"])
def test_a_file_that_is_not_mlflows_is_told_in_two_lines(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.db"
    if kind == "garbage":
        file.write_bytes(b"no database " * 1_000)
    elif kind == "device":
        file = Path("/dev/null")
    else:
        with closing(sqlite3.connect(file)) as database:
            database.executescript("create table alembic_version (version_num); insert into alembic_version values (1)")
    with pytest.raises(VlmflowError, match=f"mlflow: sqlite:///{file}: ") as caught:
        send(tracked_run(tmp_path / "run"), mlflow=f"sqlite:///{file}")
    assert type(caught.value) is VlmflowError
    assert "mlflow: see that runs.NAME.track.mlflow is a file of MLflow" in caught.value.next_step
    assert "Traceback" not in str(caught.value) + "".join(capfd.readouterr())


def test_a_key_of_mlflow_goes_before_that_of_a_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login ann password another\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))  # requests would take it in place of the key
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "very-secret")
    with trace_sink(Reply(b"no", "text/plain", 403, path="")) as sink, pytest.raises(VlmflowError, match="403"):
        send(tracked_run(tmp_path), mlflow=sink.url)
    assert {*sink.keys} == {"Bearer very-secret"}
