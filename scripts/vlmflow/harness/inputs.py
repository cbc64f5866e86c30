"""The files that a rule needs: input functions for the rules, bound to workflow and settings in the Snakefile.

They refuse by ending the process, because Snakemake would print an exception with a traceback.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlmflow.config.data_settings import RAW_SPLITS, DatasetSettings
from vlmflow.config.model import Config
from vlmflow.config.raw_forms import form_of
from vlmflow.config.source import base_run, parse_source
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_files import local_files
from vlmflow.fetch.small_files import small_names
from vlmflow.harness.search_inputs import SearchInputs
from vlmflow.harness.volume_inputs import as_inputs
from vlmflow.raw.signatures import not_a_file

InputFunction = Callable[[Any], Any]
"""Takes Snakemake's wildcards, returns file names."""


class RuleInputs(SearchInputs):
    """The input functions. A method that takes wildcards is one; the others return one, or file names."""

    def __init__(self, workflow: Any, settings: Config) -> None:
        super().__init__(settings)
        self._workflow = workflow

    def everything(self) -> list[str]:
        """Return the targets of `rule all`: weights, pages and trackers' accounts of the selected runs, and data pages.

        Selected are the runs that the command names (--configfile, --config, a profile's configfile), or else all.
        """
        runs = self._workflow.config_settings.overwrite_config.get("runs") or self._settings.runs
        datasets = dict.fromkeys(self._settings.runs[run].dataset for run in runs)
        pages = [f"data-{dataset}" for dataset in datasets]
        pages += [f"{page}-{run}" for run in runs for page in ("lengths", "estimate", "run")]
        pages += [f"eval-{run}" for run in runs if self._settings.runs[run].evaluate]
        tracked = [f"tracked/{run}.json" for run in runs if self._settings.runs[run].track]
        return [*(f"merged/{run}" for run in runs), *(f"reports/{page}.html" for page in pages), *tracked]

    def local_raw(self, wildcards: Any) -> list[Any]:
        """The source of the raw file of wildcards `dataset` and `file`, if it is a local file.

        Ends the process if it does not exist.
        """
        return self._local_file(*raw_source(self._settings, wildcards))

    def local_model(self, wildcards: Any) -> list[Any]:
        """The files of wildcard `model`'s source, if that is a local folder.

        Ends the process if there is no such folder, no model in it, or one with code.
        """
        return self._files_of_model(wildcards.model)

    def local_model_files(self, wildcards: Any) -> list[Any]:
        """The files of wildcard `model`'s source but its weights, if that is a local folder."""
        return self._files_of_model(wildcards.model, weights=False)

    def base_run(self, wildcards: Any) -> list[str]:
        """The weights of another run, if they are wildcard `model`'s source."""
        run = base_run(self._settings.models[wildcards.model].source)
        return [f"merged/{run}"] if run else []

    def files_of_base_run(self, wildcards: Any) -> list[str]:
        """The small files of that run's own model: its training changes only weights, so no job waits for it."""
        run = base_run(self._settings.models[wildcards.model].source)
        return [f"model_files/{self._settings.runs[run].model}"] if run else []

    def _files_of_model(self, model: str, *, weights: bool = True) -> list[Any]:
        source, dequantize = self._settings.models[model].source, self._settings.models[model].dequantize
        place = parse_source(source)
        if base_run(source) or (isinstance(place, Path) and not place.is_dir() and not self._sees_all_volumes()):
            return []
        try:
            files = local_files(source, f"models.{model}.source", weights=weights, dequantize=dequantize)
        except VlmflowError as error:
            sys.exit(str(error))
        return as_inputs(self._workflow, map(Path, files if weights else small_names(files)))

    def raw(self, wildcards: Any) -> list[str]:
        """The raw files of wildcards `dataset` and `split`."""
        return list(raw_files(self._settings, wildcards.dataset, wildcards.split))

    def raw_of(self, split: str) -> InputFunction:
        """The raw files of one split of wildcard `dataset`; none if it has no such split."""
        return lambda wildcards: list(raw_files(self._settings, wildcards.dataset, split))

    def raw_accounts(self, wildcards: Any) -> list[str]:
        """The accounts of the fetched raw files of wildcards `dataset` and `split`, in the order of these files.

        In a rule without `split`, those of all raw splits.
        """
        split = wildcards.get("split")
        splits = [split] if split else splits_of(self._settings, wildcards.dataset)
        files = [Path(file) for split in splits for file in raw_files(self._settings, wildcards.dataset, split)]
        return [str(file.parent / ".fetched" / f"{file.name}.json") for file in files]

    def fixed_rows(self, wildcards: Any) -> list[Any]:
        """The files of fixed rows of wildcard `dataset`, in their order; none if it has none."""
        return self._fixed_rows(wildcards.dataset)

    def _fixed_rows(self, dataset: str) -> list[Any]:
        key, files = f"datasets.{dataset}.fixed_rows", self._settings.raw_datasets[dataset].fixed_row_files
        return [path for file in files for path in self._local_file(key, file)]

    def per_split(self, pattern: str) -> InputFunction:
        """`pattern` for every raw split of wildcard `dataset`, in the order of `splits_of`."""
        return lambda wildcards: self._of_splits(pattern, wildcards)

    def _of_splits(self, pattern: str, wildcards: Any) -> list[str]:
        splits = splits_of(self._settings, wildcards.dataset)
        return [pattern.format(dataset=wildcards.dataset, split=split) for split in splits]

    def per_part(self, pattern: str) -> list[str]:
        """`pattern` for every pod's part, with its other wildcards unchanged."""
        parts = range(1, self._settings.cluster.pods_per_stage + 1)
        return [pattern.replace("{part}", str(number)) for number in parts]

    def manifests(self, wildcards: Any) -> list[str]:
        """The image manifests of wildcard `dataset`, one per split (`splits_of`); none if it has no pictures."""
        if not self._settings.datasets[wildcards.dataset].has_manifests:
            return []
        return self._of_splits("images/{dataset}/{split}.jsonl", wildcards)

    def hashes(self, wildcards: Any) -> list[str]:
        """The picture hashes of every raw split of wildcard `dataset`, or what it mixes; none without pictures or test.

        If test is taken from the raw train split, the hashes of train include its pictures.
        """
        members = self._settings.members(wildcards.dataset)
        if not any(member.test or member.test_share for member in members.values()):
            return []
        return self._with_pictures(members, "images/{member}/{split}.hashes.jsonl")

    def member_pictures(self, wildcards: Any) -> list[str]:
        """The image manifests of the data sets that the mixture `dataset` mixes."""
        return self._with_pictures(self._settings.members(wildcards.dataset), "images/{member}/{split}.jsonl")

    def _with_pictures(self, members: Mapping[str, DatasetSettings], pattern: str) -> list[str]:
        """Return files of every raw split of those data sets that have pictures."""
        return [
            pattern.format(member=name, split=split)
            for name, member in members.items()
            if member.has_manifests
            for split in splits_of(self._settings, name)
        ]

    def of_members(self, *files: str) -> InputFunction:
        """Some files of each of the data sets that the mixture `dataset` mixes.

        It ends the process if one has skip_images.
        """

        def named(wildcards: Any) -> list[str]:
            self._refuse_unchecked_pictures(wildcards.dataset, f"mixture {wildcards.dataset} would have")
            return [f"data/{member}/{file}" for member in self._settings.members(wildcards.dataset) for file in files]

        return named

    def _refuse_unchecked_pictures(self, dataset: str, what: str) -> None:
        """End the process if a data set, or one that it mixes, has skip_images. what: what would have its pictures."""
        for name, member in self._settings.members(dataset).items():
            if member.skip_images:
                sys.exit(
                    f"datasets.{name}.skip_images: true is only for inspecting texts; {what} unchecked pictures\n"
                    "  what to do: remove it, or choose another data set"
                )

    def model(self, wildcards: Any) -> str:
        """The model folder of wildcard `run`."""
        return f"models/{self._settings.runs[wildcards.run].model}"

    def model_files(self, wildcards: Any) -> str:
        """The small files of wildcard `run`'s model: all but its weights."""
        return f"model_files/{self._settings.runs[wildcards.run].model}"

    def data(self, name: str) -> InputFunction:
        """One file of the data set of wildcard `run`.

        It ends the process if the data set has skip_images: its pictures are unchecked.
        """

        def file(wildcards: Any) -> str:
            dataset = self._settings.runs[wildcards.run].dataset
            self._refuse_unchecked_pictures(dataset, f"run {wildcards.run} would train on")
            return f"data/{dataset}/{name}"

        return file

    def split_rows(self, wildcards: Any) -> str:
        """The rows of wildcard `split` in the data set of wildcard `run`, as `data`."""
        return str(self.data(f"{wildcards.split}.jsonl")(wildcards))

    def run_pictures(self, wildcards: Any) -> list[str]:
        """The image manifests of all raw splits of the data set of wildcard `run`; none if it has no pictures."""
        return self._manifests_of_run(wildcards, *RAW_SPLITS)

    def _manifests_of_run(self, wildcards: Any, *splits: str) -> list[str]:
        dataset = self._settings.runs[wildcards.run].dataset
        named = splits_of(self._settings, dataset) if self._settings.datasets[dataset].has_manifests else []
        return [f"images/{dataset}/{split}.jsonl" for split in named if split in splits]

    def evaluated(self, wildcards: Any) -> list[str]:
        """The evaluations of wildcard `run`: of val, or of the splits that it names."""
        return [f"eval/{wildcards.run}/{split}" for split in self._settings.runs[wildcards.run].evaluation.splits]

    def evaluated_rows(self, wildcards: Any) -> list[str]:
        """The data set's files of the same splits."""
        run = self._settings.runs[wildcards.run]
        return [str(self.data(f"{split}.jsonl")(wildcards)) for split in run.evaluation.splits]

    def raw_gold(self, split: str) -> InputFunction:
        """The raw files of one split of what wildcard `run` trains on that have gold answers (`_with_gold`)."""
        return lambda wildcards: [
            file for dataset in self._with_gold(wildcards) for file in raw_files(self._settings, dataset, split)
        ]

    def fixed_rows_gold(self, wildcards: Any) -> list[Any]:
        """The files of fixed rows of the same data sets."""
        return [file for dataset in self._with_gold(wildcards) for file in self._fixed_rows(dataset)]

    def _with_gold(self, wildcards: Any) -> list[str]:
        """Return the data set of wildcard `run`, or those that it mixes, if their raw rows have gold answers."""
        members = self._settings.members(self._settings.runs[wildcards.run].dataset)
        return [name for name, member in members.items() if form_of(member.kind).gold is not None]

    def answered(self, wildcards: Any) -> list[str]:
        """The answers of base and tuned model on the same splits, if the run of wildcard `run` wants to show them."""
        evaluation = self._settings.runs[wildcards.run].evaluation
        return [f"answers/{wildcards.run}/{split}" for split in evaluation.splits] if evaluation.answers else []

    def train_pictures(self, wildcards: Any) -> list[str]:
        """The image manifests of the raw splits that wildcard `run` trains on, and chooses by; none without any."""
        return self._manifests_of_run(wildcards, "train", "val")

    def _local_file(self, key: str, source: str) -> list[Any]:
        """Return a local data file as an input of its rule; [] for a file on the hub.

        Ends the process if there is no such file: Snakemake itself would continue with the file in raw/, made from
        another one.
        """
        place = parse_source(source)
        if not isinstance(place, Path):
            return []
        if not place.is_file() and self._sees_all_volumes():
            sys.exit(f"{key}: {not_a_file(place.absolute())}")
        return as_inputs(self._workflow, [place])

    def _sees_all_volumes(self) -> bool:
        """Return whether this machine sees every local source: a laptop does not have the volumes of its pods."""
        return self._workflow.storage_registry.default_storage_provider is None


def splits_of(settings: Config, dataset: str) -> list[str]:
    """Return the raw splits of a data set, in the order of RAW_SPLITS: train, and those others that it names.

    A mixture has no raw rows, and all splits.
    """
    own = settings.raw_datasets.get(dataset)
    return [split for split in RAW_SPLITS if own is None or getattr(own, split)]


def raw_files(settings: Config, dataset: str, split: str) -> dict[str, str]:
    """Return the targets of a data set's raw split, `raw/DATASET/NAME OF THE SOURCE FILE`, with their sources."""
    addresses = settings.raw_datasets[dataset].addresses(split)
    return {f"raw/{dataset}/{parse_source(address).name}": address for address in addresses}


def raw_source(settings: Config, wildcards: Any) -> tuple[str, str]:
    """Return the key and the address of the raw file of wildcards `dataset` and `file`.

    Ends the process if the data set has no such file.
    """
    files: dict[str, tuple[str, str]] = {}
    for split in RAW_SPLITS:
        key = f"datasets.{wildcards.dataset}.{split}"
        files |= {raw: (key, source) for raw, source in raw_files(settings, wildcards.dataset, split).items()}
    wanted = f"raw/{wildcards.dataset}/{wildcards.file}"
    if wanted not in files:
        sys.exit(
            f"{wanted}: data set {wildcards.dataset} has no such file\n  what to do: ask for one of {', '.join(files)}"
        )
    return files[wanted]
