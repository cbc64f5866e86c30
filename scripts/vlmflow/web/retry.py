"""Trying again what a network may refuse for a moment: so many times, and with longer and longer waits."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from vlmflow.core.errors import PassingError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

TRIES = 8
"""Failures in a row after which an attempt is given up."""

FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
"""Seconds before the second attempt, doubled before each further one up to the longest."""

TOLD_WAIT = 4
"""First waits from which on a wait is told to people: that before the fourth attempt, and what a server asks for. Of
shorter ones a server that breaks a hundredth of its answers would make a line for every hundredth picture."""

LONGEST_ASKED_WAIT = 600.0
"""Seconds that a server may ask us to wait (Retry-After); the hub's rate limits reset within 300."""

AGAIN = "run the same command again later: it goes on where it stopped"

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

    def progressed(self) -> None:
        """Begin to count anew: the last attempt got further."""
        self._failures = 0

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


def retrying(what: str, attempt: Callable[[], Result]) -> Result:
    """Give what `attempt` gives, tried again after each PassingFault.

    Raises VlmflowError when it is given up, and whatever else the attempt raises.
    """
    patience = Patience(what)
    while True:
        try:
            return attempt()
        except PassingFault as fault:
            patience.wait(fault)
