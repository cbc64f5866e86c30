"""The API server: which cluster, how long to try again and after which answers, and its objects as plain JSON.

The executor, `vlmflow status` and `vlmflow doctor` all use it; they differ only in how long they try again.
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
import msgspec
import urllib3
from kubernetes.client.rest import ApiException, RESTClientObject

from vlmflow.remote.library import VlmflowError

Object = dict[str, Any]
"""A Kubernetes object as in its JSON."""

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

LOG_TIMEOUT = (5, 10)
"""The same for a log: the API server asks the pod's node, which may be lost."""

LOG_READ, LOG_KEPT = 32 << 20, 1 << 20
"""The most bytes of a log that are read, and that are kept of their end: a line may have any length."""

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
            reason = " ".join(str(error.reason).split())
            return cls(0, f"no answer from the API server: TLS failed: {reason}", for_now=for_now)
        try:
            status = json.loads(error.body)  # the API's Status object, or a proxy's page
        except (TypeError, ValueError, RecursionError):
            status = {}
        status = status if isinstance(status, dict) else {}
        word = str(status.get("reason", ""))
        # A Conflict on a request that names no version of its object comes from another request: both changed one
        # quota, and the server refused this one without doing anything.
        for_now = error.status in FOR_NOW or word == "Conflict"
        refused = cls(error.status, str(status.get("message") or error.reason), word, for_now)
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
        # The next look finds the Job, or it is created again.
        if method == "POST" and url.endswith(CREATED):
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
                seconds = (refused.headers or {}).get("Retry-After", "")
                if seconds.isdecimal():
                    time.sleep(min(max(float(seconds), FIRST_PAUSE), 60.0))
                else:
                    time.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311
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
        # A proxy's may have no zone, or any year.
        with suppress(ValueError, TypeError, OverflowError):
            self._ahead = parsedate_to_datetime(headers.get("Date", "")) - datetime.now(UTC)

    def _passing(self, refused: Refused) -> bool:
        if refused.status in WAKING:
            return self._well_since > 0 and time.monotonic() - self._well_since < WAKING_SECONDS
        return refused.for_now


def _short(error: Exception) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}" if error.status else "TLS failed"
    return type(error).__name__


class Api:
    """The cluster's API and one of its namespaces. Every call raises Refused if it fails.

    client: from `connect`; it decides on cluster, rights and retries.
    resource: for example `secrets`, `apps/v1/deployments`.
    """

    def __init__(self, client: kubernetes.client.ApiClient, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    def now(self) -> datetime:
        """Return the time of the API server's clock, which also sets its timestamps."""
        now: datetime = self.client.rest_client.now()
        return now

    def call(self, method: str, path: str, body: Object | None = None, form: Any = None, **query: str) -> Any:
        """Make one call and return the parsed answer. path: below the server's address.

        form: a msgspec type of the answer; only its keys are read, or all if the answer has another form.
        """
        text = self._send(method, path, body, query).data
        if form is not None:
            with suppress(msgspec.DecodeError, RecursionError):
                return msgspec.json.decode(text, type=form)
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Refused(0, f"the answer to {method} {path} is not JSON ({error}): {text[:200]!r}") from None

    def get_path(self, path: str) -> Any:
        """Return what is at a path below the server's address, or None if there is nothing."""
        try:
            return self.call("GET", path)
        except Refused as refused:
            if refused.status != 404:
                raise
            return None

    def get(self, resource: str, name: str) -> Object | None:
        """Return an object of the namespace, or None if it does not exist."""
        stored: Object | None = self.get_path(f"{self._path(resource)}/{name}")
        return stored

    def list(self, resource: str, selector: str = "", fields: str = "", form: Any = None) -> list[Object]:
        """Return the objects of a resource. selector: by labels. fields: a field selector. form: as in `call`."""
        query = {name: words for name, words in (("labelSelector", selector), ("fieldSelector", fields)) if words}
        path = self._path(resource)
        answer: Object = self.call("GET", path, None, form, **query)
        items = answer.get("items") if isinstance(answer, dict) else None
        if not isinstance(items, list):
            raise Refused(0, f"the answer to GET {path} is no list of objects: {str(answer)[:200]}")
        return items

    def create(self, resource: str, body: Object) -> None:
        """Create an object. An existing one of its name is the same object, created by a try whose answer was lost."""
        try:
            self.call("POST", self._path(resource), body)
        except Refused as refused:
            if refused.word != "AlreadyExists":
                raise

    def delete(self, resource: str, name: str, propagation: str = "Background") -> None:
        """Delete an object and its dependents, if it exists.

        propagation: Foreground to keep the object until its dependents are gone.
        """
        try:
            self.call("DELETE", f"{self._path(resource)}/{name}", {"propagationPolicy": propagation})
        except Refused as refused:
            if refused.status != 404:
                raise

    def log(self, pod: str, container: str, lines: int | None = None) -> str:
        """Return the end of a pod's log, at most LOG_KEPT bytes. lines: only so many of its last lines."""
        query = {"container": container, "limitBytes": str(LOG_READ)} | ({"tailLines": str(lines)} if lines else {})
        answer = self._send("GET", f"{self._path('pods')}/{pod}/log", None, query, stream=True)
        kept = bytearray()
        try:
            for part in answer.stream(1 << 16):
                kept += part
                del kept[:-LOG_KEPT]
        except urllib3.exceptions.HTTPError as error:
            raise Refused.of(error) from error
        return kept.decode(errors="replace")

    def _path(self, resource: str) -> str:
        group, _, plural = resource.rpartition("/")
        return f"/{'apis/' + group if group else 'api/v1'}/namespaces/{self.namespace}/{plural}"

    def _send(self, method: str, path: str, body: Object | None, query: dict[str, str], stream: bool = False) -> Any:
        """Send one request without the client's own methods, which would parse a log that happens to be JSON."""
        headers = {**self.client.default_headers, "Content-Type": "application/json"}
        headers["Accept"] = "*/*" if stream else "application/json"
        parameters = list(query.items())
        self.client.update_params_for_auth(headers, parameters, ["BearerToken"])
        return self.client.request(
            method,
            self.client.configuration.host + path,
            query_params=parameters,
            headers=headers,
            body=body,
            _preload_content=not stream,
            _request_timeout=LOG_TIMEOUT if stream else None,
        )
