"""A server that is no tracker, or a broken one, can neither hold a sending nor fill a log, nor get another key."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from sent_run import send
from trace_sink import Reply, trace_sink
from tracked_run import tracked_run
from vlmflow.core.errors import PassingError, VlmflowError

JSON = "application/json"
LONG = "odd " * 15_000
"""Nearly what a line of HTTP may have."""


def test_a_collector_that_drips_is_left_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    with trace_sink(Reply(b" ", JSON, pause=0.1)) as sink, pytest.raises(PassingError, match="end in time"):
        send(tracked_run(tmp_path), otlp=sink.url)


def test_an_answer_without_end_is_not_kept(tmp_path: Path) -> None:
    with (
        trace_sink(Reply(b" " * 100_000, JSON, pause=0)) as sink,
        pytest.raises(VlmflowError, match="its answer has more than 1,000,000 bytes") as caught,
    ):
        send(tracked_run(tmp_path), otlp=sink.url)
    assert type(caught.value) is VlmflowError


def test_an_answer_of_mlflow_without_end_is_not_kept(tmp_path: Path) -> None:
    with (
        trace_sink(Reply(b" " * 100_000, JSON, path="", pause=0)) as sink,
        pytest.raises(VlmflowError, match=r"mlflow: .*its answer has more than 8,000,000 bytes") as caught,
    ):
        send(tracked_run(tmp_path), mlflow=sink.url)
    assert type(caught.value) is VlmflowError


def test_an_mlflow_that_drips_is_left_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmflow.track.send.LONGEST", 10.0)
    with (
        trace_sink(Reply(b" ", JSON, path="", pause=0.5)) as sink,
        pytest.raises(PassingError, match=r"mlflow: .*it did not end within 10 seconds"),
    ):
        send(tracked_run(tmp_path), mlflow=sink.url)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(f'{{"partialSuccess": {{"rejectedSpans": 2, "errorMessage": "{LONG}"}}}}'.encode(), JSON), "2 spans"),
        (Reply(b"", status=400, reason=LONG), "HTTP 400: odd odd"),
        (Reply(b"", status=302, place=LONG), "it redirects to odd odd"),
        (Reply(b"", LONG), "no OTLP but odd odd"),
        (Reply(LONG.encode(), JSON), "is no OTLP: Failed to load JSON"),
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
        Reply(b'{"experiment": 5}', JSON, path=""),
        Reply(b'{"experiment": {"experiment_id": "1", "tags": [5]}}', JSON, path=""),
        Reply(b"{}", f"{JSON}; charset=undefined", path=""),
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
