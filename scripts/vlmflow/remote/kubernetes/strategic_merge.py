"""Kubernetes' strategic merge, as far as pod specs need it.

Lists merge by the keys of the API types:
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/ ("patch strategy").

The API server and kubectl merge in this way. The Kubernetes client for Python has no function for it, and a Job must be
complete before the server sees it.
"""

from copy import deepcopy
from typing import Any

MERGED_BY = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "imagePullSecrets": "name",
    "ports": "containerPort",
}
"""Lists whose elements merge with the element of the same key."""

REPLACED_BY = {"env": "name", "volumes": "name", "volumeMounts": "mountPath", "volumeDevices": "devicePath"}
"""Lists whose elements replace the element of the same key: two merged volume sources would be invalid."""

JOINED = {"tolerations"}
"""Lists that are joined: a pod may tolerate more, never less."""


def merge(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `patch` merged into it; the patch wins. Neither is changed."""
    merged = deepcopy(base)
    for key, value in patch.items():
        merged[key] = _merged(key, merged.get(key), value)
    return merged


def _merged(key: str, ours: Any, theirs: Any) -> Any:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return merge(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list):
        if key in MERGED_BY:
            return _by_key(MERGED_BY[key], ours, theirs, merge)
        if key in REPLACED_BY:
            return _by_key(REPLACED_BY[key], ours, theirs, lambda _, new: new)
        if key in JOINED:
            return [*ours, *(deepcopy(item) for item in theirs if item not in ours)]
    return deepcopy(theirs)


def _by_key(name: str, ours: list[Any], theirs: list[Any], join: Any) -> list[Any]:
    elements = {element[name]: element for element in ours}
    for element in theirs:
        there = elements.get(element[name])
        elements[element[name]] = deepcopy(element) if there is None else join(there, deepcopy(element))
    return list(elements.values())
