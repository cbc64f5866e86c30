"""One file of the hub against every network fault, and the download of several."""

import fcntl
import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import IO

import pytest

from faulty_server import Answer, Fault, breaks, html_page, ignores_range, refuses, with_headers
from hub_server import REVISION, SIGNATURE, TOKEN, HubServer, served_hub, sha256
from vlmflow.config.source import HubSource
from vlmflow.core import patience
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import unfinished
from vlmflow.core.patience import PROGRESS_BYTES
from vlmflow.core.progress import Progress
from vlmflow.fetch import from_hub, hub
from vlmflow.fetch.download import download
from vlmflow.fetch.transport import Transport

DATA = HubSource("dataset", "o/d", "big.json")
CONTENT = Random(1).randbytes(300_000)
HALF = len(CONTENT) // 2


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with served_hub(monkeypatch) as hub_server:
        hub_server.add("datasets/o/d", {"big.json": CONTENT, "small.json": CONTENT}, plain=("small.json",))
        yield hub_server


def receive(target: Path, name: str = "big.json") -> str:
    file, _ = hub.look_up(DATA, REVISION, name)
    with Progress("test", file.size, "bytes") as progress:
        return download(file, target, Transport(progress))


@pytest.mark.parametrize("name", ["big.json", "small.json"])
def test_a_file_arrives_complete(server: HubServer, tmp_path: Path, name: str):
    target = tmp_path / "store" / name
    assert receive(target, name) == sha256(CONTENT)
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == [name]
    assert server.sent(name) == len(CONTENT)
    assert not server.leaked


def test_the_token_goes_to_the_hub_and_not_to_its_storage(server: HubServer, tmp_path: Path):
    """Redirects lead from the hub to its storage, and from there to another storage."""
    address = f"{server.storage}/storage/datasets/o/d/big.json?Signature={SIGNATURE}"
    server.faults[("bytes", "small.json")] = [refuses(302, Location=address)]
    server.faults[("bytes", "big.json")] = [refuses(307, Location=address.replace("localhost", "other.localhost"))]
    receive(tmp_path / "small.json", "small.json")
    sent = [
        (seen.headers["host"].split(":")[0], "authorization" in seen.headers)
        for seen in server.requests
        if seen.kind != "api"
    ]  # huggingface_hub's first request in a process
    assert sent == [("127.0.0.1", True)] * 3 + [("localhost", False), ("other.localhost", False)]
    assert not server.leaked


@pytest.mark.parametrize("end", ["close", "reset", pytest.param("stall", marks=pytest.mark.lengthy)])
def test_a_break_is_resumed(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str):
    """An incomplete download. Time-outs too. Nothing is fetched twice."""
    if end == "stall":
        monkeypatch.setattr(patience, "READ_TIMEOUT", 1)
    server.faults[("bytes", "big.json")] = [breaks(HALF, end), breaks(1000, end)]
    receive(tmp_path / "big.json")
    assert (tmp_path / "big.json").read_bytes() == CONTENT
    if end != "reset":  # a reset also discards the bytes in transfer
        assert server.ranges("big.json") == [None, f"bytes={HALF}-", f"bytes={HALF + 1000}-"]
        assert server.sent("big.json") == len(CONTENT)
        conditions = [seen.headers.get("if-range") for seen in server.requests if seen.kind == "bytes"]
        assert conditions == [None, *[f'"s3-{sha256(CONTENT)[:8]}"'] * 2]


def as_another_file(answer: Answer) -> Answer:
    """The second half of another file, with the same size and address."""
    headers = {**answer.headers, "Content-Range": f"bytes {HALF}-{len(CONTENT) - 1}/{len(CONTENT)}"}
    return Answer(206, headers, CONTENT[:HALF])


def of_another_size(answer: Answer) -> Answer:
    return (
        with_headers(Content_Range=f"bytes {HALF}-{HALF + 9}/{HALF + 10}")(answer) if answer.status == 206 else answer
    )


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(refuses(500), "answers 500", id="500"),
        pytest.param(refuses(503, Retry_After="0"), "answers 503", id="503"),
        pytest.param(refuses(429, Retry_After="0"), "answers 429", id="429"),
        pytest.param(refuses(403), "answers 403", id="expired signature"),
        pytest.param(html_page(), "HTML page", id="HTML page"),
        pytest.param(with_headers(Content_Encoding="gzip"), "compressed", id="compressed"),
        pytest.param(refuses(302, Location="/nowhere/resolve/1/x"), "answers 401", id="redirect elsewhere"),
        pytest.param(breaks(0), "localhost: .* bytes missing", id="nothing at all"),
    ],
)
@pytest.mark.parametrize("resumed", [True, False])
def test_answers_that_are_not_the_file_are_requested_again(
    server: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Fault, reason: str, resumed: bool
):
    """Such an answer is reported and requested again; received bytes are kept."""
    caplog.set_level(logging.DEBUG, "vlmflow")
    server.faults[("bytes", "big.json")] = [breaks(HALF)] * resumed + [fault]
    assert receive(tmp_path / "big.json") == sha256(CONTENT)
    assert (tmp_path / "big.json").read_bytes() == CONTENT
    assert re.search(reason, caplog.text)
    assert server.ranges("big.json")[-1] == (f"bytes={HALF}-" if resumed else None)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(ignores_range(), "from the start again", id="range ignored"),
        pytest.param(with_headers(Content_Range=f"bytes 0-9/{len(CONTENT)}"), "another range", id="another range"),
        pytest.param(of_another_size, "another range", id="another size"),
        pytest.param(with_headers(ETag='"another"'), "another file than before", id="another ETag"),
        pytest.param(as_another_file, "do not belong to one file", id="another file"),
        pytest.param(refuses(416), "answers 416", id="416"),
        pytest.param(
            with_headers(Content_Length="9999999"), "", id="Content-Length too large", marks=pytest.mark.lengthy
        ),
        pytest.param(with_headers(Content_Length="999"), "", id="Content-Length too small"),
    ],
)
def test_wrong_pieces_are_noticed(
    server: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Fault, reason: str
):
    """A second half from another file; in the end the file is the right one."""
    caplog.set_level(logging.DEBUG, "vlmflow")
    server.faults[("bytes", "big.json")] = [breaks(HALF), fault]
    assert receive(tmp_path / "big.json") == sha256(CONTENT)
    assert (tmp_path / "big.json").read_bytes() == CONTENT
    assert reason in caplog.text


def test_bytes_beyond_the_end_are_not_taken(server: HubServer, tmp_path: Path):
    server.faults[("bytes", "big.json")] = [
        breaks(HALF),
        lambda answer: replace(answer, body=answer.body + b"more"),
    ]
    assert receive(tmp_path / "big.json") == sha256(CONTENT)
    assert server.ranges("big.json") == [None, f"bytes={HALF}-"]


def test_a_file_is_fetched_whole_from_a_server_that_refuses_ranges(server: HubServer, tmp_path: Path):
    """The server answers 416 to every range."""
    no_range = refuses(416)
    server.faults[("bytes", "big.json")] = [
        breaks(HALF),
        *[lambda answer: no_range(answer) if answer.status == 206 else answer] * 100,
    ]
    assert receive(tmp_path / "big.json") == sha256(CONTENT)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (refuses(503), "localhost answers 503, 8 times in a row"),
        (html_page(), "an HTML page instead of the file"),
        (with_headers(Content_Length="7"), "announces 7 bytes, the file has 300000"),
        (with_headers(Content_Encoding="gzip"), "compressed"),
        (breaks(0), "8 times in a row"),
        (refuses(429, Retry_After="86400"), "asks to wait 86,400 s"),
        (refuses(302, Location=f"/storage/datasets/o/d/big.json?Signature={SIGNATURE}"), "redirects of localhost"),
    ],
)
def test_persistent_faults_are_reported(
    server: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Fault, cause: str
):
    """An HTML page instead of a file, refusals without end."""
    caplog.set_level(logging.DEBUG, "vlmflow")
    server.faults[("bytes", "big.json")] = [fault] * 400
    with pytest.raises(VlmflowError) as raised:
        receive(tmp_path / "big.json")
    assert cause in raised.value.cause
    assert "again" in raised.value.next_step
    assert not list(tmp_path.iterdir())
    for secret in (TOKEN, SIGNATURE):
        assert secret not in str(raised.value) + caplog.text


def test_attempts_are_counted_from_zero_only_after_progress(server: HubServer, tmp_path: Path):
    """A connection that breaks after every MiB is used; one that gives the same part again and again is given up."""
    server.repos["datasets/o/d"].files["big.json"] = content = bytes(PROGRESS_BYTES) * 10
    server.faults[("bytes", "big.json")] = [breaks(PROGRESS_BYTES)] * (patience.TRIES + 1)
    assert receive(tmp_path / "big.json") == sha256(content)
    server.faults[("bytes", "small.json")] = [lambda answer: breaks(HALF)(ignores_range()(answer)) for _ in range(100)]
    with pytest.raises(VlmflowError, match="8 times in a row"):
        receive(tmp_path / "small.json", "small.json")


def test_bytes_that_differ_from_the_hubs_digest_are_refused(server: HubServer, tmp_path: Path):
    """A corrupt download."""
    wrong = CONTENT[:-1] + b"?"
    server.faults[("bytes", "big.json")] = [lambda answer: Answer(200, answer.headers, wrong)] * 9
    with pytest.raises(VlmflowError, match=f"sha256 {sha256(wrong)}.*{sha256(CONTENT)}"):
        receive(tmp_path / "big.json")
    assert not list(tmp_path.iterdir())
    assert server.sent("big.json") == len(CONTENT)


def test_a_file_that_changes_on_the_hub_meanwhile_is_refused(server: HubServer, tmp_path: Path):
    """The hub returns another file for the same commit."""
    server.faults[("head", "big.json")] = [
        lambda answer: answer,
        lambda answer: answer,
        with_headers(X_Linked_ETag=f'"{"0" * 64}"'),
    ]
    server.faults[("bytes", "big.json")] = [breaks(HALF)]
    with pytest.raises(VlmflowError, match="changed on the hub at the same commit"):
        receive(tmp_path / "big.json")


def test_an_unfinished_file_is_resumed_whatever_it_holds(server: HubServer, tmp_path: Path):
    """A part of an earlier run is resumed; one that does not fit is found and dropped."""
    target = tmp_path / "big.json"
    for part, ranges in [
        (CONTENT[:HALF], [f"bytes={HALF}-"]),
        (b"?" * HALF, [f"bytes={HALF}-", None]),
        (CONTENT, []),
        (b"?" * len(CONTENT), [None]),
        (CONTENT + b"?", [None]),
    ]:
        server.requests.clear()
        target.unlink(missing_ok=True)
        unfinished(target).write_bytes(part)
        assert receive(target) == sha256(CONTENT)
        assert target.read_bytes() == CONTENT
        assert server.ranges("big.json") == ranges
        assert not unfinished(target).exists()


def test_a_finished_file_is_checked_and_kept(server: HubServer, tmp_path: Path):
    target = tmp_path / "big.json"
    receive(target)
    server.requests.clear()
    assert receive(target) == sha256(CONTENT)
    assert not server.ranges("big.json")
    target.write_bytes(bytes(len(CONTENT)))
    receive(target)
    assert target.read_bytes() == CONTENT


def test_one_process_at_a_time_writes_a_file(server: HubServer, tmp_path: Path):
    target = tmp_path / "big.json"
    server.pace = 0.1
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(receive(target))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [sha256(CONTENT)] * 3
    assert server.sent("big.json") == len(CONTENT)
    assert [path.name for path in tmp_path.iterdir()] == ["big.json"]


def test_a_disk_error_is_reported(server: HubServer, tmp_path: Path):
    (tmp_path / "store").write_text("a file where the folder should be")
    with pytest.raises(VlmflowError, match=r"big\.json\.part: "):
        receive(tmp_path / "store" / "big.json")


def test_free_disk_is_checked_before_the_first_byte(server: HubServer, tmp_path: Path):
    file = hub.HubFile(DATA, REVISION, "big.json", 10**18, "0" * 64)
    with pytest.raises(VlmflowError, match=r"needs 1000000000\.00 GB"):
        from_hub.bring({tmp_path / "store" / "big.json": file}, "fetching", threads=1)
    assert not server.requests


def test_the_first_failure_stops_the_other_downloads(server: HubServer, tmp_path: Path):
    server.repos["datasets/o/d"].files = {"slow.json": bytes(10_000_000), "missing.json": CONTENT}
    files = {tmp_path / name: hub.look_up(DATA, REVISION, name)[0] for name in ("slow.json", "missing.json")}
    del server.repos["datasets/o/d"].files["missing.json"]
    server.pace = 0.2  # half a minute for the whole file
    with pytest.raises(VlmflowError, match="no such file"):
        from_hub.bring(files, "fetching", threads=2)
    assert server.sent("slow.json") < 10_000_000
    assert not (tmp_path / "slow.json").exists()


def test_waiting_for_another_process_ends_with_it(server: HubServer, tmp_path: Path):
    """What the other process renames meanwhile is used, and not written again."""
    target = tmp_path / "big.json"
    with unfinished(target).open("wb") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        waiting = threading.Thread(target=receive, args=(target,))
        waiting.start()
        time.sleep(0.3)
        part.write(CONTENT)
        part.flush()
        unfinished(target).replace(target)
    waiting.join(10)
    assert target.read_bytes() == CONTENT
    assert not server.ranges("big.json")
    assert not unfinished(target).exists()


def test_a_name_that_another_process_gives_between_opening_and_locking_is_seen(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = tmp_path / "big.json"
    unfinished(target).write_bytes(CONTENT)
    lock = fcntl.flock

    def renamed_before(handle: IO[bytes], operation: int) -> None:
        if not target.exists():
            unfinished(target).replace(target)
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", renamed_before)
    receive(target)
    assert target.read_bytes() == CONTENT
    assert not server.ranges("big.json")
