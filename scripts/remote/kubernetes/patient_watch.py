"""Looks at all Jobs and tolerates minutes in which the cluster fails: it looks again later."""

import time
from collections.abc import Callable

from remote.cluster.client import Refused
from remote.kubernetes.outcome import Outcome
from remote.kubernetes.watch import Watch
from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import counted

BLIND_SECONDS = 300.0
"""How long the API may refuse to show the Jobs (missing rights, an expired login), or answer with what the code does
not understand, before the run ends."""


class PatientWatch:
    """A Watch whose own failures do not fail Jobs. warn: prints them."""

    def __init__(self, watch: Watch, warn: Callable[[str], None]) -> None:
        self._watch = watch
        self._warn = warn
        self._blind_since: float | None = None

    def look(self, names: list[str]) -> dict[str, Outcome]:
        """Return the state of these Jobs; {} if the cluster does not show them now.

        Raises VlmflowError if it has not shown them for BLIND_SECONDS, other than by being unreachable.
        """
        try:
            outcomes = self._watch.look(names)
        except Exception as error:
            # No error here is the Jobs' fault, and each would end the whole run at once.
            self._blind_since = self._blind_since or time.monotonic()
            blind = time.monotonic() - self._blind_since
            away = isinstance(error, Refused) and error.status not in (401, 403)
            why = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            if not away and blind > BLIND_SECONDS:
                what = f"the cluster has not shown the Jobs for {blind / 60:.0f} minutes: {why}"
                next_step = "log in again, or check your rights with `make doctor`; then run the same command again"
                raise VlmflowError(what, next_step) from None
            self._warn(f"Unknown: the state of {counted(len(names), 'Job')}: {why}; looking again.")
            return {}
        self._blind_since = None
        return outcomes
