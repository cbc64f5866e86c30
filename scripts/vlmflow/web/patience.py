"""How patient every request is: what may pass, how long and how often it is tried, and when it is given up.

The hub's API, downloads, ranges and single pictures share it. What a server refuses for good is no matter of patience:
it is a VlmflowError, or `missing.Refused`.
"""

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from huggingface_hub.utils import parse_ratelimit_headers

from vlmflow.core.errors import PassingError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
"""HTTP answers that may be others a moment later."""

CONNECT_TIMEOUT = 30
READ_TIMEOUT = 60
"""Seconds without a connection, or without a byte, after which an attempt is given up and made anew."""

TRIES = 8
"""Failures in a row after which an attempt is given up."""

PROGRESS_BYTES = 1 << 20
"""New bytes that end a row of failures: a connection that breaks but delivers is tried again without end; one that
trickles is given up."""

FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
"""Seconds before the second attempt, doubled before each further one up to the longest."""

TOLD_WAIT = 4
"""First waits from which on a wait is reported as a warning: that before the fourth attempt, and what a server asks
for. Of shorter ones a server that breaks a hundredth of its answers would make a line for every hundredth picture."""

LONGEST_ASKED_WAIT = 600.0
"""Seconds that a server may ask us to wait (Retry-After); the hub's rate limits reset within 300."""

AGAIN = "run the same command again later: it resumes where it stopped"

NO_CONNECTION = f"check this machine's network and proxy (HTTPS_PROXY, HTTP_PROXY), then {AGAIN}"
"""What to do where a server could not be reached at all."""


class PassingFault(Exception):
    """A failure that may be gone a moment later.

    reason: what happened, with the host but without the address: that one may be signed.
    asked_wait: seconds that the server asks us to wait, where it does.
    next_step: what to do where it does not pass.
    """

    def __init__(self, reason: str, asked_wait: float | None = None, next_step: str = AGAIN) -> None:
        super().__init__(reason)
        self.reason = reason
        self.asked_wait = asked_wait
        self.next_step = next_step


class Patience:
    """Counts the failures in a row of one piece of work and waits between its attempts.

    what: the work, for people.
    pause: waits so many seconds.
    """

    def __init__(self, what: str, pause: Callable[[float], object] = time.sleep) -> None:
        self.what = what
        self._pause = pause
        self._failures = 0

    def call(self, attempt: Callable[[], Result], received: Callable[[], int] = int) -> Result:
        """Give what `attempt` gives, tried again after each PassingFault.

        received: gives the bytes that are here by now; PROGRESS_BYTES more than ever before end a row of failures.

        Raises VlmflowError when it is given up, and whatever else the attempt raises.
        """
        furthest = received()
        while True:
            try:
                return attempt()
            except PassingFault as fault:
                if received() >= furthest + PROGRESS_BYTES:
                    furthest = received()
                    self._failures = 0
                self.wait(fault)

    def wait(self, fault: PassingFault) -> None:
        """Wait after a failed attempt.

        Raises VlmflowError where it was the last one, or where the server asks for more than can be waited.
        """
        self._failures += 1
        if self._failures == TRIES:
            raise PassingError(f"{self.what}: {fault.reason}, {TRIES} times in a row", fault.next_step)
        seconds = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (self._failures - 1))
        if fault.asked_wait is not None:
            if fault.asked_wait > LONGEST_ASKED_WAIT:
                raise PassingError(
                    f"{self.what}: {fault.reason}, and the server asks to wait {fault.asked_wait:,.0f} s",
                    "run the same command again after that time; a token (HF_TOKEN) widens the limits",
                )
            seconds = max(seconds, fault.asked_wait)
        level = logging.WARNING if seconds >= TOLD_WAIT * FIRST_WAIT else logging.DEBUG
        logger.log(level, "%s: %s; trying again in %.0f s", self.what, fault.reason, seconds)
        self._pause(seconds)


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Give the seconds that a refusing server asks to wait, by the hub's RateLimit or by Retry-After."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        # By the server's own clock where it tells it: ours may be wrong, or jump.
        now = parsedate_to_datetime(headers["date"]) if "date" in headers else datetime.now(UTC)
        return max(0.0, (parsedate_to_datetime(value) - now).total_seconds())
    except (TypeError, ValueError):
        return None
