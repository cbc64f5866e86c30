"""The API server as plain JSON: paths in, dictionaries in the API's own form out."""

import email.utils
import json
from datetime import datetime
from typing import Any

import kubernetes
import urllib3
from kubernetes.client.rest import ApiException

Object = dict[str, Any]


class Refused(Exception):
    """The API server said no, or could not be reached.

    status: HTTP's, 0 where there was no answer. why: in the server's words.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"{why} ({status})" if status else why)
        self.status = status


class Api:
    """The cluster's API and one namespace of it.

    client: says which cluster, and with whose rights.
    """

    def __init__(self, client: kubernetes.client.ApiClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        self.clock: datetime | None = None
        """The API server's clock when it last answered."""

    def call(self, method: str, path: str, body: Object | None = None, text: bool = False, **query: str) -> Any:
        """Make one call; gives the parsed answer, or its text. Raises Refused."""
        try:
            # The client would take a log that is JSON apart and give it back as Python's idea of it.
            answer = self._client.call_api(
                path,
                method,
                query_params=list(query.items()),
                header_params={"Accept": "*/*" if text else "application/json", "Content-Type": "application/json"},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
            )
            content = answer.data.decode(errors="replace")
        except ApiException as error:
            raise Refused(error.status or 0, _message(error)) from None
        except urllib3.exceptions.HTTPError as error:
            raise Refused(0, f"no answer from the API server: {error}") from None
        if "Date" in answer.headers:
            self.clock = email.utils.parsedate_to_datetime(answer.headers["Date"])
        return content if text else json.loads(content)

    def get(self, kind: str, name: str) -> Object | None:
        """Give an object of the namespace, or None where there is none. kind: `secrets`, `apps/v1/deployments`."""
        try:
            return self.call("GET", f"{self._path(kind)}/{name}")
        except Refused as refused:
            if refused.status == 404:
                return None
            raise

    def list(self, kind: str, selector: str = "") -> list[Object]:
        """Give the objects of a kind in the namespace. selector: of labels."""
        return self.call("GET", self._path(kind), labelSelector=selector)["items"]

    def create(self, kind: str, body: Object) -> Object:
        """Make an object in the namespace."""
        return self.call("POST", self._path(kind), body)

    def delete(self, kind: str, name: str) -> None:
        """Delete an object and what belongs to it."""
        self.call("DELETE", f"{self._path(kind)}/{name}", propagationPolicy="Background")

    def _path(self, kind: str) -> str:
        return path_of(kind, self.namespace)


def path_of(kind: str, namespace: str) -> str:
    """Give the API's path of a kind's objects in a namespace. kind: `secrets`, `apps/v1/deployments`."""
    group, _, plural = kind.rpartition("/")
    return f"/{'apis/' + group if group else 'api/v1'}/namespaces/{namespace}/{plural}"


def _message(error: ApiException) -> str:
    try:
        return json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
