"""Every request for bytes, many at a time, made by libcurl: kept connections, redirects, proxies, certificates.

libcurl, because a request through it takes two fifths of the processor time of one through urllib3, and little of that
under Python's lock: with sixteen threads that lock was what a fetch waited for. obstore, which asks in Rust, is not in
the locks and was not tried: whether it sends If-Range, keeps a token from the host that a redirect names, and hears
Ctrl-C is not known. The hub's API is asked by huggingface_hub (`hub`), with the same patience.
"""

import ssl
import threading
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple, TypeVar
from urllib.parse import urljoin, urlsplit

import certifi
import pycurl

from vlmflow.core.progress import Progress
from vlmflow.web import patience
from vlmflow.web.missing import Refused
from vlmflow.web.patience import AGAIN, NO_CONNECTION, PASSING_STATUS, PassingFault, Patience, asked_wait

Result = TypeVar("Result")

CONNECTIONS = 16
"""Requests at a time: enough to hide 100 ms of latency behind 1 MB pieces at 100 MB/s, and what browsers together ask
of a server without being refused."""

REDIRECTS = 10
BLOCK_BYTES = 1 << 19
"""The most that libcurl takes from a connection at once: each block costs a turn of Python's lock."""

GO_ON, ABORT = None, -1
"""What libcurl's callbacks give; -1 is neither the number of bytes taken nor the 0 that lets a transfer go on."""

BY_CALLBACK = {pycurl.E_ABORTED_BY_CALLBACK, pycurl.E_WRITE_ERROR}
NO_ADDRESS = {pycurl.E_URL_MALFORMAT, pycurl.E_UNSUPPORTED_PROTOCOL}


class Stopped(Exception):
    """Another request of the same transport failed; what is here stays and is resumed next time."""


class Enough(Exception):
    """Raised by those who take an answer, to end a request of which no more is wanted."""


class Answer(NamedTuple):
    """What a server says before the first byte of content.

    address: of the one that answered, where all redirects ended. headers: by their names in lower case.
    """

    address: str
    status: int
    headers: Mapping[str, str]

    @property
    def host(self) -> str:
        """Who answered, for people: an address may be signed."""
        return host_of(self.address)

    def problem(self, *statuses: int) -> str | None:
        """Say what is wrong with it, if it was to be bytes of a file with one of some statuses."""
        if self.status not in statuses:
            return f"{self.host} answers {self.status}"
        if self.headers.get("content-type", "").lower().startswith(("text/html", "application/xhtml")):
            return f"{self.host} gives an HTML page in place of the file (a proxy or a login page?)"
        if self._is_compressed:
            return f"{self.host} gives the file compressed, which was not asked for"
        return None

    @property
    def may_pass(self) -> bool:
        """Whether the server may answer with the file a moment later."""
        return self.status in PASSING_STATUS or self._is_compressed

    @property
    def _is_compressed(self) -> bool:
        return self.headers.get("content-encoding", "identity") != "identity"

    def fault(self, reason: str) -> PassingFault:
        """Give a passing fault, with the wait that the server asks for."""
        return PassingFault(reason, asked_wait(self.headers))


Accept = Callable[[Answer], object]
Sink = Callable[[bytes], object]


class Transport:
    """What all requests of a run share: connections, counters, and the order to stop.

    progress: counts the bytes that are here.
    received: bytes of content that came, in all, also those that had to be dropped.
    """

    def __init__(self, progress: Progress) -> None:
        self.received = 0
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._idle: SimpleQueue[pycurl.Curl | None] = SimpleQueue()
        """Handles, each with the connections it keeps; made when they are first needed."""
        for _ in range(CONNECTIONS):
            self._idle.put(None)
        self._proxies = urllib.request.getproxies()
        """By scheme, as the environment names them for every program in Python."""

    def get(self, address: str, headers: Mapping[str, str], accept: Accept, sink: Sink) -> None:
        """Ask for an address, following redirects, and hand its content to `sink`, block by block.

        accept: called once, before the first block; what it or `sink` raises ends the request, Enough in silence.

        Raises PassingFault where no answer comes, or not all of its content; Refused where redirects lead nowhere;
        Stopped; whatever `accept` and `sink` raise.
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

    def patiently(self, what: str, attempt: Callable[[], Result], received: Callable[[], int] = int) -> Result:
        """Call `attempt` as `Patience.call` does, with waits that end where all is to stop. Raises Stopped too."""
        return Patience(what, self.pause).call(attempt, received)

    def count(self, received: int) -> None:
        """Count bytes of content; raises Stopped."""
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self.received += received
            self._progress.advance(received)

    def discount(self, dropped: int) -> None:
        """Take bytes back from the progress: they had to be dropped, or are no part of what was wanted."""
        with self._lock:
            self._progress.advance(-dropped)

    def pause(self, seconds: float) -> None:
        """Wait, or less where all is to stop: then Stopped is raised."""
        if self._stop.wait(seconds):
            raise Stopped

    def stop(self) -> None:
        """Let every request end at its next byte, with Stopped."""
        self._stop.set()

    def _proxy_for(self, address: str) -> str:
        """Give the proxy for an address; "" for none, as libcurl takes it."""
        if urllib.request.proxy_bypass(host_of(address)):
            return ""
        return self._proxies.get(urlsplit(address).scheme) or self._proxies.get("all", "")


class _Request:
    """One request on its way through libcurl, which calls back through C: no exception passes there.

    So what is raised in a callback is kept, and raised when libcurl has given up for it.
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
        """Make the request. Raises as Transport.get."""
        handle.setopt(pycurl.URL, self._address)
        handle.setopt(pycurl.HEADERFUNCTION, self._head.append)
        handle.setopt(pycurl.WRITEFUNCTION, self._take)
        handle.setopt(pycurl.XFERINFOFUNCTION, self._watch)
        handle.setopt(pycurl.NOPROGRESS, threading.current_thread() is not threading.main_thread())
        try:
            handle.perform()
        except pycurl.error as error:
            connected = handle.getinfo(pycurl.PRIMARY_IP) != ""
            code, text = error.args
            raise self._cause(code, text, connected) from None
        if not self._accepted:  # an answer without content
            self._accept(self._answer())

    def _take(self, block: bytes) -> int | None:
        try:
            if not self._accepted:
                self._accept(self._answer())
                self._accepted = True
            self._transport.count(len(block))
            self._sink(block)
        except BaseException as error:
            self._raised = error
            return ABORT
        return GO_ON

    def _watch(self, *_: int) -> int | None:
        """Called with every block, and once a second where none comes: for Ctrl-C, which the main thread alone hears.

        In other threads it would cost more than all else here: each call waits for its turn of Python's lock.
        """
        try:
            self._transport.count(0)
        except BaseException as error:
            self._raised = error
            return ABORT
        return GO_ON

    def _answer(self) -> Answer:
        """Read the lines of all heads that came: of the redirects, and of the answer."""
        address, status = self._address, 0
        headers: dict[str, str] = {}
        for line in self._head:
            if line.startswith(b"HTTP/"):
                if "location" in headers and 300 <= status < 400:
                    address = urljoin(address, headers["location"])
                status, headers = int(line.split()[1]), {}
            else:
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.strip().lower()] = value.strip()
        return Answer(address, status, headers)

    def _cause(self, code: int, text: str, connected: bool) -> BaseException:
        host = host_of(self._address)
        if self._raised:
            return self._raised
        if code in BY_CALLBACK:  # Python came to its handler of Ctrl-C on the way into a callback, and printed it
            return KeyboardInterrupt()
        if code == pycurl.E_TOO_MANY_REDIRECTS:
            return Refused("refused", f"the redirects of {host} go in a circle")
        if code in NO_ADDRESS:
            return Refused("refused", f"{host} is, or redirects to, what is no address")
        next_step = AGAIN if connected else NO_CONNECTION
        return PassingFault(f"{host}: {text or f'libcurl fails with {code}'}", next_step=next_step)


def host_of(address: str) -> str:
    """Give the host of an address, for messages."""
    return urlsplit(address).hostname or "the server"


def _new_handle() -> pycurl.Curl:
    """Give what makes one request after the other, over connections that it keeps."""
    handle = pycurl.Curl()
    for option, value in {
        pycurl.NOSIGNAL: 1,  # there are other threads
        pycurl.BUFFERSIZE: BLOCK_BYTES,
        pycurl.CONNECTTIMEOUT: patience.CONNECT_TIMEOUT,
        pycurl.LOW_SPEED_LIMIT: 1,
        pycurl.LOW_SPEED_TIME: patience.READ_TIMEOUT,  # of the last five seconds: it notices by as many later
        pycurl.HTTP_VERSION: pycurl.CURL_HTTP_VERSION_1_1,
        pycurl.FOLLOWLOCATION: 1,
        pycurl.MAXREDIRS: REDIRECTS,
        pycurl.PROTOCOLS: pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS,  # no redirect leads to a file of this machine
        pycurl.REDIR_PROTOCOLS: pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS,
    }.items():
        handle.setopt(option, value)
    trusted = ssl.get_default_verify_paths()  # SSL_CERT_FILE and SSL_CERT_DIR, or where the system has them
    handle.setopt(pycurl.CAINFO, trusted.cafile or certifi.where())
    if trusted.capath:
        handle.setopt(pycurl.CAPATH, trusted.capath)
    return handle
