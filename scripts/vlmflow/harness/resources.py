"""The kinds of stages that wait in no queue of their own on Slurm: they run here, or several of them in one job.

The threads and resources of rules that depend on the run: functions bound to the settings in the Snakefile.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vlmflow.config.model import Config
from vlmflow.config.run_settings import RunSettings
from vlmflow.config.source import base_run
from vlmflow.config.strategies import tuner_of
from vlmflow.harness.stage import jobs_leave

KINDS: dict[str, tuple[str, ...]] = {
    "fetch": ("fetch_rows", "fetch_images", "fetch_model", "fetch_model_files"),
    "data": (
        *("resolve_images", "join_images", "hash_pictures", "join_hashes"),
        *("convert_rows", "validate_sharegpt", "mix_rows", "find_near_duplicates"),
        *("measure_lengths", "fit_rows", "choose_rows", "estimate_run"),
    ),
    "pages": (
        *("data_page", "lengths_page", "estimate_page", "run_page", "eval_page", "search_page"),
        *("publish_merged", "track", "propose", "tell", "choose_best"),
    ),
}
"""The rules of each kind. What trains, merges, proves and evaluates always has jobs of its own."""


def arrange(workflow: Any, settings: Config) -> None:
    """Let stages run where Snakemake runs (`slurm.here`), or connected ones in one job (`slurm.together`).

    The cores of this machine, a login node, limit what runs here, and no job of Slurm.

    Call it before Snakemake makes its plan. A group that the call gives a rule (--groups) stays.
    """
    workflow.register_resource("_cores", None)
    workflow.resource_settings.cores = None
    names = {rule.name for rule in workflow.rules}
    workflow.localrules(*(rule for kind in settings.slurm.here for rule in KINDS[kind] if rule in names))
    together = {rule: kind for kind in settings.slurm.together for rule in KINDS[kind]}
    given = workflow.group_settings.overwrite_groups
    workflow.group_settings.overwrite_groups = {**together, **given}


LOGS_MB = 1_000
"""Disk for logs and temporary files."""

TRAINING_MB = 20_000
"""Disk for logs and temporary files of a training, with ms-swift's caches."""


class RuleResources:
    """Functions for a rule's `threads` and `resources`; each takes Snakemake's wildcards, and reads `run`.

    It is not named `Resources`: a Snakefile shares its global names with Snakemake, which has a class of that name.
    """

    def __init__(self, workflow: Any, settings: Config) -> None:
        self._runs: dict[str, RunSettings] = settings.runs
        self._models = settings.models
        self._in_objects = workflow.storage_settings.default_storage_provider == "s3"
        self._workflow = workflow

    def train_nodes(self, wildcards: Any) -> int:
        """The nodes of a training, each with the rule's other resources; on one machine there is one of it."""
        return self._runs[wildcards.run].nodes if jobs_leave(self._workflow) else 1

    def train_threads(self, wildcards: Any) -> int:
        """The trainers, and the processes that load rows for each of them."""
        return self._trainers(wildcards) * (1 + self._runs[wildcards.run].train.dataloader_workers)

    def train_gpus(self, wildcards: Any) -> int:
        """One GPU per trainer; 0 if the run trains on the CPU."""
        return self._trainers(wildcards) if self._runs[wildcards.run].device == "cuda" else 0

    def _trainers(self, wildcards: Any) -> int:
        """The trainers of a node, or all of them on one machine."""
        run = self._runs[wildcards.run]
        return run.processes if jobs_leave(self._workflow) else run.ranks

    def template(self, gpus: Callable[[Any], int]) -> Callable[[Any], str]:
        """The pod template of a rule that needs torch, and these GPUs."""
        return lambda wildcards: "gpu" if gpus(wildcards) else "train"

    def node_gpus(self, wildcards: Any) -> int:
        """The GPUs of one node of the run, for a stage on one node; 0 if the run is on the CPU."""
        run = self._runs[wildcards.run]
        return run.processes if run.device == "cuda" else 0

    def answer_gpus(self, wildcards: Any) -> int:
        """The GPUs of a server that the rule runs; 0 if another one answers."""
        return self.node_gpus(wildcards) if self._runs[wildcards.run].answer.url is None else 0

    def answer_template(self, wildcards: Any) -> str:
        """The pod template of the stage that asks models; one of its own, with a key, if another server answers."""
        asks_another = self._runs[wildcards.run].answer.url is not None
        return "answer" if asks_another else self.template(self.node_gpus)(wildcards)

    def verify_gpus(self, wildcards: Any) -> int:
        """The GPUs for comparing logits; 0 if only the tensors are checked."""
        return self.node_gpus(wildcards) if self._runs[wildcards.run].verify.logits else 0

    def weights_disk(self, wildcards: Any) -> int:
        """The disk of a pod, in MB, for a stage that reads or writes merged weights.

        With object storage a pod downloads and uploads them; on a volume they stay, and the disk holds only logs.
        """
        weights = self._runs[wildcards.run].resources.weights_mb
        return weights + self._trained_weights(wildcards.run) if self._in_objects else LOGS_MB

    def fetched_disk(self, wildcards: Any) -> int:
        """The disk of a pod that fetches wildcard `model`, in MB: as `weights_disk` for the weights of another run."""
        run = base_run(self._models[wildcards.model].source)
        return self.weights_disk(SimpleNamespace(run=run)) if run else LOGS_MB

    def train_disk(self, wildcards: Any) -> int:
        """The disk of a training's pod, in MB: with object storage also the weights that it uploads."""
        return TRAINING_MB + (self._trained_weights(wildcards.run) if self._in_objects else 0)

    def _trained_weights(self, run: str) -> int:
        """The MB of weights that a training releases: none but a small adapter, or all of the model's, in float32."""
        settings = self._runs[run]
        return 0 if tuner_of(settings.tuner).trains_adapter else 2 * settings.resources.weights_mb
