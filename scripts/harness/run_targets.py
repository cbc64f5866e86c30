"""Which file targets and resources a run needs: functions for the rules that have the wildcard `run`."""

import sys
from collections.abc import Callable
from typing import Any

from harness.targets import InputFunction
from vlmflow.archives.sources import read_sources
from vlmflow.config.model import Config

LOGS_MB = 1_000
"""Disk for logs and temporary files."""


def model_of(settings: Config) -> InputFunction:
    """Input function: the model folder of wildcard `run`."""
    return lambda wildcards: f"models/{settings.runs[wildcards.run].model}"


def data_of(settings: Config, name: str) -> InputFunction:
    """Input function: one file of the data set of wildcard `run`.

    It ends the process where nobody looks at the pictures of that data set: an exception would bring a traceback.
    """

    def data(wildcards: Any) -> str:
        dataset = settings.runs[wildcards.run].dataset
        if settings.datasets[dataset].skip_images:
            sys.exit(
                f"datasets.{dataset}.skip_images: true is for looking at the texts alone; run {wildcards.run} would "
                f"train on pictures that nobody checked\n  what to do: remove it, or name another data set "
                f"(runs.{wildcards.run}.dataset)"
            )
        return f"data/{dataset}/{name}"

    return data


def data_setting_of(settings: Config, key: str) -> InputFunction:
    """Params function: one setting of the data set of wildcard `run`."""
    return lambda wildcards: getattr(settings.datasets[settings.runs[wildcards.run].dataset], key)


def data_sources_of(settings: Config) -> InputFunction:
    """Params function: where the data set of wildcard `run` comes from, as the configuration says."""

    def sources(wildcards: Any) -> list[str]:
        dataset = settings.datasets[settings.runs[wildcards.run].dataset]
        return [address for split in ("train", "test") for address in dataset.addresses(split)]

    return sources


def picture_licences_of(settings: Config) -> InputFunction:
    """Params function: the licences of known picture sources, by the beginnings of the paths that they hold.

    None where the data set of wildcard `run` has no pictures.
    """

    def licences(wildcards: Any) -> dict[str, str]:
        if settings.datasets[settings.runs[wildcards.run].dataset].modality == "text":
            return {}
        sources = read_sources(settings.picture_sources).values()
        return {beginning: one.licence for one in sources if one.licence for beginning in one.members or {}}

    return licences


def cached_of(settings: Config) -> InputFunction:
    """Input function: the cached data set of wildcard `run`, where it trains from one."""
    return lambda wildcards: [f"cached/{wildcards.run}"] if settings.runs[wildcards.run].cached_dataset else []


def train_pictures_of(settings: Config) -> InputFunction:
    """Input function: the image manifest of the raw train split of wildcard `run`; none where it has no pictures."""

    def pictures(wildcards: Any) -> list[str]:
        dataset = settings.runs[wildcards.run].dataset
        return [f"images/{dataset}/train.jsonl"] if settings.datasets[dataset].has_manifests else []

    return pictures


def model_type_of(settings: Config) -> InputFunction:
    """Params function: ms-swift's name for the architecture of wildcard `run`'s model."""
    return lambda wildcards: settings.models[settings.runs[wildcards.run].model].model_type


def text_args_of(settings: Config) -> InputFunction:
    """Params function: those of wildcard `run`'s swift_args that change the text of its rows."""
    return lambda wildcards: settings.runs[wildcards.run].train.text_args


def gpus_of(settings: Config) -> InputFunction:
    """Resource function: one GPU per process of wildcard `run`, none where it trains on the CPU."""
    runs = settings.runs
    return lambda wildcards: runs[wildcards.run].processes if runs[wildcards.run].device == "cuda" else 0


def verify_gpus_of(settings: Config) -> InputFunction:
    """Resource function: the GPUs for comparing logits; none where the tensor proof alone is asked for."""
    gpus = gpus_of(settings)
    return lambda wildcards: gpus(wildcards) if settings.runs[wildcards.run].verify.logits else 0


def train_threads_of(settings: Config) -> InputFunction:
    """Threads function: the trainers of wildcard `run`, and the processes that load rows for each of them."""
    runs = settings.runs
    return lambda wildcards: runs[wildcards.run].processes * (1 + runs[wildcards.run].train.dataloader_workers)


def weights_disk_of(workflow: Any, settings: Config) -> InputFunction:
    """Resource function: the MB of a pod's own disk that a stage needs which reads or writes merged weights.

    In object storage a pod brings them and takes them away; on a volume they stay there, and the disk holds logs.
    """
    in_objects = workflow.storage_settings.default_storage_provider == "s3"
    return lambda wildcards: settings.runs[wildcards.run].resources.weights_mb if in_objects else LOGS_MB


def pod_template_of(settings: Config, gpus: Callable[[Config], InputFunction]) -> InputFunction:
    """Resource function: the pod template of a rule that needs torch, by whether wildcard `run` has GPUs there."""
    count = gpus(settings)
    return lambda wildcards: "gpu" if count(wildcards) else "train"
