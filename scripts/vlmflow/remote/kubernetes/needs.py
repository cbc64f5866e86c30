"""Compares what the configuration's runs request with the cluster's nodes and quotas."""

import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from kubernetes.utils.quantity import parse_quantity
from snakemake.settings.types import ResourceSettings, StorageSettings

from vlmflow.remote.cluster.api import Object
from vlmflow.remote.doctor import MANY, Finding, planned_jobs
from vlmflow.remote.job import RuleJob, deciding_keys
from vlmflow.remote.kubernetes.templates import GPU_RESOURCE
from vlmflow.remote.library import Config, counted, strategy_of

MB = 1_000_000


@dataclass(frozen=True)
class Need:
    """What one run requests.

    processes: parallel trainers on each node. weights_mb: the weights on each GPU, in MB. jobs: all that it takes.
    nodes: those that train together.
    """

    run: str
    processes: int
    weights_mb: int
    jobs: tuple[RuleJob, ...]
    nodes: int = 1

    @property
    def gpus(self) -> int:
        """The most GPUs that a pod of the run requests, all on one node."""
        return max(job.gpus for job in self.jobs)


def need_of(settings: Config, name: str, jobs: list[RuleJob]) -> Need:
    """Return what a run of the configuration requests. jobs: all that it takes."""
    run = settings.runs[name]
    weights_mb = strategy_of(run.strategy, run.deepspeed).weights_of_each(run.resources.weights_mb, run.ranks)
    return Need(name, run.processes, weights_mb, tuple(jobs), run.nodes)


def jobs_of(run: str, files: Iterable[Path], max_threads: int | None = None) -> list[RuleJob]:
    """Return the jobs that make a run from nothing.

    files: configuration files over config.yaml, in their order. max_threads: as Snakemake's --max-threads.

    Raises VlmflowError with Snakemake's message if it refuses the workflow or its configuration.
    """
    with tempfile.TemporaryDirectory() as empty:
        # As on a cluster: local sources may be on volumes that only pods have, and all nodes see a pod's folder.
        storage = StorageSettings(
            default_storage_provider="fs",
            default_storage_prefix=f"{empty}/targets",
            remote_job_local_storage_prefix=Path(empty),
        )
        resources = ResourceSettings(cores=MANY, nodes=1, max_threads=max_threads)
        jobs = planned_jobs(run, files, Path(empty), resources, storage, RuleJob.of)
        return sorted(jobs, key=lambda job: (job.rule, job.mem_mb))


def gpu_resource(template: Object) -> str:
    """Return the cluster's resource name of GPUs, from an annotation of the template `gpu`."""
    return str((template["metadata"].get("annotations") or {}).get(GPU_RESOURCE, "nvidia.com/gpu"))


def most_gpus(nodes: list[Object], resource: str) -> int:
    """Return the largest number of GPUs on one node."""
    return max((int(_allocatable(node, resource)) for node in nodes), default=0)


def _allocatable(node: Object, resource: str) -> Decimal:
    return Decimal(parse_quantity((node["status"].get("allocatable") or {}).get(resource, 0)))


def check_nodes(nodes: list[Object], templates: dict[str, Object], needs: list[Need]) -> Iterator[Finding]:
    """Check every job of each run against the nodes that its pods may use. templates: pod templates by name.

    The capacity of an empty node counts: what runs there now will end.
    """
    resource = gpu_resource(templates["gpu"])

    def faults_of(need: Need, job: RuleJob) -> list[str | None]:
        """Return for each node why a job's pod cannot run there, even if it is empty; None if it can."""
        spec = templates.get(job.template or "default", templates["default"])["template"]["spec"]
        return [barred(node, spec) or _lacking(node, resource, job, need.weights_mb) for node in nodes]

    yield Finding("GPUs", "ok", _inventory(nodes, resource))
    for need in needs:
        looked_at = [(job, faults_of(need, job)) for job in need.jobs]
        unfit = [(job, faults) for job, faults in looked_at if faults.count(None) < job.nodes]
        yield from dict.fromkeys(_no_node(need, job, faults, resource) for job, faults in unfit)
        if not unfit:
            largest, faults = max(looked_at, key=lambda pair: (pair[0].gpus, pair[0].mem_mb, pair[0].nodes))
            rules = f"each of its {len({job.rule for job in need.jobs})} rules fits on a node"
            detail = f"{rules}; {largest.rule} ({_in_words(largest, resource)}) fits on {faults.count(None)}"
            yield Finding(f"run {need.run}", "ok", detail)


def _no_node(need: Need, job: RuleJob, faults: list[str | None], resource: str) -> Finding:
    reasons = Counter(fault for fault in faults if fault)
    why = "; ".join(f"{counted(count, 'node')}: {reason}" for reason, count in reasons.most_common(5)) or "no nodes"
    step = (
        f"{deciding_keys(job.rule, need.run)} set what it requests "
        "(cores: --max-threads N of vlmflow doctor and cluster run); "
        f"the overlay's template {job.template or 'default'} selects the nodes; --run NAME checks another run alone"
    )
    where = "on one node: it fits on no node"
    if job.nodes > 1:
        where = f"on each of {job.nodes} nodes: it fits on {faults.count(None)}"
    detail = f"{_in_words(job, resource)} {where}. {why}"
    return Finding(f"rule {job.rule}, run {need.run}", "fail", detail, step)


def _amounts(job: RuleJob, gpu_resource: str) -> dict[str, int]:
    """Return what a job's pod requests, by Kubernetes' names, in cores and bytes."""
    amounts = {"cpu": job.threads, "memory": job.mem_mb * MB, "ephemeral-storage": job.disk_mb * MB}
    return amounts | {gpu_resource: job.gpus, "pods": 1}


def _in_words(job: RuleJob, resource: str) -> str:
    amounts = _amounts(job, resource)
    return ", ".join(_amount(name, amount) for name, amount in amounts.items() if amount and name != "pods")


def _amount(name: str, amount: Decimal | int) -> str:
    if name in ("memory", "ephemeral-storage"):
        return f"{amount / MB / 1000:,.0f} GB of {'memory' if name == 'memory' else 'node disk'}"
    return f"{amount:,} {'cores' if name == 'cpu' else name}"


def _inventory(nodes: list[Object], resource: str) -> str:
    cards: Counter[str] = Counter()
    for node in nodes:
        count = int(_allocatable(node, resource))
        labels = node["metadata"].get("labels") or {}
        if count:
            memory = labels.get("nvidia.com/gpu.memory")
            size = f" with {int(memory) / 1024:.0f} GiB" if memory and memory.isdigit() else ""
            cards[f"{count} × {labels.get('nvidia.com/gpu.product', 'product not labelled')}{size}"] += 1
    inventory = "; ".join(f"{counted(count, 'node')} of {card}" for card, count in cards.items())
    return inventory or f"no node has {resource}"


def _lacking(node: Object, resource: str, job: RuleJob, weights_mb: int) -> str | None:
    """Return what an empty node lacks for a job's pod; None if nothing."""
    for name, amount in _amounts(job, resource).items():
        there = _allocatable(node, name)
        if there < amount:
            # Rounded up it might seem enough.
            tenths = math.floor((there / MB / 1000 if amount > MB else there) * 10)
            return f"{tenths / 10:,g} of {_amount(name, amount)}"
    memory = (node["metadata"].get("labels") or {}).get("nvidia.com/gpu.memory", "")
    if job.gpus and memory.isdigit() and int(memory) * 1.048576 < weights_mb:
        return f"each GPU needs {weights_mb / 1000:,.0f} GB for weights and has {int(memory) / 954:,.0f} GB"
    return None


def barred(node: Object, spec: Object) -> str | None:
    """Return why no pod of a template may run on a node; None if one may. spec: the template's."""
    if node["spec"].get("unschedulable"):
        return "cordoned"
    for taint in node["spec"].get("taints") or []:
        if taint["effect"] != "PreferNoSchedule" and not any(
            _tolerates(toleration, taint) for toleration in spec.get("tolerations") or []
        ):
            return f"taint {taint['key']} is not tolerated"
    if not _selected(node["metadata"].get("labels") or {}, spec):
        return "the template's node selector or affinity excludes it"
    return None


def _tolerates(toleration: Object, taint: Object) -> bool:
    return (
        toleration.get("key", taint["key"]) == taint["key"]
        and toleration.get("effect", taint["effect"]) == taint["effect"]
        and (toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", ""))
    )


def _selected(labels: dict[str, str], spec: Object) -> bool:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms")
    matches = [
        all(_matches(labels, expression) for expression in term.get("matchExpressions") or []) for term in terms or []
    ]
    selector = (spec.get("nodeSelector") or {}).items()
    return all(labels.get(key) == value for key, value in selector) and (terms is None or any(matches))


def _matches(labels: dict[str, str], expression: Object) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:  # Gt and Lt compare numbers, and no label of GPU products is a number
            return True


def check_quota(quotas: list[Object], resource: str, needs: list[Need]) -> Finding:
    """Check that the namespace's quotas leave enough for the largest run. resource: the resource name of GPUs."""
    jobs = [job for need in needs for job in need.jobs]
    requests = {
        "requests.memory": (max((job.nodes * job.mem_mb * MB for job in jobs), default=0), "memory"),
        "requests.cpu": (max((job.nodes * job.threads for job in jobs), default=0), "cores"),
        f"requests.{resource}": (max((job.nodes * job.gpus for job in jobs), default=0), "GPUs"),
        "pods": (max((job.nodes for job in jobs), default=1), "pods"),
        "count/jobs.batch": (1, "Jobs"),
    }
    requests |= {key.removeprefix("requests."): requests[key] for key in ("requests.memory", "requests.cpu")}
    short, left = [], []
    for quota in quotas:
        hard, used = quota["status"].get("hard") or {}, quota["status"].get("used") or {}
        for key, (requested, words) in requests.items():
            if key in hard:
                rest = parse_quantity(hard[key]) - parse_quantity(used.get(key, 0))
                unit = f"{rest / MB / 1000:,.0f} GB of {words}" if words == "memory" else f"{rest:,.0f} {words}"
                left.append(unit)
                if rest < requested:
                    amount = f"{requested / MB / 1000:,.0f} GB" if words == "memory" else requested
                    short.append(f"{quota['metadata']['name']} leaves {unit}, a run requests {amount}")
    if short:
        step = "kubectl describe resourcequota; wait until other pods end, or ask for a larger quota"
        return Finding("quota", "fail", "; ".join(short), step)
    return Finding("quota", "ok", "left: " + ", ".join(left) if left else "none set")
