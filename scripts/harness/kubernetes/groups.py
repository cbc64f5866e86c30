"""A training on several nodes as one Indexed Job: pod N is node N, and the pods find each other by a headless Service.

Node 0 runs the rule, as the only pod of any other Job does. The others run `vlmflow.training.other_node`, with the same
sources: each pod unpacks the archive whose sha256 is in its own command.

A group has the name of its attempt, a Job that is created again another one; so a pod of an earlier attempt finds
neither the Service nor the launch file of this one.
"""

import re
import shlex
from copy import deepcopy
from typing import Any

from harness.kubernetes.apart import DEPLOYS
from vlmflow.cluster.api import Object
from vlmflow.cluster.pod_templates import CONTAINER
from vlmflow.core.errors import VlmflowError
from vlmflow.training.group import ATTEMPT_VARIABLE, HOST_VARIABLE

GROUP = "vlmflow/group"
"""The label of a group's pods: the attempt's name. Policies, affinities and the Service select by it."""

NODE = "JOB_COMPLETION_INDEX"
"""The environment variable with a pod's number, from the Job controller."""

NODE_LABEL = "batch.kubernetes.io/job-completion-index"
"""The label with a pod's number, or in clusters before 1.28 the annotation."""

OTHER_NODE = "vlmflow.training.other_node"


def on_nodes(job: Object, nodes: int, runs: str, threads: int) -> Object:
    """Return a rule's Job with a pod on each node; it has no name yet (`named`).

    runs: the folder with the run folders of the rule's run, on a volume that all pods see. threads: cores of a pod.
    """
    job = deepcopy(job)
    job["spec"] |= {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        # Node 0 decides: the others may wait for it when it has found nothing to train. Before 1.31 this has no effect.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
    }
    container = main_container(job)
    rule = container["args"][1]
    container["args"] = [container["args"][0], _command(rule, runs, threads)]
    return job


def _command(rule: str, runs: str, threads: int) -> str:
    """Return the shell command of all pods. rule: the one that runs the rule."""
    sources = DEPLOYS.search(rule)
    if sources is None:
        raise VlmflowError(
            "runs.NAME.nodes: the other nodes get no sources, because Snakemake does not deploy them",
            "remove shared-fs-usage: sources and job-deploy-sources from the profile, or set nodes: 1",
        )
    words = ["-m", OTHER_NODE, shlex.quote(runs), f'"${ATTEMPT_VARIABLE}"', f'"${NODE}"', str(threads)]
    other = f"{rule[: sources.end()].rstrip()} && PYTHONPATH=scripts exec python {' '.join(words)}"
    return f'if [ "${NODE}" = 0 ]; then {rule}; else {other}; fi'


def named(job: Object, name: str) -> Object:
    """Return a Job under the name of its attempt, which all that belongs to a group's attempt has too."""
    job = deepcopy(job)
    job["metadata"]["name"] = name
    pod = job["spec"]["template"]
    group = name if nodes_of(job) > 1 else None
    if "affinity" in pod["spec"] or "topologySpreadConstraints" in pod["spec"]:
        _place(pod["spec"], group)
    if group:
        for metadata in (job["metadata"], pod.setdefault("metadata", {})):
            metadata["labels"] = {**(metadata.get("labels") or {}), GROUP: group}
        pod["spec"]["subdomain"] = group
        variables = {ATTEMPT_VARIABLE: group, HOST_VARIABLE: f"{group}-0.{group}"}
        container = main_container(job)
        kept = [each for each in container.get("env") or [] if each["name"] not in variables]
        container["env"] = [*kept, *({"name": key, "value": value} for key, value in variables.items())]
    return job


def service_of(job: Object) -> Object:
    """Return the Service that gives a group's pods their names, also before they are ready. It ends with the Job.

    job: as the API returned it.
    """
    metadata = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": metadata["name"], "labels": metadata["labels"], "ownerReferences": [owner]},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {GROUP: metadata["name"]},
        },
    }


def nodes_of(job: Object | None) -> int:
    """Return how many pods a Job has at a time."""
    return int((job or {}).get("spec", {}).get("completions") or 1)


def node_of(pod: Object) -> int:
    """Return the number of a pod in its group; 0 in a Job of one pod."""
    metadata = pod["metadata"]
    said = (metadata.get("labels") or {}).get(NODE_LABEL) or (metadata.get("annotations") or {}).get(NODE_LABEL) or "0"
    return int(said) if re.fullmatch("[0-9]{1,9}", said) else 0


def job_of(pod: Object) -> str:
    """Return the name of a pod's Job."""
    name: str = pod["metadata"]["labels"].get("job-name", "")
    return name


def main_container(job: Object) -> Any:
    """Return the container of a Job that runs the rule."""
    return next(each for each in job["spec"]["template"]["spec"]["containers"] if each["name"] == CONTAINER)


def _place(spec: Object, group: str | None) -> None:
    """Make what a template says about pods with the label GROUP mean this group's pods; without a group, remove it."""
    affinity = spec.get("affinity") or {}
    for kind in ("podAffinity", "podAntiAffinity"):
        for when, terms in (affinity.get(kind) or {}).items():
            affinity[kind][when] = [term for term in terms if _means(term.get("podAffinityTerm") or term, group)]
    if "topologySpreadConstraints" in spec:
        spread = spec["topologySpreadConstraints"] or []
        spec["topologySpreadConstraints"] = [each for each in spread if _means(each, group)]


def _means(term: Object, group: str | None) -> bool:
    """Narrow a term to a group if it selects by GROUP; returns whether it is to be kept."""
    selector = term.get("labelSelector") or {}
    expressions = selector.get("matchExpressions") or []
    others = [each for each in expressions if each.get("key") != GROUP]
    if len(others) == len(expressions):
        return True
    term["labelSelector"] = {"matchLabels": {**(selector.get("matchLabels") or {}), GROUP: group}}
    if others:
        term["labelSelector"]["matchExpressions"] = others
    return group is not None
