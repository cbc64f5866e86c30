"""A job of Snakemake, as its rule declares it; every executor reads jobs by this."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ASKED_BY = {
    **dict.fromkeys(
        ("train_smoke", "train_model"),
        "runs.{run}.nodes, processes, device, train.dataloader_workers and resources",
    ),
    "verify_merged": "runs.{run}.processes, device, verify.logits and resources",
}
OTHERS_ASK = "the rule's own threads and resources (set-threads, set-resources), and runs.{run}.resources"
"""The keys that decide what a rule requests, by rules."""


def deciding_keys(rule: str, run: str) -> str:
    """Return the keys that decide what the jobs of a rule request, for people. run: "" if unknown."""
    return ASKED_BY.get(rule, OTHERS_ASK).format(run=run or "NAME")


@dataclass(frozen=True)
class RuleJob:
    """One job and the resources that its rule declares.

    mem_mb, disk_mb: MB (10⁶ bytes), 0 if not declared. runtime: minutes, 0 for no limit.
    template: the name of its pod template, None for the default one. nodes: its pods, each with these resources. runs:
    with several, the folder with the run folders of its run.
    """

    rule: str
    wildcards: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    mem_mb: int = 0
    disk_mb: int = 0
    runtime: int = 0
    gpus: int = 0
    template: str | None = None
    nodes: int = 1
    runs: str = ""

    @classmethod
    def of(cls, job: Any) -> Self:
        """Read these from a job of Snakemake."""
        resources = dict(job.resources)
        wildcards, nodes = dict(getattr(job, "wildcards_dict", {})), int(resources.get("nodes") or 1)
        return cls(
            rule="+".join(job.rules),
            wildcards=wildcards,
            threads=job.threads,
            mem_mb=int(resources.get("mem_mb") or 0),
            disk_mb=int(resources.get("disk_mb") or 0),
            runtime=int(resources.get("runtime") or 0),
            gpus=int(resources.get("gpu") or 0),
            template=resources.get("pod_template"),
            nodes=nodes,
            # A search's trial has no wildcard `run`; it reads fitted/RUN.
            runs=f"{job.params.run_store}/{wildcards.get('run') or Path(job.input.rows).name}" if nodes > 1 else "",
        )

    @property
    def words(self) -> str:
        """The job, for people: rule name=value."""
        return " ".join([self.rule, *(f"{name}={value}" for name, value in self.wildcards.items())])
