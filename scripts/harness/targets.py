"""Which file targets a data set and a run need: input functions for the rules."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from snakemake.exceptions import WorkflowError

from harness.storage.volume_inputs import as_inputs
from vlmflow.config.model import Config
from vlmflow.config.source import parse_source
from vlmflow.fetch.model_folder import local_files

InputFunction = Callable[[Any], Any]
"""Takes Snakemake's wildcards, gives file names."""


def splits_of(settings: Config, dataset: str) -> list[str]:
    """Give the raw splits that a data set has: train, and test where it names one."""
    return ["train", "test"] if settings.datasets[dataset].test else ["train"]


def raw_file(settings: Config, dataset: str, split: str) -> str:
    """Give the target that holds a data set's raw split: `raw/DATASET/NAME OF THE SOURCE FILE`."""
    return f"raw/{dataset}/{parse_source(getattr(settings.datasets[dataset], split)).name}"


def raw_source(settings: Config) -> InputFunction:
    """Params function: the source of the raw file of wildcards `dataset` and `file`."""

    def source(wildcards: Any) -> str:
        for split in splits_of(settings, wildcards.dataset):
            if raw_file(settings, wildcards.dataset, split) == f"raw/{wildcards.dataset}/{wildcards.file}":
                return getattr(settings.datasets[wildcards.dataset], split)
        raise WorkflowError(
            f"raw/{wildcards.dataset}/{wildcards.file}: data set {wildcards.dataset} has no such raw file; it has "
            + ", ".join(
                raw_file(settings, wildcards.dataset, split) for split in splits_of(settings, wildcards.dataset)
            )
        )

    return source


def local_data(workflow: Any, source: str, dataset: str) -> list[Any]:
    """Give a local data file as an input of its rule; what the hub has is none.

    Raises WorkflowError where there is no such file: Snakemake itself would go on with what is in raw/, made of
    another file.
    """
    place = parse_source(source)
    if not isinstance(place, Path):
        return []
    if not place.is_file() and _sees_all_volumes(workflow):
        raise WorkflowError(f"data set {dataset}: there is no file {place}; mend its source (datasets.{dataset})")
    return as_inputs(workflow, [place])


def local_model(workflow: Any, source: str, model: str) -> list[Any]:
    """Give the files of a local model folder as inputs of its rule; what the hub has is none.

    Raises VlmflowError where there is no such folder, or no model in it.
    """
    place = parse_source(source)
    if isinstance(place, Path) and not place.is_dir() and not _sees_all_volumes(workflow):
        return []
    return as_inputs(workflow, map(Path, local_files(source, f"models.{model}.source")))


def _sees_all_volumes(workflow: Any) -> bool:
    """Tell whether a local source that is not here is nowhere: a laptop has not the volumes of its pods."""
    return workflow.storage_registry.default_storage_provider is None


def local_size(source: str) -> int:
    """Give the bytes of a local source, 0 for what is not here: a file that is moved here may have an old time."""
    place = parse_source(source)
    return place.stat().st_size if isinstance(place, Path) and place.is_file() else 0


def raw_of(settings: Config) -> InputFunction:
    """Input function: the raw file of wildcards `dataset` and `split`."""
    return lambda wildcards: raw_file(settings, wildcards.dataset, wildcards.split)


def per_split(settings: Config, pattern: str) -> InputFunction:
    """Input function: `pattern` for every raw split of wildcard `dataset`, in the order of `splits_of`."""
    return lambda wildcards: [
        pattern.format(dataset=wildcards.dataset, split=split, raw=raw_file(settings, wildcards.dataset, split))
        for split in splits_of(settings, wildcards.dataset)
    ]


def datasets_of_kind(settings: Config, *kinds: str) -> str:
    """Give a wildcard constraint: the names of the data sets of some kinds."""
    return one_of(name for name, block in settings.datasets.items() if block.kind in kinds)


def one_of(names: Iterable[str]) -> str:
    """Give a wildcard constraint: any of the names, or nothing at all where there are none."""
    return "|".join(map(re.escape, names)) or "$^"


def model_of(settings: Config) -> InputFunction:
    """Input function: the model folder of wildcard `run`."""
    return lambda wildcards: f"models/{settings.runs[wildcards.run].model}"


def data_of(settings: Config, name: str) -> InputFunction:
    """Input function: one file of the data set of wildcard `run`."""
    return lambda wildcards: f"data/{settings.runs[wildcards.run].dataset}/{name}"


def train_pictures_of(settings: Config) -> InputFunction:
    """Input function: the image manifest of the train split of wildcard `run`."""
    return lambda wildcards: f"images/{settings.runs[wildcards.run].dataset}/train.jsonl"


def model_type_of(settings: Config) -> InputFunction:
    """Params function: ms-swift's name for the architecture of wildcard `run`'s model."""
    return lambda wildcards: settings.models[settings.runs[wildcards.run].model].model_type


def gpus_of(settings: Config) -> InputFunction:
    """Resource function: one GPU per process of wildcard `run`, none where it trains on the CPU."""
    runs = settings.runs
    return lambda wildcards: runs[wildcards.run].processes if runs[wildcards.run].device == "cuda" else 0


def verify_gpus_of(settings: Config) -> InputFunction:
    """Resource function: the GPUs for comparing logits; none where the tensor proof alone is asked for."""
    gpus = gpus_of(settings)
    return lambda wildcards: gpus(wildcards) if settings.runs[wildcards.run].verify.logits else 0


def pod_template_of(settings: Config, gpus: Callable[[Config], InputFunction]) -> InputFunction:
    """Resource function: the pod template of a rule that needs torch, by whether wildcard `run` has GPUs there."""
    count = gpus(settings)
    return lambda wildcards: "gpu" if count(wildcards) else "train"
