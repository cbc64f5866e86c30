"""The connection to the API server: which cluster, how long to retry, and after which answers.

The executor, `make status` and `make doctor` all use it; they differ only in how long they retry.
"""

import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import kubernetes
import urllib3
from kubernetes.client.rest import ApiException, RESTClientObject

from vlmflow.core.errors import VlmflowError

PATIENCE = 600.0
"""Seconds for which a call is retried while the server is unreachable or refuses temporarily."""

CREATE_PATIENCE = 60.0
"""Seconds for which the creation of a Job is retried: meanwhile the other Jobs are not watched."""

CREATED = ("/jobs", "/pytorchjobs", "/trainjobs", "/trainingruntimes")
"""The ends of the addresses for that; an operator whose webhook is away refuses for a while, too."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds between two tries, doubled each time, unless the server sets them."""

TOLD_AFTER = 3
"""Failures in a row before they are reported: a single one is normal."""

TIMEOUT = (5, 60)
"""Seconds to connect, and to wait for an answer: a server that hangs counts as unreachable."""

FOR_NOW = {408, 429, 500, 502, 503, 504}
"""Status codes of a temporary refusal."""

WAKING = {401, 403}
"""Status codes of a server that has just started and has not read its accounts and roles yet."""

WAKING_SECONDS = 15.0


class Refused(ApiException):
    """The API server refused a call, or could not be reached. Its text is the reason with the status.

    status: of HTTP, 0 without an answer. word: the API's own reason (AlreadyExists, Forbidden, Invalid), or "".
    why: the server's message. for_now: whether the same call may succeed later. It derives from the client's own
    exception, which upstream's executor catches.
    """

    def __init__(self, status: int, why: str, word: str = "", for_now: bool = False) -> None:
        super().__init__(status=status)
        self.word = word
        self.why = why
        self.for_now = for_now

    def __str__(self) -> str:
        """Return the server's message, with the status if there was an answer."""
        return f"{self.why} ({self.status})" if self.status else self.why

    @classmethod
    def of(cls, error: Exception) -> "Refused":
        """Convert an exception of the client or of urllib3."""
        if not isinstance(error, ApiException):
            return cls(0, f"no answer from the API server: {type(error).__name__}: {error}", for_now=True)
        if not error.status:  # the client reports a TLS failure without a status
            for_now = "CERTIFICATE_VERIFY_FAILED" not in str(error.reason)
            said = " ".join(str(error.reason).split())
            return cls(0, f"no answer from the API server: TLS failed: {said}", for_now=for_now)
        status = _status_of(error)
        word = str(status.get("reason", ""))
        # A Conflict on a request that names no version of its object comes from another request: both changed one
        # quota, and the server refused this one without doing anything.
        refused = cls(
            error.status,
            str(status.get("message") or error.reason),
            word,
            error.status in FOR_NOW or word == "Conflict",
        )
        refused.reason, refused.body, refused.headers = error.reason, error.body, error.headers
        return refused


def connect(say: Callable[[str], None], patience: float = PATIENCE) -> kubernetes.client.ApiClient:
    """Return a client of the cluster that the kubeconfig names, or of the one that this pod runs in.

    say: prints when the server stops answering, and when it answers again. patience: seconds of retries.
    Raises VlmflowError without a kubeconfig outside of a pod.
    """
    configuration = kubernetes.client.Configuration()
    try:
        kubernetes.config.load_kube_config(client_configuration=configuration)
    except kubernetes.config.ConfigException as no_file:
        try:
            kubernetes.config.load_incluster_config(client_configuration=configuration)
        except kubernetes.config.ConfigException:
            raise VlmflowError(
                f"no Kubernetes cluster is configured: {no_file}",
                "set KUBECONFIG to the cluster's kubeconfig file, or run this in the controller pod "
                "(docs/kubernetes.md)",
            ) from None
    return client_of(configuration, say, patience)


def client_of(
    configuration: kubernetes.client.Configuration, say: Callable[[str], None], patience: float
) -> kubernetes.client.ApiClient:
    """Return a client of a configured cluster. say, patience: as in `connect`."""
    configuration.retries = False
    client = kubernetes.client.ApiClient(configuration)
    client.rest_client = PatientRest(configuration, say, patience)
    return client


class PatientRest(RESTClientObject):
    """The client's transport: retries temporary failures for `patience` seconds.

    An interrupted create may have succeeded. Its second try then answers 409 AlreadyExists, which the caller must
    handle.
    """

    def __init__(self, configuration: Any, say: Callable[[str], None], patience: float) -> None:
        super().__init__(configuration, pools_size=4, maxsize=4)
        self._say = say
        self._patience = patience
        self._well_since = 0.0
        self._ahead = timedelta(0)

    def now(self) -> datetime:
        """Return the time of the server's clock, from its last answer: ours may differ by minutes."""
        return datetime.now(UTC) + self._ahead

    def request(self, method: str, url: str, **options: Any) -> Any:
        """Send one request. Raises Refused with the last failure."""
        options["_request_timeout"] = options.get("_request_timeout") or TIMEOUT
        # The log of a lost node gives 500 as long as the node is lost, and no decision depends on a log.
        patience = 0.0 if url.endswith("/log") else self._patience
        if method == "POST" and url.endswith(CREATED):  # the next look finds the Job, or it is created again
            patience = min(patience, CREATE_PATIENCE)
        begun, pause, failures = time.monotonic(), FIRST_PAUSE, 0
        while True:
            try:
                answer = super().request(method, url, **options)
            except (ApiException, urllib3.exceptions.HTTPError) as error:
                refused = Refused.of(error)
                if not self._passing(refused) or time.monotonic() - begun > patience:
                    raise refused from error
                failures += 1
                if failures == TOLD_AFTER:
                    self._say(f"The API server fails ({_short(error)}); trying again.")
                asked = _retry_after(refused)
                time.sleep(asked if asked is not None else pause * random.uniform(0.8, 1.2))  # noqa: S311
                pause = min(pause * 2, LONGEST_PAUSE)
                self._well_since = time.monotonic()
            else:
                self._read_clock(answer)
                if failures >= TOLD_AFTER:
                    self._say(f"The API server answers again, after {time.monotonic() - begun:.0f} s.")
                return answer

    def _read_clock(self, answer: Any) -> None:
        """Read the server's time from the header Date (RFC 9110, 6.6.1), which has whole seconds."""
        headers = getattr(answer, "urllib3_response", answer).headers
        with suppress(ValueError, TypeError, OverflowError):  # a proxy's may have no zone, or any year
            self._ahead = parsedate_to_datetime(headers.get("Date", "")) - datetime.now(UTC)

    def _passing(self, refused: Refused) -> bool:
        if refused.status in WAKING:
            return self._well_since > 0 and time.monotonic() - self._well_since < WAKING_SECONDS
        return refused.for_now


def _retry_after(refused: Refused) -> float | None:
    seconds = (refused.headers or {}).get("Retry-After", "")
    return min(max(float(seconds), FIRST_PAUSE), 60.0) if seconds.isdecimal() else None


def _short(error: Exception) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}" if error.status else "TLS failed"
    return type(error).__name__


def _status_of(error: ApiException) -> dict[str, Any]:
    """Return the API's Status object; {} for another answer, such as a proxy's."""
    try:
        status = json.loads(error.body)
    except (TypeError, ValueError, RecursionError):
        return {}
    return status if isinstance(status, dict) else {}
