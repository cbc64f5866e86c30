"""The API server as plain JSON: takes kinds and names, returns objects as dictionaries in the API's own form."""

from contextlib import suppress
from datetime import datetime
from typing import Any

import kubernetes
import msgspec
import urllib3

from vlmflow.remote.cluster.client import Refused

Object = dict[str, Any]
"""A Kubernetes object as in its JSON."""

LOG_TIMEOUT = (5, 10)
"""Seconds to connect, and to wait for a log: the API server asks the pod's node, which may be lost."""

LOG_READ, LOG_KEPT = 32 << 20, 1 << 20
"""The most bytes of a log that are read, and that are kept of their end: a line may have any length."""


class Api:
    """The cluster's API and one of its namespaces. Every call raises Refused if it fails.

    client: from `remote.cluster.client`; it decides on cluster, rights and retries.
    kind: for example `secrets`, `apps/v1/deployments`.
    """

    def __init__(self, client: kubernetes.client.ApiClient, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    def now(self) -> datetime:
        """Return the time of the API server's clock, which also sets its timestamps."""
        now: datetime = self.client.rest_client.now()
        return now

    def call(self, method: str, path: str, body: Object | None = None, answer: Any = None, **query: str) -> Any:
        """Make one call and return the parsed answer. path: below the server's address.

        answer: a msgspec type; only its keys are read, or all if the answer has another form.
        """
        text = self._send(method, path, body, query).data
        if answer is not None:
            with suppress(msgspec.DecodeError, RecursionError):
                return msgspec.json.decode(text, type=answer)
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Refused(0, f"the answer to {method} {path} is not JSON ({error}): {text[:200]!r}") from None

    def get(self, kind: str, name: str) -> Object | None:
        """Return an object of the namespace, or None if it does not exist."""
        try:
            found: Object = self.call("GET", f"{self._path(kind)}/{name}")
            return found
        except Refused as refused:
            if refused.status != 404:
                raise
            return None

    def list(self, kind: str, selector: str = "", fields: str = "", answer: Any = None) -> list[Object]:
        """Return the objects of a kind. selector: by labels. fields: a field selector. answer: as in `call`."""
        query = {name: words for name, words in (("labelSelector", selector), ("fieldSelector", fields)) if words}
        found: Object = self.call("GET", self._path(kind), None, answer, **query)
        items = found.get("items") if isinstance(found, dict) else None
        if not isinstance(items, list):
            raise Refused(0, f"the answer to GET {self._path(kind)} is no list of objects: {str(found)[:200]}")
        return items

    def create(self, kind: str, body: Object) -> None:
        """Create an object. An existing one of its name is the same object, created by a try whose answer was lost."""
        try:
            self.call("POST", self._path(kind), body)
        except Refused as refused:
            if refused.word != "AlreadyExists":
                raise

    def delete(self, kind: str, name: str, propagation: str = "Background") -> None:
        """Delete an object and its dependents, if it exists.

        propagation: Foreground to keep the object until its dependents are gone.
        """
        try:
            self.call("DELETE", f"{self._path(kind)}/{name}", {"propagationPolicy": propagation})
        except Refused as refused:
            if refused.status != 404:
                raise

    def log(self, pod: str, container: str, lines: int | None = None) -> str:
        """Return the end of a pod's log, at most LOG_KEPT bytes. lines: only so many of its last lines."""
        query = {"container": container, "limitBytes": str(LOG_READ)} | ({"tailLines": str(lines)} if lines else {})
        found = self._send("GET", f"{self._path('pods')}/{pod}/log", None, query, stream=True)
        kept = bytearray()
        try:
            for part in found.stream(1 << 16):
                kept += part
                del kept[:-LOG_KEPT]
        except urllib3.exceptions.HTTPError as error:
            raise Refused.of(error) from error
        return kept.decode(errors="replace")

    def _path(self, kind: str) -> str:
        group, _, plural = kind.rpartition("/")
        return f"/{'apis/' + group if group else 'api/v1'}/namespaces/{self.namespace}/{plural}"

    def _send(self, method: str, path: str, body: Object | None, query: dict[str, str], stream: bool = False) -> Any:
        """Send one request without the client's own methods, which would parse a log that happens to be JSON."""
        headers = {**self.client.default_headers, "Content-Type": "application/json"}
        headers["Accept"] = "*/*" if stream else "application/json"
        words = list(query.items())
        self.client.update_params_for_auth(headers, words, ["BearerToken"])
        return self.client.request(
            method,
            self.client.configuration.host + path,
            query_params=words,
            headers=headers,
            body=body,
            _preload_content=not stream,
            _request_timeout=LOG_TIMEOUT if stream else None,
        )
