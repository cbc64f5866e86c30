"""What Slurm's partitions can hold, and why a job fits in none: Slurm lets some such jobs wait for ever."""

import difflib
import getpass
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from vlmflow.core.errors import VlmflowError, counted
from vlmflow.remote.job import deciding_keys
from vlmflow.remote.slurm.queue import SlurmError, ask, refuse_without_slurm, seconds
from vlmflow.remote.slurm.request import rule_job_of

STATES = {
    "DOWN": "it is down: jobs wait there until an administrator opens it",
    "DRAIN": "it takes no new jobs (DRAIN)",
    "INACTIVE": "it takes no new jobs and starts none (INACTIVE)",
}
"""What follows from each state of a partition but UP."""

GROUP = "the group"


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


@dataclass(frozen=True)
class Asked:
    """What a job asks of Slurm.

    threads, mem_mb, gpus: of each of its nodes. model: of the GPUs, None for any. minutes: its limit, None without one.
    warning: seconds before its end at which it is told to save and to come again; 0 for a job that cannot. partitions:
    those that it names, any of which may run it; () for Slurm's default one. account: None for the user's default one.
    """

    rule: str
    run: str
    threads: int
    mem_mb: int
    gpus: int = 0
    model: str | None = None
    nodes: int = 1
    minutes: int | None = None
    warning: int = 0
    partitions: tuple[str, ...] = ()
    account: str | None = None

    @classmethod
    def of(cls, job: Any, gpu_model: str | None) -> Self:
        """Read these from a job of Snakemake, or from a group of jobs that share one: of its largest, and its longest.

        gpu_model: `slurm.gpu_model` of the configuration. A rule may ask for GPUs by `gres`, too, as `gpu:a100:2`.
        """
        amounts, asked = job.resources, rule_job_of(job)
        by_gres = gpus_in(str(amounts.get("gres") or ""))
        members = job.jobs if job.is_group() else [job]
        return cls(
            f"{GROUP} {job.groupid}" if job.is_group() else job.name,
            getattr(job, "wildcards_dict", {}).get("run", ""),
            asked.threads,
            asked.mem_mb,
            asked.gpus or sum(by_gres.values()),
            gpu_model or next(filter(None, by_gres), None),
            asked.nodes,
            max(int(one.resources.get("runtime") or 0) for one in members) or None,
            int(amounts.get("warning_seconds") or 0),
            tuple(filter(None, str(amounts.get("slurm_partition") or "").split(","))),
            amounts.get("slurm_account") or None,
        )


def partitions() -> dict[str, Partition]:
    """Return the partitions that this user sees, by name, in Slurm's order.

    Raises SlurmError if Slurm gives no answer.
    """
    return read_partitions(
        ask("scontrol", "show", "partition", "--oneliner"), ask("scontrol", "show", "node", "--oneliner")
    )


def accounts() -> frozenset[str] | None:
    """Return this user's accounts; None if Slurm keeps none, or does not tell."""
    try:
        said = ask("sacctmgr", "-n", "-P", "show", "assoc", f"user={getpass.getuser()}", "format=account")
    except SlurmError:
        return None
    return frozenset(filter(None, map(str.strip, said.splitlines()))) or None


def read_partitions(told_partitions: str, told_nodes: str) -> dict[str, Partition]:
    """Read what `scontrol show partition --oneliner` and `scontrol show node --oneliner` print."""
    nodes = [_fields(line) for line in told_nodes.splitlines() if line.startswith("NodeName=")]
    found = [_fields(line) for line in told_partitions.splitlines() if line.startswith("PartitionName=")]
    return {one["PartitionName"]: _partition(one, nodes) for one in found}


def _fields(line: str) -> dict[str, str]:
    """Read `KEY=VALUE KEY=VALUE …`. Values may have spaces; a key that comes again is part of a text of people."""
    parts = re.split(r"(?:^|\s+)(\w+)=", line.strip())
    return dict(reversed(list(zip(parts[1::2], parts[2::2], strict=True))))


def _partition(told: Mapping[str, str], nodes: list[dict[str, str]]) -> Partition:
    name, longest = told["PartitionName"], seconds(told.get("MaxTime", ""))
    allowed = told.get("AllowAccounts", "ALL")
    return Partition(
        name,
        told.get("Default") == "YES",
        told.get("State", "UP"),
        None if longest is None else longest // 60,
        tuple(_node(node, told) for node in nodes if name in node.get("Partitions", "").split(",")),
        _number(told.get("MaxNodes")),
        None if allowed == "ALL" else frozenset(allowed.lower().split(",")),
        _number(told.get("GraceTime")) or 0,
        told.get("PreemptMode", "OFF"),
    )


def _node(told: Mapping[str, str], partition: Mapping[str, str]) -> Node:
    """Read a node as its partition lends it. CPUEfctv (since 22.05): without those kept for the system."""
    cpus = _number(told.get("CPUEfctv")) or _number(told.get("CPUTot")) or 0
    memory = (_number(told.get("RealMemory")) or 0) - (_number(told.get("MemSpecLimit")) or 0)
    most_cpus, most_memory = _number(partition.get("MaxCPUsPerNode")), _number(partition.get("MaxMemPerNode"))
    return Node(
        told["NodeName"],
        cpus if most_cpus is None else min(cpus, most_cpus),
        memory if most_memory is None else min(memory, most_memory),
        gpus_in(told.get("Gres", "")),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def gpus_in(gres: str) -> dict[str, int]:
    """Return the GPUs by model ("" for none) in a list of Slurm's generic resources, as `gpu:a100:4(S:0-1),disk:9`."""
    found: dict[str, int] = {}
    for one in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = [word for word in one.split(":") if word != "no_consume"]
        if words[0] == "gpu":
            number = int(words.pop()) if words[-1].isdecimal() else 1
            model = words[1] if len(words) > 1 else ""
            found[model] = found.get(model, 0) + number
    return found


def why_not(partition: Partition, asked: Asked) -> str | None:
    """Return in words why a partition can never hold what a job asks for, even when all its nodes are empty.

    None if it can. A time limit is no reason for a job that saves and comes again.
    """
    if partition.state != "UP":
        return STATES.get(partition.state, f"its state is {partition.state}")
    if not partition.nodes:
        return "it has no nodes"
    longest = partition.max_minutes
    if asked.minutes is not None and longest is not None and asked.minutes > longest and not asked.warning:
        return f"{counted(asked.minutes, 'minute')}; its limit is {longest:,}"
    if partition.max_nodes is not None and asked.nodes > partition.max_nodes:
        return f"{counted(asked.nodes, 'node')}; a job may have {partition.max_nodes:,} there"
    if partition.accounts is not None and asked.account and asked.account.lower() not in partition.accounts:
        return f"account {asked.account}; it is for {', '.join(sorted(partition.accounts))}"
    return _why_no_node(partition.nodes, asked)


def _why_no_node(nodes: tuple[Node, ...], asked: Asked) -> str | None:
    of_model = f" of {asked.model}" if asked.model else ""
    amounts: tuple[tuple[int, str, Callable[[Node], int]], ...] = (
        (asked.threads, counted(asked.threads, "core"), lambda node: node.cpus),
        (asked.mem_mb, f"{asked.mem_mb:,} MB of memory", lambda node: node.memory_mb),
        (asked.gpus, f"{counted(asked.gpus, 'GPU')}{of_model}", lambda node: node.gpus_of(asked.model)),
    )
    for amount, words, of in amounts:
        largest = max(map(of, nodes))
        if amount > largest:
            there = f"its largest node has {largest:,}" if largest else "its nodes have none"
            return f"{words} on one node; {there}"
    holding = sum(all(of(node) >= amount for amount, _, of in amounts) for node in nodes)
    if holding >= asked.nodes:
        return None
    where = f"each of {asked.nodes:,} nodes" if asked.nodes > 1 else "one node"
    together = ", ".join(words for amount, words, _ in amounts if amount)
    return f"{together} on {where}; its nodes with all of that: {holding:,}"


def why_in_none(asked: Asked, found: Mapping[str, Partition], of_user: frozenset[str] | None) -> tuple[str, str] | None:
    """Return why none of the partitions that a job names can ever hold it, and what to do; None if one can.

    found: all partitions, by name. of_user: the user's accounts, None if unknown.
    """
    who = f"{asked.rule}, run {asked.run}" if asked.run else asked.rule
    named = asked.partitions or tuple(name for name, one in found.items() if one.is_default)
    key = f"`slurm_partition` of {asked.rule} in set-resources, or default-resources, of your profile"
    if not named:
        return f"{who}: it names no partition, and Slurm has no default one", f"set {key} to one of {', '.join(found)}"
    for name in named:
        if name not in found:
            near = difflib.get_close_matches(name, found, 1)
            guess = f": did you mean {near[0]}?" if near else ""
            return f"{who}: there is no partition {name}{guess}", f"set {key} to one of {', '.join(found)}"
    if asked.account and of_user is not None and asked.account.lower() not in of_user:
        step = f"set `slurm_account` in your profile to one of {', '.join(sorted(of_user))}"
        return f"{who}: you have no account {asked.account}", step
    reasons = {name: why_not(found[name], asked) for name in named}
    if None in reasons.values():
        return None
    why = "; ".join(f"partition {name}: {reason}" for name, reason in reasons.items())
    others = [name for name, one in found.items() if why_not(one, asked) is None]
    other = f"set {key} to {' or '.join(others)}, or" if others else "no other partition can hold it;"
    return f"{who}, {why}", f"{other} ask for less: {_keys(asked)}"


def _keys(asked: Asked) -> str:
    if asked.rule.startswith(GROUP):
        return "max-threads, set-threads and set-resources of your profile, or slurm.together without it"
    return f"{deciding_keys(asked.rule, asked.run)}; for cores also max-threads of your profile"


def refuse_what_fits_nowhere(
    jobs: Iterable[Any], found: Mapping[str, Partition], of_user: frozenset[str] | None, gpu_model: str | None
) -> None:
    """Raise VlmflowError with a line for each job of Snakemake that no partition it names can ever hold.

    found: what `partitions` returns. of_user: what `accounts` returns. gpu_model: `slurm.gpu_model`.
    """
    refusals = dict.fromkeys(filter(None, (why_in_none(Asked.of(job, gpu_model), found, of_user) for job in jobs)))
    if refusals:
        cause = "\n".join(["Slurm could never start these jobs:", *(f"  {why}: {step}" for why, step in refusals)])
        raise VlmflowError(cause, "`make doctor ON=slurm` looks at all of the workflow's rules; see docs/slurm.md")


def refuse_plan(workflow: Any, settings: Any) -> None:
    """End the process if Slurm could never start a planned job; an exception would print the Snakefile's traceback."""
    if workflow.remote_execution_settings is None:
        return  # the doctor's plan, which nobody runs
    try:
        refuse_without_slurm()
        # Not `workflow.is_local`: with -n Snakemake calls all jobs local.
        stay = {rule.name for rule in workflow.rules if rule.norun} | workflow._localrules
        sent = [job for job in workflow.dag.needrun_jobs() if job.rule.name not in stay]
        refuse_what_fits_nowhere(sent, partitions(), accounts(), settings.slurm.gpu_model)
    except VlmflowError as error:
        sys.exit(str(error))
