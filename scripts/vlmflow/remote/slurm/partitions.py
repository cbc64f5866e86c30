"""What Slurm's partitions can hold, and why a job fits in none: Slurm lets some such jobs wait for ever."""

import difflib
import os
import pwd
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmflow.remote.job import deciding_keys
from vlmflow.remote.library import VlmflowError, counted
from vlmflow.remote.slurm.queue import SlurmError, ask, refuse_without_slurm, seconds
from vlmflow.remote.slurm.request import GROUP, Request, gpus_in

STATES = {
    "DOWN": "it is down: jobs wait there until an administrator opens it",
    "DRAIN": "it takes no new jobs (DRAIN)",
    "INACTIVE": "it takes no new jobs and starts none (INACTIVE)",
}
"""What follows from each state of a partition but UP."""


@dataclass(frozen=True)
class Node:
    """What an empty node has for jobs.

    memory_mb: MB, without what Slurm keeps for the system. gpus: their number by model, "" where Slurm knows none.
    """

    name: str
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int] = field(default_factory=dict)

    def gpus_of(self, model: str | None) -> int:
        """Return the number of its GPUs of a model; of all models for None."""
        return sum(self.gpus.values()) if model is None else self.gpus.get(model, 0)


@dataclass(frozen=True)
class Partition:
    """A partition of Slurm.

    state: Slurm's word, UP if jobs start there. max_minutes: its time limit, None without one. max_nodes: of one job,
    None without a limit. accounts: those that may use it, None for all. grace_seconds: between the signal and the kill
    of a preempted job. preempt_mode: Slurm's word for what a preemption does.
    """

    name: str
    is_default: bool
    state: str
    max_minutes: int | None
    nodes: tuple[Node, ...]
    max_nodes: int | None = None
    accounts: frozenset[str] | None = None
    grace_seconds: int = 0
    preempt_mode: str = "OFF"


def partitions() -> dict[str, Partition]:
    """Return the partitions that this user sees, by name, in Slurm's order.

    Raises SlurmError if Slurm gives no answer.
    """
    return read_partitions(*(ask("scontrol", "show", kind, "--oneliner") for kind in ("partition", "node")))


def accounts() -> frozenset[str] | None:
    """Return this user's accounts; None if Slurm keeps none, or does not tell."""
    try:
        answer = ask(
            "sacctmgr", "-n", "-P", "show", "assoc", f"user={pwd.getpwuid(os.getuid()).pw_name}", "format=account"
        )
    except SlurmError:
        return None
    return frozenset(filter(None, map(str.strip, answer.splitlines()))) or None


def read_partitions(partitions: str, nodes: str) -> dict[str, Partition]:
    """Read what `scontrol show partition --oneliner` and `scontrol show node --oneliner` print."""
    fields_of_nodes = [_fields(line) for line in nodes.splitlines() if line.startswith("NodeName=")]
    fields = [_fields(line) for line in partitions.splitlines() if line.startswith("PartitionName=")]
    return {partition["PartitionName"]: _partition(partition, fields_of_nodes) for partition in fields}


def _fields(line: str) -> dict[str, str]:
    """Read `KEY=VALUE KEY=VALUE …`. Values may have spaces; a key that comes again is part of a text of people."""
    parts = re.split(r"(?:^|\s+)(\w+)=", line.strip())
    return dict(reversed(list(zip(parts[1::2], parts[2::2], strict=True))))


def _partition(fields: Mapping[str, str], nodes: list[dict[str, str]]) -> Partition:
    name, longest = fields["PartitionName"], seconds(fields.get("MaxTime", ""))
    allowed = fields.get("AllowAccounts", "ALL")
    return Partition(
        name,
        fields.get("Default") == "YES",
        fields.get("State", "UP"),
        None if longest is None else longest // 60,
        tuple(_node(node, fields) for node in nodes if name in node.get("Partitions", "").split(",")),
        _number(fields.get("MaxNodes")),
        None if allowed == "ALL" else frozenset(allowed.lower().split(",")),
        _number(fields.get("GraceTime")) or 0,
        fields.get("PreemptMode", "OFF"),
    )


def _node(fields: Mapping[str, str], partition: Mapping[str, str]) -> Node:
    """Read a node as its partition lends it. CPUEfctv (since 22.05): without those kept for the system."""
    cpus = _number(fields.get("CPUEfctv")) or _number(fields.get("CPUTot")) or 0
    memory = (_number(fields.get("RealMemory")) or 0) - (_number(fields.get("MemSpecLimit")) or 0)
    most_cpus, most_memory = _number(partition.get("MaxCPUsPerNode")), _number(partition.get("MaxMemPerNode"))
    return Node(
        fields["NodeName"],
        cpus if most_cpus is None else min(cpus, most_cpus),
        memory if most_memory is None else min(memory, most_memory),
        gpus_in(fields.get("Gres", "")),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def why_not(partition: Partition, request: Request) -> str | None:
    """Return in words why a partition can never hold what a job asks for, even when all its nodes are empty.

    None if it can. A time limit is no reason for a job that saves and comes again.
    """
    if partition.state != "UP":
        return STATES.get(partition.state, f"its state is {partition.state}")
    if not partition.nodes:
        return "it has no nodes"
    longest = partition.max_minutes
    if longest is not None and request.runtime > longest and not request.warning:
        return f"{counted(request.runtime, 'minute')}; its limit is {longest:,}"
    if partition.max_nodes is not None and request.nodes > partition.max_nodes:
        return f"{counted(request.nodes, 'node')}; a job may have {partition.max_nodes:,} there"
    if partition.accounts is not None and request.account and request.account.lower() not in partition.accounts:
        return f"account {request.account}; it is for {', '.join(sorted(partition.accounts))}"
    return _why_no_node(partition.nodes, request)


def _why_no_node(nodes: tuple[Node, ...], request: Request) -> str | None:
    of_model = f" of {request.model}" if request.model else ""
    amounts: tuple[tuple[int, str, Callable[[Node], int]], ...] = (
        (request.threads, counted(request.threads, "core"), lambda node: node.cpus),
        (request.mem_mb, f"{request.mem_mb:,} MB of memory", lambda node: node.memory_mb),
        (request.gpus, f"{counted(request.gpus, 'GPU')}{of_model}", lambda node: node.gpus_of(request.model)),
    )
    for amount, words, of in amounts:
        largest = max(map(of, nodes))
        if amount > largest:
            there = f"its largest node has {largest:,}" if largest else "its nodes have none"
            return f"{words} on one node; {there}"
    holding = sum(all(of(node) >= amount for amount, _, of in amounts) for node in nodes)
    if holding >= request.nodes:
        return None
    where = f"each of {request.nodes:,} nodes" if request.nodes > 1 else "one node"
    together = ", ".join(words for amount, words, _ in amounts if amount)
    return f"{together} on {where}; its nodes with all of that: {holding:,}"


def named_by(request: Request, site: Mapping[str, Partition]) -> tuple[str, ...]:
    """Return the partitions that a job names, or else Slurm's default one. site: all partitions, by name."""
    return request.partitions or tuple(name for name, partition in site.items() if partition.is_default)


def why_in_none(
    request: Request, site: Mapping[str, Partition], of_user: frozenset[str] | None
) -> tuple[str, str] | None:
    """Return why none of the partitions that a job names can ever hold it, and what to do; None if one can.

    site: all partitions, by name. of_user: the user's accounts, None if unknown.
    """
    who = f"{request.rule}, run {request.run}" if request.run else request.rule
    named = named_by(request, site)
    key = f"`slurm_partition` of {request.rule} in set-resources, or default-resources, of your profile"
    if not named:
        return f"{who}: it names no partition, and Slurm has no default one", f"set {key} to one of {', '.join(site)}"
    for name in named:
        if name not in site:
            near = difflib.get_close_matches(name, site, 1)
            guess = f": did you mean {near[0]}?" if near else ""
            return f"{who}: there is no partition {name}{guess}", f"set {key} to one of {', '.join(site)}"
    if request.account and of_user is not None and request.account.lower() not in of_user:
        step = f"set `slurm_account` in your profile to one of {', '.join(sorted(of_user))}"
        return f"{who}: you have no account {request.account}", step
    reasons = {name: why_not(site[name], request) for name in named}
    if None in reasons.values():
        return None
    why = "; ".join(f"partition {name}: {reason}" for name, reason in reasons.items())
    others = [name for name, partition in site.items() if why_not(partition, request) is None]
    other = f"set {key} to {' or '.join(others)}, or" if others else "no other partition can hold it;"
    keys = "max-threads, set-threads and set-resources of your profile, or slurm.together without it"
    if not request.rule.startswith(GROUP):
        keys = f"{deciding_keys(request.rule, request.run)}; for cores also max-threads of your profile"
    return f"{who}, {why}", f"{other} ask for less: {keys}"


def refuse_what_fits_nowhere(
    jobs: Iterable[Any], site: Mapping[str, Partition], of_user: frozenset[str] | None, gpu_model: str | None
) -> None:
    """Raise VlmflowError with a line for each job of Snakemake that no partition it names can ever hold.

    site: what `partitions` returns. of_user: what `accounts` returns. gpu_model: `slurm.gpu_model`.
    """
    refusals = dict.fromkeys(filter(None, (why_in_none(Request.of(job, gpu_model), site, of_user) for job in jobs)))
    if refusals:
        cause = "\n".join(["Slurm could never start these jobs:", *(f"  {why}: {step}" for why, step in refusals)])
        raise VlmflowError(cause, "`vlmflow doctor --on slurm` looks at all of the workflow's rules; see docs/slurm.md")


def refuse_plan(workflow: Any, settings: Any) -> None:
    """End the process if Slurm could never start a planned job; an exception would print the Snakefile's traceback."""
    if workflow.remote_execution_settings is None:
        return  # the doctor's plan, which nobody runs
    try:
        refuse_without_slurm()
        site, of_user = partitions(), accounts()
    except VlmflowError as error:
        if not workflow.dryrun or (isinstance(error, SlurmError) and not error.outage):
            sys.exit(str(error))
        print(f"{error.cause}; so this plan is not compared with a cluster", file=sys.stderr)
        return
    try:
        # Not `workflow.is_local`: with -n Snakemake calls all jobs local.
        stay = {rule.name for rule in workflow.rules if rule.norun} | workflow._localrules
        sent = [job for job in workflow.dag.needrun_jobs() if job.rule.name not in stay]
        refuse_what_fits_nowhere(sent, site, of_user, settings.slurm.gpu_model)
    except VlmflowError as error:
        sys.exit(str(error))
