"""The allowed values of wildcards, and the names of the results of shared stages.

Files outside the storage of the targets as inputs of a rule: a local data set, a local model.

The files that the rules of a search need: those of its run, and those of its steps.

The files that a rule needs: input functions for the rules, bound to workflow and settings in the Snakefile.

They refuse by ending the process, because Snakemake would print an exception with a traceback.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from snakemake.iocontainers import Wildcards

from vlmflow.config.data_settings import RAW_SPLITS, DatasetSettings
from vlmflow.config.model import Config
from vlmflow.config.raw_forms import form_of
from vlmflow.config.search_settings import slots_of, step_before, steps_of
from vlmflow.config.source import base_run, parse_source
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_files import local_files
from vlmflow.fetch.placed import small_names
from vlmflow.harness import patches
from vlmflow.raw.damaged_file import not_a_file


class Names:
    """The configuration's names, as constraints of wildcards."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        parts = settings.cluster.pods_per_stage
        self.part = f".{{part}}-of-{parts}" if parts > 1 else ""
        """The part in the names of a stage's results if several pods share it: `.{part}-of-4`, otherwise ""."""
        self.mixtures = _one_of(settings.mixtures)
        """The constraint of wildcard `dataset` in the rule that mixes data sets."""
        self.datasets = _one_of(settings.datasets)
        """The constraint of wildcard `dataset` in rules for every data set; other rules take those with raw rows."""

    def constraints(self) -> dict[str, str]:
        """Return the constraints of the wildcards that several rules have."""
        return {
            "run": _one_of(self._settings.runs),
            "model": _one_of(self._settings.models),
            "dataset": _one_of(self._settings.raw_datasets),
            "split": "|".join(RAW_SPLITS),
            "search": _one_of(self._settings.search),
            **dict.fromkeys(("round", "rung", "slot"), r"0|[1-9]\d*"),
        }


def _one_of(names: Iterable[str]) -> str:
    """Return a wildcard constraint that matches these names, or nothing if there are none."""
    return "|".join(map(re.escape, names)) or "$^"


CLOCKS_DIFFER = 60.0
"""Seconds by which the clock of a file server may be ahead of this machine's: no stage makes its files so fast."""


def refuse_unusable(file: Path) -> None:
    """End the process if a file that exists cannot be read, or its time is in the future.

    Snakemake reads inputs, too, and would say that its own folder cannot be written to. It would take whatever is made
    of a file of the future for older, and remove it, in every call.
    """
    try:
        if not file.exists():
            return
        readable = os.access(file, os.R_OK)
    except PermissionError:  # a folder above it is closed
        readable = False
    if not readable:
        sys.exit(f"{file}: this user may not read it\n  what to do: let this user read it, and enter its folders")
    changed = max(file.stat().st_mtime, file.lstat().st_mtime)  # Snakemake takes the later one of a link and its file
    if changed > time.time() + CLOCKS_DIFFER:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed))
        sys.exit(
            f"{file}: its time, {when}, is in the future by this machine's clock\n"
            f"  what to do: set it to now: touch {file}"
        )


def as_inputs(workflow: Any, files: Iterable[Path]) -> list[Any]:
    """Return local files as inputs of a rule, in Snakemake's form.

    With targets in storage, Snakemake would look for each path below the storage's prefix (its path_modifier,
    `apply_default_storage`). Absolute paths are then used unchanged, for a volume that is mounted here and in the pods.
    A file that does not exist here (a laptop has no such volume) is left out; if the pod lacks it too, the stage fails.

    Ends the process if a file cannot be read, or its time is in the future (`refuse_unusable`).
    """
    wanted = list(files)
    for file in wanted:
        refuse_unusable(file)
    if workflow.storage_registry.default_storage_provider is None:
        return [str(file) for file in wanted]
    return [workflow.storage_registry.fs(str(file)) for file in wanted if file.is_absolute() and file.is_file()]


Files = Callable[[Any], Any]
"""An input function: takes Snakemake's wildcards, returns file names."""

OF_A_SEARCH = re.compile(r"(?:^|/)(?:search/([^/]+)/(?:best|probably)\.yaml|reports/search-([^/]+)\.html)$")
"""The files that are made of all results; a default storage puts its prefix before them."""


class SearchInputs:
    """The input functions of rules with wildcard `search`; `RuleInputs` has them too."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings

    def of_search(self, files: Files | str) -> Files:
        """The files of the run of wildcard `search`: those of an input function, or of a name with `{run}`.

        Functions of params and resources are asked in the same way.
        """

        def of_its_run(wildcards: Any) -> Any:
            run = self._settings.search[wildcards.search].run
            return files.format(run=run) if isinstance(files, str) else files(Wildcards(fromdict={"run": run}))

        return of_its_run

    def judged(self, files: Files) -> Files:
        """Files of the search's run, if the search judges its trials by the evaluation; otherwise none."""

        def if_evaluated(wildcards: Any) -> list[str]:
            if self._settings.search[wildcards.search].objective == "eval_loss":
                return []
            targets = self.of_search(files)(wildcards)
            return [targets] if isinstance(targets, str) else list(targets)

        return if_evaluated

    def search_pace(self, wildcards: Any) -> list[str]:
        """The smoke run of the run of wildcard `search`, if only that tells what the search's budget is compared with.

        The estimate knows the time of a run on a GPU product that its settings name.
        """
        search = self._settings.search[wildcards.search]
        run = self._settings.runs[search.run]
        measured = search.limits.gpu_hours is not None and (run.gpu is None or run.device == "cpu")
        return [f"checkpoints/{search.run}/smoke"] if measured else []

    def step_before(self, file: str) -> Files:
        """A file of the step before that of wildcards `search`, `round` and `rung`; none before the first."""

        def files(wildcards: Any) -> list[str]:
            rungs = self._settings.search[wildcards.search].rungs
            step = step_before(rungs, int(wildcards.round), int(wildcards.rung))
            return [_step(wildcards.search, *step, file)] if step else []

        return files

    def step_results(self, wildcards: Any) -> list[str]:
        """The results of the trials of one step, in the order of their slots."""
        return self._results(wildcards.search, int(wildcards.round), int(wildcards.rung))

    def search_results(self, wildcards: Any) -> list[str]:
        """The results of all trials of wildcard `search`, in the order of its steps."""
        return self.results_of_search(wildcards.search)

    def results_of_search(self, search: str) -> list[str]:
        """Return the results of all trials of a search, in the order of its steps."""
        steps = steps_of(self._settings.search[search])
        return [file for step in steps for file in self._results(search, *step)]

    def last_study(self, wildcards: Any) -> str:
        """The account of wildcard `search` after its last step."""
        *_, last = steps_of(self._settings.search[wildcards.search])
        return _step(wildcards.search, *last, "study.json")

    def _results(self, search: str, number: int, rung: int) -> list[str]:
        slots = range(slots_of(self._settings.search[search].together, number, rung))
        return [_step(search, number, rung, f"{slot}.json") for slot in slots]


def _step(search: str, number: int, rung: int, file: str) -> str:
    return f"search/{search}/{number}/{rung}/{file}"


def ask_for_results(workflow: Any, settings: Config) -> None:
    """Make the results of a search's trials targets of whoever asks for the search. Call it before planning.

    Snakemake leaves a missing file alone as long as nothing that needs it has to be made. A search would then name a
    best trial whose result is gone, and nobody would notice. As a target it is made again, in seconds: its training is
    kept.
    """
    inputs = SearchInputs(settings)
    searches = {name for file in workflow.dag.targetfiles for name in _searches_of(file) if name in settings.search}
    patches.ask_for(workflow, (file for name in sorted(searches) for file in inputs.results_of_search(name)))


def _searches_of(file: str) -> list[str]:
    match = OF_A_SEARCH.search(str(file))
    return [name for name in match.groups() if name] if match else []


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
        origin = parse_source(source)
        if isinstance(origin, Path):
            refuse_unusable(origin)
            for file in origin.glob("[!.]*"):  # before the first is parsed
                refuse_unusable(file)
        if base_run(source) or (isinstance(origin, Path) and not origin.is_dir() and not self._sees_all_volumes()):
            return []
        try:
            files = local_files(source, f"models.{model}.source", weights=weights, dequantize=dequantize)
        except VlmflowError as error:
            sys.exit(str(error))
        return as_inputs(self._workflow, map(Path, files if weights else small_names(files)))

    def raw(self, wildcards: Any) -> list[str]:
        """The raw files of wildcards `dataset` and `split`."""
        return list(raw_files(self._settings, wildcards.dataset, wildcards.split))

    def raw_of(self, split: str) -> Files:
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

    def per_split(self, pattern: str) -> Files:
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

    def of_members(self, *files: str) -> Files:
        """Some files of each of the data sets that the mixture `dataset` mixes.

        It ends the process if one has skip_images.
        """

        def named(wildcards: Any) -> list[str]:
            self._refuse_unchecked_pictures(wildcards.dataset, f"mixture {wildcards.dataset} would have")
            return [f"data/{member}/{file}" for member in self._settings.members(wildcards.dataset) for file in files]

        return named

    def _refuse_unchecked_pictures(self, dataset: str, use: str) -> None:
        """End the process if a data set, or one that it mixes, has skip_images. use: what would have its pictures."""
        for name, member in self._settings.members(dataset).items():
            if member.skip_images:
                sys.exit(
                    f"datasets.{name}.skip_images: true is only for inspecting texts; {use} unchecked pictures\n"
                    "  what to do: remove it, or choose another data set"
                )

    def model(self, wildcards: Any) -> str:
        """The model folder of wildcard `run`."""
        return f"models/{self._settings.runs[wildcards.run].model}"

    def model_files(self, wildcards: Any) -> str:
        """The small files of wildcard `run`'s model: all but its weights."""
        return f"model_files/{self._settings.runs[wildcards.run].model}"

    def data(self, name: str) -> Files:
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

    def bases(self, wildcards: Any) -> list[str]:
        """The rows of the runs from whose weights wildcard `run` is trained: of its model, of that run's, and so on."""
        return [f"fitted/{base}" for base in self._settings.bases_of(wildcards.run)]

    def base_pictures(self, wildcards: Any) -> list[str]:
        """The image manifests of these runs' train splits, each once."""
        runs = [Wildcards(fromdict={"run": base}) for base in self._settings.bases_of(wildcards.run)]
        return list(dict.fromkeys(file for run in runs for file in self.train_pictures(run)))

    def evaluated(self, wildcards: Any) -> list[str]:
        """The evaluations of wildcard `run`: of val, or of the splits that it names."""
        return [f"eval/{wildcards.run}/{split}" for split in self._settings.runs[wildcards.run].evaluation.splits]

    def evaluated_rows(self, wildcards: Any) -> list[str]:
        """The data set's files of the same splits."""
        run = self._settings.runs[wildcards.run]
        return [str(self.data(f"{split}.jsonl")(wildcards)) for split in run.evaluation.splits]

    def raw_gold(self, split: str) -> Files:
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
        origin = parse_source(source)
        if not isinstance(origin, Path):
            return []
        if not origin.is_file() and self._sees_all_volumes():
            sys.exit(f"{key}: {not_a_file(origin.absolute())}")
        return as_inputs(self._workflow, [origin])

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
