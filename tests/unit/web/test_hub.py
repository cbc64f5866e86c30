"""The answers of the hub and of other servers: messages about refusals, and none that fills our memory."""

import gzip
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from faulty_server import Answer, html_page, refuses, with_headers
from hub_server import REVISION, SIGNATURE, TOKEN, HubServer, blob_id, served_hub, sha256
from vlmflow.config.source import HubSource
from vlmflow.core import patience
from vlmflow.core.errors import VlmflowError
from vlmflow.core.patience import PROGRESS_BYTES, PassingFault, asked_wait, patiently
from vlmflow.fetch import hub
from vlmflow.fetch.transport import limit_answers

DATA = HubSource("dataset", "o/d", "big.json")
MODEL = HubSource("model", "o/m", None)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with served_hub(monkeypatch) as hub_server:
        hub_server.add("datasets/o/d", {"big.json": b"[1]", "small.json": b"[]"}, plain=("small.json",))
        hub_server.add("o/m", {"sub/w.safetensors": b"w", "config.json": b"{}"}, plain=("config.json",))
        yield hub_server


def test_a_file_has_size_digest_and_address(server: HubServer):
    file, address = hub.look_up(DATA, REVISION, "big.json")
    assert (file.size, file.etag, file.sha256) == (3, sha256(b"[1]"), sha256(b"[1]"))
    assert str(file) == str(DATA)
    assert address.startswith(server.storage)
    plain, address = hub.look_up(DATA, REVISION, "small.json")
    assert (plain.size, plain.etag, plain.sha256) == (2, blob_id(b"[]"), None)
    assert address.startswith(server.endpoint)


def test_a_repository_has_its_commit_and_files(server: HubServer):
    for revision in (None, REVISION):
        commit, files = hub.describe(MODEL, revision)
        assert commit == REVISION
        assert [(file.path, file.size, file.etag) for file in files] == [
            ("config.json", 2, blob_id(b"{}")),
            ("sub/w.safetensors", 1, sha256(b"w")),
        ]


def test_the_token_is_sent_only_to_the_hub(server: HubServer):
    own = hub.headers_for(f"{server.endpoint}/o/m/resolve/x/config.json")
    assert own["authorization"] == f"Bearer {TOKEN}"
    # The same machine under another name, another port, or without encryption is another party.
    for address in (
        f"{server.storage}/file",
        "http://127.0.0.1:1/file",
        f"https://127.0.0.1:{server.port}/f",
    ):
        assert "authorization" not in hub.headers_for(address)


def look_up_again(kind: str) -> None:
    hub.look_up(DATA, REVISION, "big.json") if kind == "head" else hub.describe(MODEL, REVISION)


@pytest.mark.parametrize("kind", ["head", "api"])
@pytest.mark.parametrize(
    ("fault", "cause", "next_step"),
    [
        (refuses(403, X_Error_Code="GatedRepo"), "granted access", "HF_TOKEN"),
        (refuses(403), "granted access", "accept its terms"),
        (refuses(401), "does not have it, or not for this token", "HF_TOKEN"),
        (refuses(404, X_Error_Code="RepoNotFound"), "does not have it", "address"),
        (refuses(404, X_Error_Code="EntryNotFound"), "no such file", "address"),
        (refuses(404, X_Error_Code="RevisionNotFound"), "no commit " + REVISION, "pins.yaml"),
        (refuses(410), "answers 410", "later"),
        (html_page(), "does not answer like a hub", "login page"),
        (lambda answer: Answer(200, {}, b"[1, 2]"), "does not answer like a hub", "HF_ENDPOINT"),
    ],
)
def test_refusals_say_what_to_do(server: HubServer, kind: str, fault, cause: str, next_step: str):
    """A permanent refusal is reported at once; a temporary one is retried."""
    server.faults = {("head", "big.json"): [fault], ("api", "o/m"): [fault]}
    with pytest.raises(VlmflowError) as raised:
        look_up_again(kind)
    assert cause in raised.value.cause
    assert next_step in raised.value.next_step
    assert TOKEN not in str(raised.value)
    look_up_again(kind)


def test_a_wrong_token_is_refused(server: HubServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    with pytest.raises(VlmflowError, match="not for this token"):
        hub.describe(MODEL)


def test_another_commit_than_the_requested_one_is_refused(server: HubServer):
    """A moved revision."""
    server.faults[("head", "big.json")] = [with_headers(X_Repo_Commit="2" * 40)]
    with pytest.raises(VlmflowError, match=f"asked for commit {REVISION}, the hub returned {'2' * 40}"):
        hub.look_up(DATA, REVISION, "big.json")
    server.faults[("api", "o/m")] = [lambda answer: Answer(200, {}, answer.body.replace(REVISION.encode(), b"2" * 40))]
    with pytest.raises(VlmflowError, match=f"asked for commit {REVISION}, the hub returned {'2' * 40}"):
        hub.describe(MODEL, REVISION)


def test_redirects_in_a_circle_are_refused(server: HubServer):
    circle = refuses(302, Location="/datasets/o/d/resolve/" + REVISION + "/big.json")
    server.faults[("head", "big.json")] = [circle] * 50
    with pytest.raises(VlmflowError, match="loop"):
        hub.look_up(DATA, REVISION, "big.json")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a//b", "a/./b", "a\nb", "w.safetensors.part"])
def test_names_that_are_not_paths_are_refused(server: HubServer, name: str):
    server.repos["o/m"].files[name] = b""
    with pytest.raises(VlmflowError, match="the hub names a file"):
        hub.describe(MODEL)


@pytest.mark.parametrize("headers", [{"X_Linked_ETag": '"short"'}, {"X_Linked_Size": "many"}])
def test_files_that_cannot_be_checked_are_refused(server: HubServer, headers: dict[str, str]):
    server.faults[("head", "big.json")] = [with_headers(**headers)]
    with pytest.raises(VlmflowError, match="cannot be checked"):
        hub.look_up(DATA, REVISION, "big.json")


def test_a_name_that_the_hub_cannot_have_is_refused(server: HubServer):
    with pytest.raises(VlmflowError, match="not a valid name on the hub"):
        hub.describe(HubSource("model", "o/m--x", None))
    assert not server.requests


def test_offline_mode_is_reported(server: HubServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(VlmflowError, match="HF_HUB_OFFLINE"):
        hub.describe(MODEL)


def test_passing_faults_are_tried_again(server: HubServer, caplog: pytest.LogCaptureFixture):
    """Rate limits, server errors and time-outs."""
    caplog.set_level(logging.DEBUG, "vlmflow")
    server.faults[("api", "o/m")] = [refuses(500), refuses(503), refuses(429), refuses(504)]
    assert hub.describe(MODEL)[0] == REVISION
    assert [text for text in ("500", "503", "429", "504") if text in caplog.text] == [
        "500",
        "503",
        "429",
        "504",
    ]
    assert TOKEN not in caplog.text


def test_attempts_are_bounded(server: HubServer, monkeypatch: pytest.MonkeyPatch):
    """Attempts have a limit."""
    server.faults[("api", "o/m")] = [refuses(503)] * 100
    with pytest.raises(VlmflowError, match="answers 503, 8 times in a row"):
        hub.describe(MODEL)
    asked = [request for request in server.requests if request.path]  # the hub's library looks at "" once per process
    assert len(asked) == patience.TRIES


def test_an_unreachable_hub_is_reported(server: HubServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(VlmflowError, match=r"ConnectError at 127\.0\.0\.1, 8 times in a row") as raised:
        hub.describe(MODEL)
    for word in ("network", "HTTPS_PROXY", "HF_ENDPOINT", "path on this machine"):
        assert word in raised.value.next_step


def test_a_servers_requested_wait_is_obeyed():
    """Retry-After in both forms, and the hub's own RateLimit."""
    assert asked_wait({"retry-after": "7"}) == 7
    assert asked_wait({"ratelimit": '"api";r=0;t=55', "retry-after": "7"}) == 55
    assert asked_wait({"ratelimit": '"api";r=3;t=55'}) is None
    assert asked_wait({"ratelimit": f'"api";r=0;t={"9" * 400}'}) is None
    assert asked_wait({"retry-after": "Mon, 01 Jan 99999999999999 00:00:00 GMT"}) is None
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert asked_wait({"retry-after": later}) == pytest.approx(90, abs=2)
    assert asked_wait({"retry-after": "soon"}) is None
    waits: list[float] = []
    asked = iter([7.0, None, 0.0, 3600.0])

    def attempt() -> None:
        raise PassingFault("busy", next(asked))

    with pytest.raises(VlmflowError, match="asks to wait 3,600 s"):
        patiently("x", attempt, pause=waits.append)
    assert waits == [7.0, 2 * patience.FIRST_WAIT, 4 * patience.FIRST_WAIT]


def test_short_waits_are_only_in_the_log(caplog: pytest.LogCaptureFixture):
    """A server that breaks some answers must not hide all other messages."""
    caplog.set_level(logging.DEBUG, "vlmflow")
    received, faults = 0, iter([None, None, None, 30.0, None, 30.0])

    def attempt() -> None:
        nonlocal received
        if (seconds := next(faults, 0)) != 0:
            received += PROGRESS_BYTES * (len(caplog.records) == 4)  # the fifth attempt gets more bytes
            raise PassingFault("busy", seconds)

    patiently("x", attempt, lambda: received, lambda _: None)
    said = [(record.levelname, record.message.rpartition(" in ")[2]) for record in caplog.records]
    told, kept = "WARNING", "DEBUG"
    assert said == [(kept, "1 s"), (kept, "2 s"), (told, "4 s"), (told, "30 s"), (kept, "1 s"), (told, "30 s")]


def test_a_connection_that_trickles_is_given_up():
    """Each attempt fetches some bytes; all together too few to start counting attempts again."""
    attempts = 0

    def attempt() -> None:
        nonlocal attempts
        attempts += 1
        assert attempts <= patience.TRIES
        raise PassingFault("broke")

    with pytest.raises(VlmflowError, match="broke, 8 times in a row"):
        patiently("x", attempt, lambda: attempts * (PROGRESS_BYTES // patience.TRIES - 1), lambda _: None)


def test_nothing_secret_is_logged(server: HubServer, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "vlmflow")
    server.faults[("head", "big.json")] = [refuses(500)]
    with pytest.raises(PassingFault) as raised:
        hub.look_up(DATA, REVISION, "big.json")
    hub.look_up(DATA, REVISION, "big.json")
    for text in (caplog.text, str(raised.value)):
        assert TOKEN not in text
        assert SIGNATURE not in text


def test_only_the_host_of_an_address_is_reported():
    """Whoever has a signed address has the file; httpx's own messages may contain it."""
    address = f"https://user:word@storage.example.org/private/file?{SIGNATURE}"
    for error in (httpx.ConnectError(f"no way to {address}"), httpx.ReadError(f"broken: {address}")):
        said = str(hub.broken_off(error, address))
        assert said == f"{type(error).__name__} at storage.example.org"


@pytest.mark.parametrize(
    "change", [('"config.json"', "5"), ('"config.json"', "null"), (f'"{REVISION}"', "7"), ('"size": 2', '"size": "2"')]
)
def test_a_file_list_of_other_types_is_refused(server: HubServer, change: tuple[str, str]):
    """huggingface_hub passes on whatever the JSON holds."""
    old, new = (text.encode() for text in change)
    server.faults[("api", "o/m")] = [lambda answer: Answer(200, answer.headers, answer.body.replace(old, new))] * 50
    with pytest.raises(VlmflowError, match=r"the hub names a file|cannot be checked|does not answer like a hub"):
        hub.describe(MODEL)


asked: list[str | None] = []


@contextmanager
def one_answer_server(content: bytes, encoding: str = "", length: bool = True, status: int = 200) -> Iterator[str]:
    """Run a server that gives one answer to everything; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Accept-Encoding"])
            self.send_response(status)
            if encoding:
                self.send_header("Content-Encoding", encoding)
            if length:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    asked.clear()
    with limit_answers(httpx.Client(trust_env=False), 1000) as made:
        yield made


@pytest.mark.parametrize("encoding", ["", "identity", "Identity"])
def test_a_short_answer_is_read_as_it_is(client: httpx.Client, encoding: str) -> None:
    for length in (True, False):
        with one_answer_server(b"x" * 1000, encoding, length) as address:
            assert client.get(address).content == b"x" * 1000
    assert asked == ["identity"] * 2


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("length", [True, False])
def test_a_longer_answer_is_not_read_to_its_end(client: httpx.Client, length: bool, status: int) -> None:
    with (
        one_answer_server(b"x" * 1001, length=length, status=status) as address,
        pytest.raises(VlmflowError, match=r"/a: its answer has more than 1,000 bytes") as caught,
    ):
        client.get(f"{address}/a?key=secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, identity", "other"])
def test_a_compressed_answer_is_not_unpacked(client: httpx.Client, encoding: str) -> None:
    content = gzip.compress(bytes(1000))
    with one_answer_server(content, encoding) as address, pytest.raises(VlmflowError, match="its answer is compressed"):
        client.get(address)


def test_the_client_of_the_hub_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # a package that another test imports may have set it
    assert hub.LONGEST_ANSWER < 1_000_000_000
    for content, encoding, says in ((gzip.compress(bytes(9)), "gzip", "compressed"), (b"{}", "", None)):
        with one_answer_server(content, encoding) as address:
            if says is None:
                assert get_session().get(address).json() == {}
            else:
                with pytest.raises(VlmflowError, match=says):
                    get_session().get(address)


def test_other_hooks_stay(client: httpx.Client) -> None:
    seen: list[int] = []
    with (
        httpx.Client(
            trust_env=False, event_hooks={"response": [lambda answer: seen.append(answer.status_code)]}
        ) as own,
        one_answer_server(b"x" * 1001) as address,
        pytest.raises(VlmflowError),
    ):
        limit_answers(own, 1000).get(address)
    assert seen == [200]
