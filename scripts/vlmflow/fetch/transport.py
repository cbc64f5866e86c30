"""Requests for bytes, many at a time, through libcurl: kept connections, redirects, proxies, certificates.

A request through libcurl takes two fifths of the processor time of one through urllib3, and little of that under
Python's lock, which limited a fetch with sixteen threads. obstore (in Rust) is not in the lock files and was not tried:
it is unknown whether it sends If-Range, hides a token from the host of a redirect, and stops on Ctrl-C. huggingface_hub
calls the hub's API (`hub`), with the same retries.

No server fills this process's memory: what calls an API through httpx reads its answers uncompressed, and up to a limit
(`limit_answers`).
"""

import re
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple, TypeVar
from urllib.parse import urljoin, urlsplit

import certifi
import httpx
import msgspec
import pycurl

from vlmflow.core import patience
from vlmflow.core.errors import VlmflowError
from vlmflow.core.patience import AGAIN, NO_CONNECTION, PASSING_STATUS, PassingFault, asked_wait, patiently
from vlmflow.core.progress import Progress

REASONS = {
    "no_source": "no row of picture_sources.yaml matches its path",
    "by_hand": "the source must be downloaded by hand",
    "refused": "the server does not have it, or refuses it",
    "no_member": "the archive has no such name",
    "failed": "the server failed too often, or the archive is not the expected one",
    "unreadable": "the archive cannot be read: unknown format, or damaged",
    "damaged": "the bytes differ from the archive's directory",
    "too_large": "larger than picture_limits.max_bytes",
    "name_conflict": "another picture's path runs through it, as if it were a folder",
}
"""All reasons, for people."""


class Missing(msgspec.Struct, frozen=True):
    """Why a picture could not be fetched.

    reason: a key of REASONS.
    detail: the exact cause, for people.
    """

    reason: str
    detail: str


CHECK_PROXIES = "check proxies and HF_ENDPOINT, then run the same command again"
"""The next step where a server refuses a file that the hub has."""


class Refused(Exception):
    """A source refuses a file permanently; `missing` has the reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.missing = Missing(reason, detail)


Result = TypeVar("Result")

CONNECTIONS = 16
"""Requests at a time: enough to hide 100 ms of latency with 1 MB pieces at 100 MB/s, and as few as servers accept from
browsers."""

REDIRECTS = 10
STATUS_LINE = re.compile(rb"HTTP/[0-9.]+ ([0-9]{3})\b")
BLOCK_BYTES = 1 << 19
"""The most bytes that libcurl passes on at once: each block has to wait for Python's lock."""

GO_ON, ABORT = None, -1
"""Return values of libcurl's callbacks; -1 is neither a number of taken bytes nor the 0 that continues a transfer."""

BY_CALLBACK = {pycurl.E_ABORTED_BY_CALLBACK, pycurl.E_WRITE_ERROR}
NO_ADDRESS = {pycurl.E_URL_MALFORMAT, pycurl.E_UNSUPPORTED_PROTOCOL}


class Stopped(Exception):
    """Another request of the same transport failed; received bytes stay, and the next call resumes."""


class Enough(Exception):
    """Raised by `accept` or `sink` to end a request early."""


class Answer(NamedTuple):
    """The head of a server's answer, before the first byte of content.

    address: after all redirects. headers: by their names in lower case.
    """

    address: str
    status: int
    headers: Mapping[str, str]

    @property
    def host(self) -> str:
        """The host that answered, for people: the address may be signed."""
        return host_of(self.address)

    def problem(self, *statuses: int) -> str | None:
        """Return why the answer is not bytes of a file with one of these statuses; None if it is."""
        if self.status not in statuses:
            return f"{self.host} answers {self.status}"
        if self.headers.get("content-type", "").lower().startswith(("text/html", "application/xhtml")):
            return f"{self.host} sends an HTML page instead of the file (a proxy or a login page?)"
        if self._is_compressed:
            return f"{self.host} sends the file compressed, which was not requested"
        return None

    @property
    def may_pass(self) -> bool:
        """Whether the server may send the file a moment later."""
        return self.status in PASSING_STATUS or self._is_compressed

    @property
    def _is_compressed(self) -> bool:
        return self.headers.get("content-encoding", "identity") != "identity"

    def fault(self, reason: str) -> PassingFault:
        """Return a PassingFault with the wait that the server asks for."""
        return PassingFault(reason, asked_wait(self.headers))


Accept = Callable[[Answer], object]
Sink = Callable[[bytes], object]


class Transport:
    """What all requests of a stage share: connections, counters, and the signal to stop.

    progress: counts the bytes received and kept.
    received: all bytes of content received, also dropped ones.
    """

    def __init__(self, progress: Progress) -> None:
        self.received = 0
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._idle: SimpleQueue[pycurl.Curl | None] = SimpleQueue()
        """Handles, each with its kept connections; created at their first use."""
        for _ in range(CONNECTIONS):
            self._idle.put(None)
        self._proxies = urllib.request.getproxies()
        """By scheme, from the environment, as Python's own library finds them."""

    def get(self, address: str, headers: Mapping[str, str], accept: Accept, sink: Sink) -> None:
        """Request an address, follow redirects, and pass the content to `sink`, block by block.

        accept: called once, before the first block. An exception from it or from `sink` ends the request; Enough ends
        it without an error.

        Raises PassingFault without a complete answer; Refused if redirects do not end or lead to no address; Stopped;
        whatever `accept` and `sink` raise.
        """
        handle = self._idle.get() or _new_handle()
        try:
            if self._proxies:
                handle.setopt(pycurl.PROXY, self._proxy_for(address))
            handle.setopt(pycurl.HTTPHEADER, [f"{name}: {value}" for name, value in headers.items()])
            with suppress(Enough):
                _Request(self, address, accept, sink).perform(handle)
        finally:
            self._idle.put(handle)

    def patiently(self, label: str, attempt: Callable[[], Result], received: Callable[[], int] = int) -> Result:
        """Call `attempt` as `patience.patiently` does, with waits that `stop` ends. Raises Stopped too."""
        return patiently(label, attempt, received, self.pause)

    def count(self, received: int) -> None:
        """Count bytes of content; raises Stopped."""
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self.received += received
            self._progress.advance(received)

    def discount(self, dropped: int) -> None:
        """Subtract bytes from the progress that were dropped or not wanted."""
        with self._lock:
            self._progress.advance(-dropped)

    def pause(self, seconds: float) -> None:
        """Wait. Raises Stopped as soon as `stop` was called."""
        if self._stop.wait(seconds):
            raise Stopped

    def stop(self) -> None:
        """End every request at its next byte, with Stopped."""
        self._stop.set()

    def _proxy_for(self, address: str) -> str:
        """Return the proxy for an address; "" means none to libcurl."""
        if urllib.request.proxy_bypass(host_of(address)):
            return ""
        return self._proxies.get(urlsplit(address).scheme) or self._proxies.get("all", "")


class _Request:
    """One request through libcurl. No exception passes through its C code.

    So an exception of a callback is kept, and raised after libcurl has aborted.
    """

    def __init__(self, transport: Transport, address: str, accept: Accept, sink: Sink) -> None:
        self._transport = transport
        self._address = address
        self._accept = accept
        self._sink = sink
        self._head: list[bytes] = []
        self._accepted = False
        self._raised: BaseException | None = None

    def perform(self, handle: pycurl.Curl) -> None:
        """Make the request. Raises as `Transport.get` does."""
        handle.setopt(pycurl.URL, self._address)
        handle.setopt(pycurl.HEADERFUNCTION, self._head.append)
        handle.setopt(pycurl.WRITEFUNCTION, self._take)
        # Ctrl-C stops the request: libcurl calls this with every block, and at least once a second. Only the main
        # thread gets Ctrl-C; in others it would cost more than all else, since each call has to wait for Python's lock.
        handle.setopt(pycurl.XFERINFOFUNCTION, lambda *_: self._take(b""))
        handle.setopt(pycurl.NOPROGRESS, threading.current_thread() is not threading.main_thread())
        try:
            handle.perform()
        except pycurl.error as error:
            code, text = error.args
            raise self._cause(code, text, handle.getinfo(pycurl.PRIMARY_IP) != "") from None
        if not self._accepted:  # an answer without content
            self._accept(self._answer())

    def _take(self, block: bytes) -> int | None:
        """Pass a block on; returns what tells libcurl to go on or to abort."""
        try:
            if block and not self._accepted:
                self._accept(self._answer())
                self._accepted = True
            self._transport.count(len(block))
            if block:
                self._sink(block)
        except BaseException as error:
            self._raised = error
            return ABORT
        return GO_ON

    def _answer(self) -> Answer:
        """Parse the received heads: those of the redirects, and that of the answer."""
        address, status = self._address, 0
        headers: dict[str, str] = {}
        for line in self._head:
            if first := STATUS_LINE.match(line):
                if "location" in headers and 300 <= status < 400:
                    address = urljoin(address, headers["location"])
                status, headers = int(first[1]), {}
            else:
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.strip().lower()] = value.strip()
        return Answer(address, status, headers)

    def _cause(self, code: int, text: str, connected: bool) -> BaseException:
        host = host_of(self._address)
        if self._raised:
            return self._raised
        # Python handled Ctrl-C while it entered a callback, and has printed it.
        if code in BY_CALLBACK:
            return KeyboardInterrupt()
        if code == pycurl.E_TOO_MANY_REDIRECTS:
            return Refused("refused", f"the redirects of {host} form a loop")
        if code in NO_ADDRESS:
            return Refused("refused", f"{host} is not a valid address, or redirects to an invalid one")
        next_step = AGAIN if connected else NO_CONNECTION
        return PassingFault(f"{host}: {text or f'libcurl fails with {code}'}", next_step=next_step)


def host_of(address: str) -> str:
    """Return the host of an address, for messages."""
    return urlsplit(address).hostname or "the server"


def _new_handle() -> pycurl.Curl:
    """Return a libcurl handle, which makes one request after the other over kept connections."""
    handle = pycurl.Curl()
    for option, value in {
        pycurl.NOSIGNAL: 1,  # there are other threads
        pycurl.BUFFERSIZE: BLOCK_BYTES,
        pycurl.CONNECTTIMEOUT: patience.CONNECT_TIMEOUT,
        pycurl.LOW_SPEED_LIMIT: 1,
        # Averaged over five seconds, so it fires as much later.
        pycurl.LOW_SPEED_TIME: patience.READ_TIMEOUT,
        pycurl.HTTP_VERSION: pycurl.CURL_HTTP_VERSION_1_1,
        pycurl.FOLLOWLOCATION: 1,
        pycurl.MAXREDIRS: REDIRECTS,
        pycurl.PROTOCOLS: pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS,  # no redirect may lead to a local file
        pycurl.REDIR_PROTOCOLS: pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS,
    }.items():
        handle.setopt(option, value)
    # SSL_CERT_FILE and SSL_CERT_DIR, or the system's certificates.
    trusted = ssl.get_default_verify_paths()
    handle.setopt(pycurl.CAINFO, trusted.cafile or certifi.where())
    if trusted.capath:
        handle.setopt(pycurl.CAPATH, trusted.capath)
    return handle


MOST_BYTES = 8_000_000
"""Of an answer, by default."""

OTHER = "see that this is the address of the server that you mean, and not of another program"


def limit_answers(client: httpx.Client, most: int = MOST_BYTES) -> httpx.Client:
    """Return a client that asks for no compression, and reads at most so many bytes of an answer.

    It then raises VlmflowError with the address, as soon as an answer is compressed all the same, or longer.
    """
    client.headers["Accept-Encoding"] = "identity"

    def limit(answer: httpx.Response) -> None:
        address = f"{answer.url.scheme}://{answer.url.netloc.decode()}{answer.url.path}"
        encoding = answer.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise VlmflowError(f"{address}: its answer is compressed, which was not requested", OTHER)
        # For mypy: the client is no asynchronous one.
        assert isinstance(answer.stream, httpx.SyncByteStream)
        answer.stream = _Limited(answer.stream, address, most)

    hooks = client.event_hooks
    client.event_hooks = hooks | {"response": [*hooks.get("response", []), limit]}
    return client


@dataclass(frozen=True)
class _Limited(httpx.SyncByteStream):
    """An answer's bytes up to a limit. address: that of the answer, for the message."""

    stream: httpx.SyncByteStream
    address: str
    most: int

    def __iter__(self) -> Iterator[bytes]:
        left = self.most
        for block in self.stream:
            left -= len(block)
            if left < 0:
                raise VlmflowError(f"{self.address}: its answer has more than {self.most:,} bytes", OTHER)
            yield block

    def close(self) -> None:
        self.stream.close()
