"""From the Job that the plugin builds to the Job that is created.

Who wins: the rule (command, amounts of cpu, memory, disk and GPUs, run time) over the template, the template over what
the plugin says of itself.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Self

from harness.kubernetes.apart import refuse_reach, with_private_sources
from harness.kubernetes.strategic_merge import merge
from harness.kubernetes.templates import Template
from harness.stage import VERDICT
from harness.storage import pod_folder
from vlmflow.cluster.api import Object
from vlmflow.cluster.pod_templates import CONTAINER

WEEK = 7 * 24 * 3600
KEPT_SECONDS = WEEK
"""How long a finished Job is kept for a controller that is away."""

INVOCATION, WORKDIR, TARGETS = "vlmflow/invocation", "vlmflow/workdir", "vlmflow/targets"
RULE, WILDCARDS = "vlmflow/rule", "vlmflow/wildcards"

VERDICT_FILE = "/dev/termination-log"
"""Where a container's last words lie, which the API shows: the kubelet mounts a file there that any user may write.
https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/"""

PULL_SECONDS = 1800
"""A pod's clock begins when a node takes it, before its images are there; this is for pulling them."""

OUTLIVE_SIGTERM = "trap : TERM; "
"""tini sends SIGTERM to all; a shell that died of it would end the pod before what it runs has saved its work."""

OWN_GPU_NAMES = {"nvidia.com/gpu", "amd.com/gpu"}
"""What the plugin calls GPUs."""


@dataclass(frozen=True)
class RuleJob:
    """What the rule says of one job.

    mem_mb, disk_mb: MB (10⁶ bytes), 0 where it does not say. runtime: minutes, 0 for no limit.
    """

    rule: str
    wildcards: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    mem_mb: int = 0
    disk_mb: int = 0
    runtime: int = 0
    gpus: int = 0
    template: str | None = None

    @classmethod
    def of(cls, job: Any) -> Self:
        """Read a job of Snakemake."""
        resources = dict(job.resources)
        return cls(
            rule="+".join(job.rules),
            wildcards=dict(getattr(job, "wildcards_dict", {})),
            threads=job.threads,
            mem_mb=int(resources.get("mem_mb") or 0),
            disk_mb=int(resources.get("disk_mb") or 0),
            runtime=int(resources.get("runtime") or 0),
            gpus=int(resources.get("gpu") or 0),
            template=resources.get("pod_template"),
        )

    @property
    def words(self) -> str:
        """Name the job as a person does: rule name=value."""
        return " ".join([self.rule, *(f"{name}={value}" for name, value in self.wildcards.items())])


def shape(
    job: Object, template: Template, rule_job: RuleJob, owner: Mapping[str, str], env: Mapping[str, str]
) -> Object:
    """Give the final Job.

    job: as the plugin built it. owner: labels that say whose it is (INVOCATION, WORKDIR, TARGETS). env: variables for
    the rule.

    Raises VlmflowError where the pod could reach what the controller executes.
    """
    job = deepcopy(job)
    plugins_pod = job["spec"]["template"]["spec"]
    command = next(container for container in plugins_pod["containers"] if container["name"] == CONTAINER)["args"]
    pod = merge(plugins_pod, template.spec)
    refuse_reach(f"the pod of {rule_job.words}", pod, "take it out of kubernetes-persistent-volumes in the profile")
    pod["restartPolicy"] = "Never"
    if rule_job.runtime:
        # In the pod's spec: a Job's own clock also runs while its pod waits for GPUs.
        pod["activeDeadlineSeconds"] = rule_job.runtime * 60 + PULL_SECONDS
    container = next(container for container in pod["containers"] if container["name"] == CONTAINER)
    container["args"] = [command[0], OUTLIVE_SIGTERM + with_private_sources(command[1])]
    container["resources"] = _resources(container.get("resources") or {}, template.gpu_resource, rule_job)
    ours = {**env, VERDICT: VERDICT_FILE}
    added = [pod_folder.variable(), *({"name": key, "value": value} for key, value in ours.items())]
    container["env"] = merge({"env": container.get("env") or []}, {"env": added})["env"]
    container |= {"terminationMessagePath": VERDICT_FILE, "terminationMessagePolicy": "File"}
    labels, annotations = _said(rule_job)
    labels |= owner
    job["metadata"] = merge(
        merge(job["metadata"], template.job_metadata), {"labels": labels, "annotations": annotations}
    )
    job["spec"] = {
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "template": {
            "metadata": merge(template.pod_metadata, {"labels": labels, "annotations": annotations}),
            "spec": pod,
        },
    }
    return job


def _resources(found: Object, gpu_resource: str, rule_job: RuleJob) -> Object:
    """Limits = requests for all that the rule declares; what else the template asks for stays."""
    declared = {"cpu": str(rule_job.threads)}
    if rule_job.mem_mb:
        declared["memory"] = f"{rule_job.mem_mb}M"
    if rule_job.disk_mb:
        declared["ephemeral-storage"] = f"{rule_job.disk_mb}M"
    if rule_job.gpus:
        declared[gpu_resource] = str(rule_job.gpus)
    rules_matter = {"cpu", "memory", "ephemeral-storage", gpu_resource, *OWN_GPU_NAMES}
    return {
        kind: {name: amount for name, amount in (found.get(kind) or {}).items() if name not in rules_matter} | declared
        for kind in ("requests", "limits")
    }


def _said(rule_job: RuleJob) -> tuple[dict[str, str], dict[str, str]]:
    labels = {"app.kubernetes.io/part-of": "vlmflow", RULE: label_value(rule_job.rule)}
    labels |= {f"vlmflow/{label_value(name)}": label_value(value) for name, value in rule_job.wildcards.items()}
    annotations = {WILDCARDS: " ".join(f"{name}={value}" for name, value in rule_job.wildcards.items())}
    return labels, annotations


def label_value(text: Any) -> str:
    """Make a label's value of any text: at most 63 letters, digits, '-', '_' and '.', begun and ended by the first two.

    https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(text))[:63].strip("._-")
