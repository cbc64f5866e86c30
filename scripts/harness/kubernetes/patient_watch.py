"""A look at all Jobs that bears the cluster's bad minutes: what is not known now is looked at again."""

import time
from collections.abc import Callable

from harness.kubernetes.outcome import Outcome
from harness.kubernetes.watch import Watch
from vlmflow.cluster.client import Refused
from vlmflow.core.errors import VlmflowError

BLIND_SECONDS = 300.0
"""How long the API may refuse to show the Jobs (rights taken away, a login that ran out), or show what nobody
understands, before the call ends."""


class PatientWatch:
    """A Watch whose failures are no fault of the Jobs. warn: is told of them."""

    def __init__(self, watch: Watch, warn: Callable[[str], None]) -> None:
        self._watch = watch
        self._warn = warn
        self._blind_since: float | None = None

    def look(self, names: list[str]) -> dict[str, Outcome]:
        """Give the state of these Jobs; nothing where the cluster does not show them now.

        Raises VlmflowError when it has refused to for BLIND_SECONDS.
        """
        try:
            outcomes = self._watch.look(names)
        except Exception as error:
            # Whatever it is, it is no fault of the Jobs; from here it would end the whole call at once.
            self._blind_since = self._blind_since or time.monotonic()
            blind = time.monotonic() - self._blind_since
            away = isinstance(error, Refused) and error.status not in (401, 403)
            why = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            if not away and blind > BLIND_SECONDS:
                what = f"for {blind / 60:.0f} minutes the cluster has not shown the Jobs: {why}"
                next_step = "log in again, or see what `make doctor` says of rights; then run the same command again"
                raise VlmflowError(what, next_step) from None
            self._warn(f"The state of {len(names)} Job(s) is not known: {why}; looking again.")
            return {}
        self._blind_since = None
        return outcomes
