"""Requests to archives: certificates, proxies, redirects, and their end."""

import http.server
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from archive_server import ArchiveServer, served_archives
from faulty_server import breaks, refuses
from vlmflow.core.patience import PassingFault
from vlmflow.fetch.remote_file import RemoteFile
from vlmflow.fetch.source_fetch import FetchProgress
from vlmflow.fetch.transport import CONNECTIONS, Answer, Refused, Stopped, Transport
from workflow_runs import ROOT

SCRIPTS = ROOT / "scripts"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArchiveServer]:
    with served_archives(monkeypatch) as archive_server:
        archive_server.files["a.jpg"] = bytes(range(256)) * 1_000
        yield archive_server


@pytest.fixture
def transport() -> Iterator[Transport]:
    with FetchProgress("test") as progress:
        yield Transport(progress)


def content_of(
    transport: Transport, address: str, accept: Callable[[Answer], object] = lambda _: None, **headers: str
) -> bytes:
    blocks: list[bytes] = []
    transport.get(address, headers, accept, blocks.append)
    assert transport.received >= sum(map(len, blocks))
    return b"".join(blocks)


def test_content_and_headers_are_passed_on(server: ArchiveServer, transport: Transport) -> None:
    server.faults["old.jpg"] = [refuses(302, Location="/a.jpg")]
    answers: list[Answer] = []
    assert content_of(transport, f"{server.base}/old.jpg", answers.append) == server.files["a.jpg"]
    (answer,) = answers
    assert (answer.address, answer.status, answer.host) == (f"{server.base}/a.jpg", 200, "127.0.0.1")
    assert answer.headers["content-type"] == "application/octet-stream"


def test_an_answer_without_content_is_reported_too(server: ArchiveServer, transport: Transport) -> None:
    server.files["empty"] = b""
    answers: list[Answer] = []
    assert content_of(transport, f"{server.base}/empty", answers.append) == b""
    assert [answer.status for answer in answers] == [200]


@pytest.mark.parametrize("place", ["accept", "sink"])
def test_an_exception_in_a_transfer_ends_the_request(server: ArchiveServer, transport: Transport, place: str) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError(place)

    calls = {"accept": lambda _: None, "sink": lambda _: None} | {place: fail}
    with pytest.raises(ZeroDivisionError, match=place):
        transport.get(f"{server.base}/a.jpg", {}, **calls)
    assert content_of(transport, f"{server.base}/a.jpg") == server.files["a.jpg"]


def test_a_redirect_to_a_file_of_this_machine_is_refused(server: ArchiveServer, transport: Transport) -> None:
    for number, address in enumerate((f"file://{__file__}", "ftp://127.0.0.1/x", "http://")):
        server.always[f"{number}"] = refuses(302, Location=address)
        with pytest.raises(Refused, match="not a valid address"):
            content_of(transport, f"{server.base}/{number}")


@pytest.mark.parametrize("how", ["stall", "close", "reset"])
def test_an_early_end_is_a_temporary_fault(
    server: ArchiveServer, transport: Transport, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("vlmflow.core.patience.READ_TIMEOUT", 1)
    server.always["a.jpg"] = breaks(900, how)
    with pytest.raises(PassingFault, match=r"127\.0\.0\.1"):
        content_of(transport, f"{server.base}/a.jpg")


def test_the_token_is_not_sent_to_another_server(server: ArchiveServer, transport: Transport) -> None:
    """A redirect to another host does not get the header."""
    seen: list[str | None] = []

    class Storage(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("authorization"))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            pass

    with running(Storage) as port:
        server.always["a.jpg"] = refuses(302, Location=f"http://localhost:{port}/x")
        assert content_of(transport, f"{server.base}/a.jpg", authorization="Bearer hf_secret") == b"ok"
    assert seen == [None]


def test_a_stop_ends_requests_without_data(
    server: ArchiveServer, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmflow.core.patience.READ_TIMEOUT", 60)
    server.always["a.jpg"] = breaks(900, "stall")
    threading.Timer(0.3, transport.stop).start()
    begun = time.monotonic()
    with pytest.raises(Stopped):
        content_of(transport, f"{server.base}/a.jpg")
    assert time.monotonic() - begun < 30


def test_no_more_requests_at_a_time_than_connections(server: ArchiveServer, transport: Transport) -> None:
    lock, under_way, most = threading.Lock(), 0, 0
    together = threading.Barrier(CONNECTIONS, timeout=60)

    def ask() -> None:
        nonlocal under_way, most

        def look(_: Answer) -> None:
            nonlocal under_way, most
            with lock:
                under_way += 1
                most = max(most, under_way)
            together.wait()
            with lock:
                under_way -= 1

        assert content_of(transport, f"{server.base}/a.jpg", look) == server.files["a.jpg"]

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3 * CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == CONNECTIONS
    assert len(server.seen) == 3 * CONNECTIONS


INTERRUPTED = """
import sys
from vlmflow.fetch.source_fetch import FetchProgress
from vlmflow.fetch.transport import Transport
with FetchProgress("test") as progress:
    try:
        Transport(progress).get(sys.argv[1], {}, lambda _: print("answer", flush=True), lambda _: None)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_an_interrupt_is_not_lost_in_a_request(server: ArchiveServer) -> None:
    """Python runs its handler in libcurl's callback, where no exception passes through C."""
    server.always["a.jpg"] = breaks(900, "stall")
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-c", INTERRUPTED, f"{server.base}/a.jpg"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "answer\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "interrupted\n"


def test_tests_in_the_background_can_interrupt_their_processes() -> None:
    """`make test &`: a shell's background processes ignore SIGINT, and so do the processes that they start."""
    own = f"{__file__}::{test_an_interrupt_is_not_lost_in_a_request.__name__}"
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", own]
    ignoring = f"import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv({suite[0]!r}, {suite!r})"
    done = subprocess.run([sys.executable, "-c", ignoring], capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout


@contextmanager
def running(handler: type, certificate: Path | None = None) -> Iterator[int]:
    """Serve on a free loopback port and return it. certificate: a file with the certificate and its key."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            other.socket = context.wrap_socket(other.socket, server_side=True)
        other.handle_error = lambda *_: None
        threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield other.server_address[1]
        other.shutdown()


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"{self.path} for {self.headers['host']}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    file = tmp_path / "own.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    key = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    subprocess.run(
        ["openssl", "req", *key, *subject, "-keyout", file, "-out", tmp_path / "cert"], check=True, capture_output=True
    )
    file.write_bytes(file.read_bytes() + (tmp_path / "cert").read_bytes())
    return file


def test_only_known_certificates_are_trusted(
    certificate: Path, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Hello, certificate) as port:
        address = f"https://localhost:{port}/x"
        with pytest.raises(PassingFault, match=r"localhost: .*certificate"):
            content_of(transport, address)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert content_of(Transport(FetchProgress("test")), address) == f"/x for localhost:{port}".encode()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_the_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with running(Hello) as port, running(Hello) as direct:
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "localhost")
        proxied = Transport(FetchProgress("test"))
        assert content_of(proxied, "http://pictures.invalid/x") == b"http://pictures.invalid/x for pictures.invalid"
        assert content_of(proxied, f"http://localhost:{direct}/x") == f"/x for localhost:{direct}".encode()


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Serve bytes, whatever is asked; returns the address of a file."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, suppress(OSError):
                        connection.recv(1 << 16)
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/a.zip"
        listening.shutdown(socket.SHUT_RDWR)


OF_ONE = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-0/10\r\n"


@pytest.mark.parametrize(
    ("answer", "size"),
    [
        (OF_ONE + b"HTTP/x: abc\r\nHTTP/x:\r\nContent-Length: 1\r\n\r\na", 10),
        (OF_ONE + b"Connection: close\r\n\r\n" + b"a" * 5_000_000, 10),
        (b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-0/" + b"9" * 5_000 + b"\r\nContent-Length: 1\r\n\r\na", None),
        (b"HTTP/1.1 200 OK\r\nX-Length: 1\r\nConnection: close\r\n\r\na", None),
    ],
    ids=["a header like a status line", "more than asked for", "a size of 5,000 digits", "no size"],
)
def test_a_hostile_head_is_read_or_refused(transport: Transport, answer: bytes, size: int | None) -> None:
    with answering(answer) as address:
        file = RemoteFile("a.zip", lambda: address, transport)
        if size is None:
            with pytest.raises(Refused, match="does not report its size"):
                file.open()
        else:
            file.open()
            assert file.length == size
    assert transport.received < 2_000_000
