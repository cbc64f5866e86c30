"""What the configuration's runs ask of a cluster, against its nodes and what its quotas leave."""

from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from vlmflow.cluster.checks import Check
from vlmflow.config.model import Config
from vlmflow.config.source import HubSource, parse_source

Object = dict[str, Any]
GPU_RESOURCE = "vlmflow/gpu-resource"
"""The annotation of the template `gpu` with the cluster's name for its GPUs."""
MB = 1_000_000


@dataclass(frozen=True)
class Need:
    """What the training of one run asks for.

    processes: trainers side by side. gpus: on one node. memory_mb: main memory in MB. weights_mb: the weights that
    each GPU holds, in MB.
    """

    run: str
    processes: int
    gpus: int
    memory_mb: int
    weights_mb: int


def needs_of(settings: Config, runs: list[str]) -> list[Need]:
    """Give what some runs of the configuration ask for."""
    needs = []
    for name in runs:
        run = settings.runs[name]
        shards = run.processes if run.strategy == "zero3" else 1
        gpus = run.processes if run.device == "cuda" else 0
        needs.append(Need(name, run.processes, gpus, run.resources.train_mem_mb, run.resources.weights_mb // shards))
    return needs


def hub_sources(settings: Config, runs: list[str]) -> list[str]:
    """Give what some runs fetch from the hub."""
    models = [settings.models[settings.runs[run].model].source for run in runs]
    datasets = [settings.datasets[settings.runs[run].dataset] for run in runs]
    files = [address for dataset in datasets for split in ("train", "test") for address in dataset.addresses(split)]
    return sorted({source for source in [*models, *files] if isinstance(parse_source(source), HubSource)})


def gpu_resource(template: Object) -> str:
    """Give the cluster's name for its GPUs, as the template `gpu` says it."""
    return (template["metadata"].get("annotations") or {}).get(GPU_RESOURCE, "nvidia.com/gpu")


def most_gpus(nodes: list[Object], resource: str) -> int:
    """Give the number of GPUs of the node that has most of them."""
    return max((int(_allocatable(node, resource)) for node in nodes), default=0)


def check_nodes(nodes: list[Object], template: Object, needs: list[Need]) -> list[Check]:
    """Check each run against the nodes that its pods may land on. template: the pod template `gpu`."""
    resource = gpu_resource(template)
    checks = [Check("GPUs", "ok", _inventory(nodes, resource))]
    for need in needs:
        if need.gpus:
            faults = [_fault(node, template["template"]["spec"], resource, need) for node in nodes]
        else:
            faults = [_too_small(node, need) for node in nodes]
        fitting = sum(fault is None for fault in faults)
        asks = f"{need.gpus} GPU(s) and {need.memory_mb / 1000:,.0f} GB of memory on one node"
        if fitting:
            checks.append(Check(f"run {need.run}", "ok", f"{asks}: {fitting} node(s) can hold it"))
        else:
            reasons = Counter(fault for fault in faults if fault)
            why = "; ".join(f"{count} node(s): {reason}" for reason, count in reasons.most_common(5)) or "no nodes"
            step = (
                f"runs.{need.run}.processes, device and resources say what it asks for; GPU product, tolerations and "
                "resource name stand in the overlay's template gpu; other runs alone: --run NAME"
            )
            checks.append(Check(f"run {need.run}", "fail", f"{asks}: no node can hold it. {why}", step))
    return checks


def _inventory(nodes: list[Object], resource: str) -> str:
    kinds: Counter[str] = Counter()
    for node in nodes:
        count = int(_allocatable(node, resource))
        labels = node["metadata"].get("labels") or {}
        if count:
            memory = labels.get("nvidia.com/gpu.memory")
            size = f" with {int(memory) / 1024:.0f} GiB" if memory and memory.isdigit() else ""
            kinds[f"{count} × {labels.get('nvidia.com/gpu.product', 'product not labelled')}{size}"] += 1
    return "; ".join(f"{count} node(s) of {kind}" for kind, count in kinds.items()) or f"no node has {resource}"


def _fault(node: Object, spec: Object, resource: str, need: Need) -> str | None:
    """Say why a GPU pod of a run cannot land on a node; None where it can."""
    labels = node["metadata"].get("labels") or {}
    if node["spec"].get("unschedulable"):
        return "cordoned"
    for taint in node["spec"].get("taints") or []:
        if taint["effect"] != "PreferNoSchedule" and not any(
            _tolerates(toleration, taint) for toleration in spec.get("tolerations") or []
        ):
            return f"taint {taint['key']} is not tolerated"
    if not _selected(labels, spec):
        return "not selected by the template's node affinity"
    if _allocatable(node, resource) < need.gpus:
        return f"{int(_allocatable(node, resource))} of {need.gpus} {resource}"
    memory = labels.get("nvidia.com/gpu.memory", "")
    if memory.isdigit() and int(memory) * 1.048576 < need.weights_mb:
        return f"each GPU would hold {need.weights_mb / 1000:,.0f} GB of weights, and has {int(memory) / 954:,.0f} GB"
    return _too_small(node, need)


def _too_small(node: Object, need: Need) -> str | None:
    memory = _allocatable(node, "memory")
    if memory < need.memory_mb * MB:
        return f"{memory / MB / 1000:,.0f} of {need.memory_mb / 1000:,.0f} GB of memory"
    return None


def _allocatable(node: Object, resource: str) -> Decimal:
    return parse_quantity((node["status"].get("allocatable") or {}).get(resource, 0))


def _tolerates(toleration: Object, taint: Object) -> bool:
    return (
        toleration.get("key", taint["key"]) == taint["key"]
        and toleration.get("effect", taint["effect"]) == taint["effect"]
        and (toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", ""))
    )


def _selected(labels: dict[str, str], spec: Object) -> bool:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms")
    wanted = (spec.get("nodeSelector") or {}).items()
    return all(labels.get(key) == value for key, value in wanted) and (
        terms is None or any(all(_matches(labels, one) for one in term.get("matchExpressions") or []) for term in terms)
    )


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
        case _:  # Gt and Lt compare numbers, which no label of GPU products is
            return True


def check_quota(quotas: list[Object], resource: str, needs: list[Need]) -> Check:
    """Check what the namespace's quotas leave against the largest run. resource: the GPUs' name."""
    asks = {
        "requests.memory": (max((need.memory_mb * MB for need in needs), default=0), "memory"),
        f"requests.{resource}": (max((need.gpus for need in needs), default=0), "GPUs"),
        "pods": (1, "pods"),
        "count/jobs.batch": (1, "Jobs"),
    }
    asks |= {key.removeprefix("requests."): ask for key, ask in asks.items() if key == "requests.memory"}
    short, left = [], []
    for quota in quotas:
        hard, used = quota["status"].get("hard") or {}, quota["status"].get("used") or {}
        for key, (ask, words) in asks.items():
            if key in hard:
                rest = parse_quantity(hard[key]) - parse_quantity(used.get(key, 0))
                unit = f"{rest / MB / 1000:,.0f} GB of {words}" if words == "memory" else f"{rest:,.0f} {words}"
                left.append(unit)
                if rest < ask:
                    amount = f"{ask / MB / 1000:,.0f} GB" if words == "memory" else ask
                    short.append(f"{quota['metadata']['name']} leaves {unit}, a run asks for {amount}")
    if short:
        step = "kubectl describe resourcequota; wait for what runs, or ask for more"
        return Check("quota", "fail", "; ".join(short), step)
    return Check("quota", "ok", "left: " + ", ".join(left) if left else "none set")
