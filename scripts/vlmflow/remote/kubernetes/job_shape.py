"""Turns the Job that the plugin builds into the Job that is created: with its pod template, its owner and its commit.

Precedence: the rule (command, cpu, memory, disk, GPUs, runtime) over the template, and the template over the plugin's
defaults.
"""

import hashlib
import os
import re
import shlex
import subprocess
import uuid
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmflow.remote.cluster.api import Object
from vlmflow.remote.cluster.groups import NODE, as_variables, main_container, with_pods
from vlmflow.remote.cluster.kubectl import own_labels
from vlmflow.remote.job import RuleJob
from vlmflow.remote.kubernetes.templates import Template, merge, refuse_reach
from vlmflow.remote.library import ATTEMPT, OTHER_NODE, VERDICT, VlmflowError
from vlmflow.remote.storage import pod_folder

KEPT_SECONDS = 7 * 24 * 3600
"""How long a finished Job is kept for a controller that does not run now."""

INVOCATION, WORKDIR, TARGETS = "vlmflow/invocation", "vlmflow/workdir", "vlmflow/targets"
RULE, WILDCARDS = "vlmflow/rule", "vlmflow/wildcards"

VERDICT_FILE = "/dev/termination-log"
"""A container's termination message, which the API shows: the kubelet mounts a file here that any user may write.
https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/"""

PULL_SECONDS = 1800
"""Extra time for pulling images: activeDeadlineSeconds starts when a node takes the pod, before the pull."""

OUTLIVE_SIGTERM = "trap : TERM; "
"""tini sends SIGTERM to all processes; without the trap the shell, and the pod, would end before the rule has saved its
work."""

SOURCES = "/workdir/.sources"
"""Where a pod puts the archive of the workflow's sources: on a volume of its own."""

DEPLOYS = re.compile(r"-m snakemake --deploy-sources [^&;|]+")

OWN_GPU_NAMES = {"nvidia.com/gpu", "amd.com/gpu"}
"""The plugin's resource names of GPUs."""


def shape(
    job: Object, template: Template, rule_job: RuleJob, owner: Mapping[str, str], env: Mapping[str, str]
) -> Object:
    """Return the final Job, but for what follows from its name (`groups.as_attempt`).

    job: as the plugin built it. owner: labels of its owner (INVOCATION, WORKDIR, TARGETS). env: environment variables
    for the rule.

    Raises VlmflowError if the pod could write what the controller executes, or hold its token, or if the other nodes of
    a training would have no sources.
    """
    job = deepcopy(job)
    shell, command = main_container(job)["args"]
    pod = merge(job["spec"]["template"]["spec"], template.spec)
    refuse_reach(f"the pod of {rule_job.words}", pod, "remove it from kubernetes-persistent-volumes in the profile")
    pod["restartPolicy"] = "Never"
    if rule_job.runtime:
        # In the pod's spec: the deadline of a Job also counts the time in which its pod waits for GPUs.
        pod["activeDeadlineSeconds"] = rule_job.runtime * 60 + PULL_SECONDS
    labels = {"app.kubernetes.io/part-of": "vlmflow", RULE: label_value(rule_job.rule)}
    labels |= {f"vlmflow/{label_value(name)}": label_value(value) for name, value in rule_job.wildcards.items()}
    wildcards = " ".join(f"{name}={value}" for name, value in rule_job.wildcards.items())
    metadata = {"labels": {**labels, **owner}, "annotations": {WILDCARDS: wildcards}}
    job["metadata"] = merge(merge(job["metadata"], template.job_metadata), metadata)
    job["spec"] = {
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "template": {"metadata": merge(template.pod_metadata, metadata), "spec": pod},
    }
    container = main_container(job)
    # Snakemake compares the archive of the sources with the sha256 in the command, and then opens it again to unpack
    # it. In the folder for outputs, on the volume of all jobs, another pod could replace it in between.
    private = f"--local-storage-prefix {SOURCES}"
    command = OUTLIVE_SIGTERM + DEPLOYS.sub(lambda deploys: f"{deploys[0].rstrip()} {private} ", command, count=1)
    container["args"] = [shell, command if rule_job.nodes == 1 else _on_nodes(command, rule_job)]
    container["resources"] = _resources(container.get("resources") or {}, template.gpu_resource, rule_job)
    added = [pod_folder.variable(), *as_variables({**env, VERDICT: VERDICT_FILE})]
    container["env"] = merge({"env": container.get("env") or []}, {"env": added})["env"]
    container |= {"terminationMessagePath": VERDICT_FILE, "terminationMessagePolicy": "File"}
    return with_pods(job, rule_job.nodes) if rule_job.nodes > 1 else job


def words_of(job: Object) -> str:
    """Return what a Job runs, for people: rule name=value."""
    metadata = job["metadata"]
    rule = (metadata.get("labels") or {}).get(RULE, metadata["name"])
    return f"{rule} {(metadata.get('annotations') or {}).get(WILDCARDS, '')}".strip()


def label_value(text: Any) -> str:
    """Turn any text into a label value: at most 63 letters, digits, '-', '_' and '.'; both ends a letter or digit.

    https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(text))[:63].strip("._-")


def _on_nodes(command: str, rule_job: RuleJob) -> str:
    """Return the command of all pods of a training on several nodes. command: the one that runs the rule.

    Node 0 runs the rule, as the only pod of any other Job does. The others run `vlmflow.supervisor.other_node`, with
    the same sources: each pod unpacks the archive whose sha256 is in its own command.
    """
    sources = DEPLOYS.search(command)
    if sources is None:
        raise VlmflowError(
            "runs.NAME.nodes: the other nodes get no sources, because Snakemake does not deploy them",
            "remove shared-fs-usage: sources and job-deploy-sources from the profile, or set nodes: 1",
        )
    words = ["-m", OTHER_NODE, shlex.quote(rule_job.runs), f'"${ATTEMPT}"', f'"${NODE}"', str(rule_job.threads)]
    python = 'PYTHONPATH="$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}" exec python'
    other = f"{command[: sources.end()].rstrip()} && {python} {' '.join(words)}"
    return f'if [ "${NODE}" = 0 ]; then {command}; else {other}; fi'


def _resources(of_template: Object, gpu_resource: str, rule_job: RuleJob) -> Object:
    """Set requests and limits to what the rule declares; other resources of the template stay."""
    declared = {"cpu": str(rule_job.threads)}
    if rule_job.mem_mb:
        declared["memory"] = f"{rule_job.mem_mb}M"
    if rule_job.disk_mb:
        declared["ephemeral-storage"] = f"{rule_job.disk_mb}M"
    if rule_job.gpus:
        declared[gpu_resource] = str(rule_job.gpus)
    rules_matter = {"cpu", "memory", "ephemeral-storage", gpu_resource, *OWN_GPU_NAMES}
    resources = {}
    for part in ("requests", "limits"):
        others = {name: amount for name, amount in (of_template.get(part) or {}).items() if name not in rules_matter}
        resources[part] = others | declared
    return resources


@dataclass(frozen=True)
class Owner:
    """One invocation of Snakemake.

    invocation: its name. workdir: the name of its working directory, the same in each invocation. targets: the name of
    the place of its targets.
    """

    invocation: str
    workdir: str
    targets: str

    @property
    def labels(self) -> dict[str, str]:
        """The labels of each Job and pod of this invocation."""
        return {INVOCATION: self.invocation, WORKDIR: self.workdir, TARGETS: self.targets, **own_labels()}

    @property
    def ours(self) -> str:
        """The selector of this invocation's Jobs."""
        return f"{INVOCATION}={self.invocation}"

    @property
    def earlier(self) -> str:
        """The selector of all Jobs of this working directory: as an invocation starts, those of earlier ones."""
        return f"{WORKDIR}={self.workdir}"

    @property
    def strangers(self) -> str:
        """The selector of the Jobs of other working directories that make the same targets."""
        return f"{TARGETS}={self.targets},{WORKDIR}!={self.workdir}"


def owner_of(invocation: str, kept: Path, targets: str) -> Owner:
    """Return the owner of an invocation's Jobs.

    kept: the folder that keeps the working directory's name, which its first invocation chose. targets: namespace and
    storage prefix of its targets.
    """
    file = kept / "kubernetes-owner"
    if not file.is_file():
        file.write_text(uuid.uuid4().hex[:16])
    return Owner(invocation, file.read_text(), hashlib.sha256(targets.encode()).hexdigest()[:16])


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, for provenance; "" if unknown. VLMFLOW_COMMIT names it for one without .git."""
    if given := os.environ.get("VLMFLOW_COMMIT"):
        return given
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
