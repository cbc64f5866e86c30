"""Which file targets a data set needs: functions for the rules; run_targets has those of a run.

What they refuse, they refuse by ending the process: Snakemake shows an exception of theirs with a traceback.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness.storage.volume_inputs import as_inputs
from vlmflow.archives.sources import read_sources
from vlmflow.config.model import Config
from vlmflow.config.raw_forms import module_of
from vlmflow.config.source import parse_source
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.commits import revision_of
from vlmflow.fetch.model_files import list_files, local_files

InputFunction = Callable[[Any], Any]
"""Takes Snakemake's wildcards, gives file names."""


def names_of(settings: Config) -> dict[str, str]:
    """Give the constraints of all wildcards that several rules have: the configuration's names, and the raw splits."""
    return {
        "run": one_of(settings.runs),
        "model": one_of(settings.models),
        "dataset": one_of(settings.datasets),
        "split": "train|test",
    }


def everything(workflow: Any, settings: Config) -> list[str]:
    """Give what `rule all` asks for: the weights of the meant runs, and the pages of their data and of its lengths.

    Meant are the runs that the call itself names (--configfile, --config, a profile's configfile), else all.
    """
    runs = workflow.config_settings.overwrite_config.get("runs") or settings.runs
    datasets = dict.fromkeys(settings.runs[run].dataset for run in runs)
    pages = [*(f"data-{dataset}" for dataset in datasets), *(f"lengths-{run}" for run in runs)]
    return [*(f"merged/{run}" for run in runs), *(f"reports/{page}.html" for page in pages)]


def splits_of(settings: Config, dataset: str) -> list[str]:
    """Give the raw splits that a data set has: train, and test where it names one."""
    return ["train", "test"] if settings.datasets[dataset].test else ["train"]


def raw_files(settings: Config, dataset: str, split: str) -> dict[str, str]:
    """Give the targets that hold a data set's raw split, `raw/DATASET/NAME OF THE SOURCE FILE`, with their sources."""
    addresses = settings.datasets[dataset].addresses(split)
    return {f"raw/{dataset}/{parse_source(address).name}": address for address in addresses}


def raw_source(settings: Config) -> InputFunction:
    """Params function: the source of the raw file of wildcards `dataset` and `file`."""
    return lambda wildcards: _raw_source(settings, wildcards)[1]


def local_raw_of(workflow: Any, settings: Config) -> InputFunction:
    """Input function: the source of the raw file of wildcards `dataset` and `file`, where it is a local file."""

    def local_raw(wildcards: Any) -> list[Any]:
        key, source = _raw_source(settings, wildcards)
        return _local_file(workflow, key, source)

    return local_raw


def _raw_source(settings: Config, wildcards: Any) -> tuple[str, str]:
    """Give the key and the address of a raw file; end the process where the data set has no such file."""
    files: dict[str, tuple[str, str]] = {}
    for split in ("train", "test"):
        key = f"datasets.{wildcards.dataset}.{split}"
        files |= {raw: (key, source) for raw, source in raw_files(settings, wildcards.dataset, split).items()}
    wanted = f"raw/{wildcards.dataset}/{wildcards.file}"
    if wanted not in files:
        sys.exit(f"{wanted}: data set {wildcards.dataset} has no such raw file; it has {', '.join(files)}")
    return files[wanted]


def _local_file(workflow: Any, key: str, source: str) -> list[Any]:
    """Give a local data file as an input of its rule; what the hub has is none.

    Ends the process where there is no such file: Snakemake itself would go on with what is in raw/, made of another
    file.
    """
    place = parse_source(source)
    if not isinstance(place, Path):
        return []
    if not place.is_file() and _sees_all_volumes(workflow):
        what = "is a folder, not a file" if place.is_dir() else "is not there"
        sys.exit(f"{key}: {place.absolute()} {what}\n  what to do: give the path of the file")
    return as_inputs(workflow, [place])


def local_model(workflow: Any, source: str, model: str) -> list[Any]:
    """Give the files of a local model folder as inputs of its rule; what the hub has is none.

    Ends the process where there is no such folder, no model in it, or one that is more than data.
    """
    place = parse_source(source)
    if isinstance(place, Path) and not place.is_dir() and not _sees_all_volumes(workflow):
        return []
    try:
        return as_inputs(workflow, map(Path, local_files(source, f"models.{model}.source")))
    except VlmflowError as error:
        sys.exit(str(error))


def _sees_all_volumes(workflow: Any) -> bool:
    """Tell whether a local source that is not here is nowhere: a laptop has not the volumes of its pods."""
    return workflow.storage_registry.default_storage_provider is None


def local_state(source: str) -> list[list[int]]:
    """Give bytes and time of a local data file, or of every file of a local model; nothing for what is not here.

    Snakemake itself reruns for a newer file alone, and one that is moved here may be old. Times are in whole seconds:
    every way of copying that keeps times keeps these.
    """
    place = parse_source(source)
    if not isinstance(place, Path) or not place.exists():
        return []
    files = [place / name for name in list_files(place, source).names] if place.is_dir() else [place]
    return [[stat.st_size, int(stat.st_mtime)] for stat in map(Path.stat, files)]


def raw_of(settings: Config, split: str | None = None) -> InputFunction:
    """Input function: the raw files of wildcard `dataset`, and of `split` or else the wildcard of that name."""
    return lambda wildcards: list(raw_files(settings, wildcards.dataset, split or wildcards.split))


def raw_accounts_of(settings: Config) -> InputFunction:
    """Input function: what was fetched, file by file in the order of `raw_of`.

    Of wildcards `dataset` and `split`; in a rule without `split`, of all raw splits.
    """

    def accounts(wildcards: Any) -> list[str]:
        split = wildcards.get("split")
        splits = [split] if split else splits_of(settings, wildcards.dataset)
        files = [Path(file) for split in splits for file in raw_files(settings, wildcards.dataset, split)]
        return [str(file.parent / ".fetched" / f"{file.name}.json") for file in files]

    return accounts


def fetched_of(settings: Config) -> InputFunction:
    """Input function: the account of the fetched pictures of wildcards `dataset` and `split`, where it fetches any."""
    return lambda wildcards: (
        [f"images/{wildcards.dataset}/{wildcards.split}.fetched.json"]
        if settings.datasets[wildcards.dataset].fetch_images
        else []
    )


def picture_roots(settings: Config) -> InputFunction:
    """Params function: the picture roots of wildcard `dataset`, the store of fetched pictures the last of them."""

    def roots(wildcards: Any) -> list[str]:
        dataset = settings.datasets[wildcards.dataset]
        return [*dataset.image_roots, *([settings.stores.fetched_pictures] if dataset.fetch_images else [])]

    return roots


def picture_revisions(settings: Config) -> InputFunction:
    """Params function: where the known sources' pictures lie, for Snakemake to see that this has changed."""

    def revisions(wildcards: Any) -> list[list[Any]]:
        return [
            [name, source.members, source.archive, source.one_by_one, source.archive and revision_of(source.archive)]
            for name, source in read_sources(settings.picture_sources).items()
        ]

    return revisions


def part_suffix(settings: Config) -> str:
    """Give what stands in the names of a stage's results where several pods share it: `.{part}-of-4`, else nothing."""
    parts = settings.cluster.pods_per_stage
    return f".{{part}}-of-{parts}" if parts > 1 else ""


def part_of(settings: Config) -> InputFunction:
    """Params function: which part of how many wildcard `part` is (see `parts.Part`); the whole without it."""
    return lambda wildcards: [int(wildcards.get("part", 1)), settings.cluster.pods_per_stage]


def parts_of(settings: Config, pattern: str) -> list[str]:
    """Give `pattern` for every part, with its other wildcards as they are."""
    return [pattern.replace("{part}", str(number)) for number in range(1, settings.cluster.pods_per_stage + 1)]


def per_split(settings: Config, pattern: str) -> InputFunction:
    """Input function: `pattern` for every raw split of wildcard `dataset`, in the order of `splits_of`."""
    return lambda wildcards: [
        pattern.format(dataset=wildcards.dataset, split=split) for split in splits_of(settings, wildcards.dataset)
    ]


def manifests_of(settings: Config) -> InputFunction:
    """Input function: the image manifests of wildcard `dataset`, one per raw split; none where it has no pictures."""
    manifests = per_split(settings, "images/{dataset}/{split}.jsonl")
    return lambda wildcards: manifests(wildcards) if settings.datasets[wildcards.dataset].has_manifests else []


def mended_of(workflow: Any, settings: Config) -> InputFunction:
    """Input function: the files of mended rows of wildcard `dataset`, in their order; none where there are no such."""

    def mended(wildcards: Any) -> list[Any]:
        dataset = wildcards.dataset
        key, files = f"datasets.{dataset}.mended", settings.datasets[dataset].mended_files
        return [path for file in files for path in _local_file(workflow, key, file)]

    return mended


def choice_of(settings: Config) -> InputFunction:
    """Params function: which rows of wildcards `dataset` and `split` are used (a RowChoice)."""
    return lambda wildcards: settings.datasets[wildcards.dataset].choice(wildcards.split).model_dump(mode="json")


def read_columns_of(settings: Config) -> InputFunction:
    """Params function: the columns that are read of wildcard `dataset`, where it is parquet; null for all."""
    return lambda wildcards: settings.datasets[wildcards.dataset].read_columns


def one_prompt_of(settings: Config) -> InputFunction:
    """Params function: whether all rows of wildcard `dataset` have the same prompt."""
    return lambda wildcards: settings.datasets[wildcards.dataset].one_prompt


def hashes_of(settings: Config) -> InputFunction:
    """Input function: the picture hashes of every raw split of wildcard `dataset`; none without pictures or test split.

    Where test is taken from the raw train split, the hashes of train hold its pictures too.
    """
    tables = per_split(settings, "images/{dataset}/{split}.hashes.jsonl")

    def hashes(wildcards: Any) -> list[str]:
        dataset = settings.datasets[wildcards.dataset]
        return tables(wildcards) if dataset.has_manifests and (dataset.test or dataset.test_share) else []

    return hashes


def hashes_to_drop_by(settings: Config) -> InputFunction:
    """Input function: the same, where wildcard `dataset` leaves near-duplicates of its test split out."""
    hashes = hashes_of(settings)
    return lambda wildcards: hashes(wildcards) if settings.datasets[wildcards.dataset].near_duplicates.drop else []


def distance_to_drop_by(settings: Config) -> InputFunction:
    """Params function: the distance of what is left out; 0 where nothing is, so that it makes nothing stale."""

    def distance(wildcards: Any) -> int:
        near = settings.datasets[wildcards.dataset].near_duplicates
        return near.picture_distance if near.drop else 0

    return distance


def fire_datasets(settings: Config) -> str:
    """Give a wildcard constraint: the names of the data sets of kind fire, which has rules of its own."""
    return one_of(name for name, block in settings.datasets.items() if block.kind == "fire")


def other_datasets(settings: Config) -> str:
    """Give a wildcard constraint: the names of the data sets of all other kinds."""
    return one_of(name for name, block in settings.datasets.items() if block.kind != "fire")


def code_of_kind(settings: Config, code: Callable[..., str], script: str) -> InputFunction:
    """Params function: the digest of a script's code (see `code_digest`), with the raw form of wildcard `dataset`."""
    return lambda wildcards: code(script, module_of(settings.datasets[wildcards.dataset].kind))


def one_of(names: Iterable[str]) -> str:
    """Give a wildcard constraint: any of the names, or nothing at all where there are none."""
    return "|".join(map(re.escape, names)) or "$^"
