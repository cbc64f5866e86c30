"""Retries of requests: which failures are temporary, how long and how often to retry, and when to fail.

The hub's API, downloads, ranges and single pictures share these rules. A permanent refusal is not retried: it is a
VlmflowError, or `missing.Refused`.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from vlmflow.core.errors import PassingError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
"""HTTP status codes of temporary failures."""

CONNECT_TIMEOUT = 30
READ_TIMEOUT = 60
"""Seconds without a connection, or without a byte, after which an attempt fails and is retried."""

TRIES = 8
"""Failures in a row after which the work fails."""

PROGRESS_BYTES = 1 << 20
"""New bytes that end a row of failures: a connection that breaks but delivers is retried without limit; one that
trickles is given up."""

FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
"""Seconds before the second attempt, doubled before each further one up to the longest."""

TOLD_WAIT = 4
"""A wait of at least so many first waits is reported as a warning: from the third one on, or if a server asks for it.
Shorter ones are not: a server that breaks 1 % of its answers would cause a line for every hundredth picture."""

LONGEST_ASKED_WAIT = 600.0
"""Seconds that a server may ask us to wait (Retry-After); the hub's rate limits reset within 300."""

AGAIN = "run the same command again later: it resumes where it stopped"

NO_CONNECTION = f"check this machine's network and proxy (HTTPS_PROXY, HTTP_PROXY), then {AGAIN}"
"""The next step if a server could not be reached at all."""


class PassingFault(Exception):
    """A temporary failure.

    reason: what happened, with the host but without the address, which may be signed.
    asked_wait: seconds that the server asks us to wait, or None.
    next_step: what to do if it persists.
    """

    def __init__(self, reason: str, asked_wait: float | None = None, next_step: str = AGAIN) -> None:
        super().__init__(reason)
        self.reason = reason
        self.asked_wait = asked_wait
        self.next_step = next_step


STOPPED = 15.0
"""Seconds between two looks of a loop after which it was not running itself; each looks several times a second."""


class Waiting:
    """How long this process has waited, for a loop that asks often; it counts anew after it was stopped itself.

    Then what it waits for was stopped, too, or could not be seen (scontrol suspend, SIGSTOP, a paused machine).
    """

    def __init__(self) -> None:
        """Begin now."""
        self.begin()

    def begin(self) -> None:
        """Begin again."""
        self._since = self._asked = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the beginning, or since this process goes on."""
        now = time.monotonic()
        if now - self._asked > STOPPED:
            self._since = now
        self._asked = now
        return now - self._since


class RunningTime:
    """The seconds that this process has run since it began; while it was stopped itself, they do not grow."""

    def __init__(self) -> None:
        """Begin now, and look every second until `close`."""
        self._lock, self._closed = threading.RLock(), threading.Event()  # a signal's handler may ask within `seconds`
        self._seconds, self._looked = 0.0, time.monotonic()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self._closed.wait(1):
            self.seconds()

    def seconds(self) -> float:
        """Return the seconds so far."""
        with self._lock:
            now = time.monotonic()
            passed, self._looked = now - self._looked, now
            self._seconds += passed if passed <= STOPPED else 0.0
            return self._seconds

    def close(self) -> float:
        """Look no longer; return the seconds so far."""
        self._closed.set()
        return self.seconds()


def patiently(
    label: str,
    attempt: Callable[[], Result],
    received: Callable[[], int] = int,
    pause: Callable[[float], object] = time.sleep,
) -> Result:
    """Return the result of `attempt`, retried after each PassingFault.

    label: the work, for people. received: returns the bytes received so far; PROGRESS_BYTES more than ever before end a
    row of failures. pause: waits the given seconds.

    Raises PassingError after the last failure, or if a server asks to wait longer than LONGEST_ASKED_WAIT; whatever
    else the attempt raises.
    """
    furthest, failures = received(), 0
    while True:
        try:
            return attempt()
        except PassingFault as fault:
            if received() >= furthest + PROGRESS_BYTES:
                furthest, failures = received(), 0
            failures += 1
            if failures == TRIES:
                raise PassingError(f"{label}: {fault.reason}, {TRIES} times in a row", fault.next_step) from None
            wait = fault.asked_wait or 0.0
            if wait > LONGEST_ASKED_WAIT:
                raise PassingError(
                    f"{label}: {fault.reason}, and the server asks to wait {wait:,.0f} s",
                    "run the same command again after that time; a token (HF_TOKEN) raises the limits",
                ) from None
            seconds = max(wait, min(LONGEST_WAIT, FIRST_WAIT * 2 ** (failures - 1)))
            level = logging.WARNING if seconds >= TOLD_WAIT * FIRST_WAIT else logging.DEBUG
            logger.log(level, "%s: %s; trying again in %.0f s", label, fault.reason, seconds)
            pause(seconds)


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait, by the hub's RateLimit or by Retry-After; None if it does not."""
    from huggingface_hub.utils import parse_ratelimit_headers  # it takes a tenth of a second

    try:
        limit = parse_ratelimit_headers(headers)
        if limit is not None and limit.remaining == 0:
            return float(limit.reset_in_seconds)
        value = headers.get("retry-after", "").strip()
        if value.isdecimal():
            return float(value)
        # By the server's own clock, if its answer has it: ours may be wrong, or jump.
        now = parsedate_to_datetime(headers["date"]) if "date" in headers else datetime.now(UTC)
        return max(0.0, (parsedate_to_datetime(value) - now).total_seconds())
    except (TypeError, ValueError, OverflowError):
        return None
