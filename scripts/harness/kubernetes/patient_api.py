"""A client of the API server that outlives the server's bad minutes."""

import random
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import kubernetes
import msgspec
import urllib3
from kubernetes.client.rest import ApiException, RESTClientObject

from harness.kubernetes.namespace import reason_of
from vlmflow.core.errors import VlmflowError

PATIENCE = 600.0
"""Seconds for which a call is tried again while the server is away or refuses for now."""

CREATE_PATIENCE = 60.0
"""The same for the creation of a Job: meanwhile nobody looks at the others."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds between two tries, doubled each time, where the server does not say how long."""

TOLD_AFTER = 3
"""Failures in a row before a person hears of it: one is nothing."""

TIMEOUT = (5, 60)
"""Seconds to connect, and to wait for an answer: a server that hangs is one that is away."""

FOR_NOW = {429, 500, 502, 503, 504}
"""Status codes that mean: not now."""

WAKING = {401, 403}
"""Status codes of a server that has just begun and has not read its accounts and roles yet."""

WAKING_SECONDS = 15.0


def connect(say: Callable[[str], None], patience: float = PATIENCE) -> kubernetes.client.ApiClient:
    """Give a client of the cluster that the kubeconfig names, or of the one that this pod runs in.

    say: is told when the server does not answer, and when it does again.
    Raises VlmflowError where there is neither.
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
    configuration.retries = False
    client = QuickClient(configuration)
    client.rest_client = PatientRest(configuration, say, patience)
    return client


class QuickClient(kubernetes.client.ApiClient):
    """The client, which can read parts of an answer alone (answers.py)."""

    def deserialize(self, response: Any, response_type: Any) -> Any:
        """Give an answer as a type of `answers` has it; all of it, where it is of another form."""
        if isinstance(response_type, str):
            return super().deserialize(response, response_type)
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(response.data, type=response_type)
        return super().deserialize(response, "object")


class PatientRest(RESTClientObject):
    """The client's transport: tries again what fails for now, and gives up after `patience` seconds.

    A create that was cut off may have been done: its second try then answers 409 AlreadyExists, which the
    caller has to know how to take.
    """

    def __init__(self, configuration: Any, say: Callable[[str], None], patience: float = PATIENCE) -> None:
        super().__init__(configuration, pools_size=4, maxsize=4)
        self._say = say
        self._patience = patience
        self._well_since = 0.0
        self._ahead = timedelta(0)

    def now(self) -> datetime:
        """Give the time by the server's clock, as its last answer had it: ours may be minutes away from it."""
        return datetime.now(UTC) + self._ahead

    def request(self, method: str, url: str, **options: Any) -> Any:
        """Send one request. Raises ApiException or urllib3's HTTPError with the last failure."""
        options["_request_timeout"] = options.get("_request_timeout") or TIMEOUT
        # A lost node's log is answered by 500 for as long as the node is lost, and nothing hangs on a log.
        patience = 0.0 if url.endswith("/log") else self._patience
        if method == "POST" and url.endswith("/jobs"):  # whether it was made is looked at, and if not, it is made again
            patience = min(patience, CREATE_PATIENCE)
        begun, pause, failures = time.monotonic(), FIRST_PAUSE, 0
        while True:
            try:
                answer = super().request(method, url, **options)
            except (ApiException, urllib3.exceptions.HTTPError) as error:
                if not self._passing(error) or time.monotonic() - begun > patience:
                    raise
                failures += 1
                if failures == TOLD_AFTER:
                    self._say(f"The API server does not do its work ({_words(error)}); trying again.")
                asked = _retry_after(error)
                time.sleep(asked if asked is not None else pause * random.uniform(0.8, 1.2))  # noqa: S311
                pause = min(pause * 2, LONGEST_PAUSE)
                self._well_since = time.monotonic()
            else:
                self._read_clock(answer)
                if failures >= TOLD_AFTER:
                    self._say(f"The API server answers again, after {time.monotonic() - begun:.0f} s.")
                return answer

    def _read_clock(self, answer: Any) -> None:
        """Read the Date that HTTP servers answer with (RFC 9110, 6.6.1), in whole seconds."""
        headers = getattr(answer, "urllib3_response", answer).headers
        with suppress(ValueError):
            self._ahead = parsedate_to_datetime(headers.get("Date", "")) - datetime.now(UTC)

    def _passing(self, error: Exception) -> bool:
        if not isinstance(error, ApiException):
            return not isinstance(error.__cause__, ssl.SSLCertVerificationError)
        if error.status in WAKING:
            return self._well_since > 0 and time.monotonic() - self._well_since < WAKING_SECONDS
        if error.status == 0:  # the client's way to say that TLS failed
            return "CERTIFICATE_VERIFY_FAILED" not in str(error.reason)
        # A Conflict, for requests that name no version of what they change, is another request's fault: the server
        # gave up counting this one into a quota that the other's changed meanwhile, and did nothing.
        return error.status in FOR_NOW or reason_of(error) == "Conflict"


def _retry_after(error: Exception) -> float | None:
    seconds = (getattr(error, "headers", None) or {}).get("Retry-After", "")
    return min(max(float(seconds), FIRST_PAUSE), 60.0) if seconds.isdigit() else None


def _words(error: Exception) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}" if error.status else "TLS failed"
    return type(error).__name__
