"""Params functions for the rules, bound to the settings in the Snakefile.

Each takes Snakemake's wildcards. One that returns a block takes `output` too, without reading it:
so Snakemake leaves the block to `recorded`, which has its settings one by one (see `staleness`).

Params that are a single key of the configuration need none: `lookup` gives them.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vlmflow.config.model import Config
from vlmflow.config.raw_forms import form_of, modules_of
from vlmflow.config.search_settings import dimensions, trained_with
from vlmflow.config.settings import Settings
from vlmflow.config.source import base_run, parse_source
from vlmflow.config.tables import read_sources, revision_of
from vlmflow.fetch.model_files import list_files
from vlmflow.fetch.placed import naming_files
from vlmflow.harness.inputs import raw_source

ParamsFunction = Callable[..., Any]
"""Takes Snakemake's wildcards, and `output` if it returns a block; returns a JSON value."""


class RuleParams:
    """The params functions, and the keys of a run that several rules pass together."""

    lengths = ("model.model_type", "train.image_max_tokens", "train.text_args")
    """They decide how many tokens a row has."""

    estimated = (
        *("train", "device", "nodes", "processes", "strategy", "deepspeed", "tuner", "over_long"),
        *("gpu", "gpu_hour_price", "network_gbit", "estimate", "compared_rows"),
    )
    """They decide what a run needs."""

    trained = ("model.model_type", "train", "device", "nodes", "processes", "strategy", "deepspeed", "tuner")
    """They decide how a run trains."""

    evaluated = (
        *("evaluation.rows", "device", "train.seed", "train.dtype"),
        *("train.text_args", "train.image_max_tokens", "train.max_length"),
    )
    """They decide which rows compare the tuned model with its base, and how."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings

    def dataset(self, *keys: str, **renamed: str) -> ParamsFunction:
        """Some settings of wildcard `dataset` as one block, by the last part of their keys, or as given.

        One key alone gives its value.
        """
        return lambda wildcards, output=None: _alone(_block(self._settings.datasets[wildcards.dataset], keys, renamed))

    def run(self, *keys: str) -> ParamsFunction:
        """Settings of wildcard `run` (`train.seed`), its data set (`dataset.licence`) and its model.

        One key alone gives its value.
        """
        return lambda wildcards, output=None: _alone(_block(self._run_with_what_it_names(wildcards.run), keys, {}))

    def search(self, *keys: str) -> ParamsFunction:
        """Some settings of wildcard `search`, as one block; one key alone gives its value."""
        return lambda wildcards, output=None: _alone(
            self._settings.search[wildcards.search].model_dump(mode="json", include=set(keys))
        )

    def search_run(self, *keys: str) -> ParamsFunction:
        """Settings of the run of wildcard `search`, as `run`.

        Keys of `train` that it searches have the first of their values: each trial has its own.
        """

        def block(wildcards: Any, output: Any = None) -> Any:
            search = self._settings.search[wildcards.search]
            run = self._run_with_what_it_names(search.run)
            run.train = trained_with(run.train, {axis.key: axis.first for axis in dimensions(search.space)})
            return _alone(_block(run, keys, {}))

        return block

    def judging(self, wildcards: Any, output: Any = None) -> dict[str, Any]:
        """By what the trials of wildcard `search` are judged; how they are evaluated, if that judges them."""
        search = self._settings.search[wildcards.search]
        evaluation = self._settings.runs[search.run].evaluation
        how = {"rows": evaluation.rows, "feedback": evaluation.feedback}
        return {"objective": search.objective} | (how if search.objective != "eval_loss" else dict.fromkeys(how))

    def own_settings(self, wildcards: Any, output: Any = None) -> dict[str, Any] | None:
        """The run's own values of what wildcard `search` searches, for its first step; otherwise null."""
        if not wildcards.round == wildcards.rung == "0":
            return None
        search = self._settings.search[wildcards.search]
        train = self._settings.runs[search.run].train
        return {axis.key: attrgetter(axis.key)(train) for axis in dimensions(search.space)}

    def chosen_by_of_val(self, wildcards: Any, output: Any = None) -> dict[str, Any] | None:
        """The search that chose the settings of wildcard `run`; null for test, which chooses none."""
        chosen_by = self._settings.runs[wildcards.run].chosen_by
        return chosen_by.model_dump(mode="json") if chosen_by and wildcards.split != "test" else None

    def planned(self, wildcards: Any, output: Any = None) -> dict[str, Any] | None:
        """What the first step of wildcard `search` compares with its budget; null in others, or without.

        So a search without a budget that is given more rounds goes on after those that it has.
        """
        search = self._settings.search[wildcards.search]
        if search.limits.gpu_hours is None or not wildcards.round == wildcards.rung == "0":
            return None
        return {"rounds": search.rounds, "gpu": self._settings.runs[search.run].gpu}

    def required(self, wildcards: Any, output: Any = None) -> Any:
        """What val of wildcard `run` must show; not recorded, as it decides on no row (`plan` asks it again)."""
        return self._settings.runs[wildcards.run].evaluation.require

    def processes(self, wildcards: Any, output: Any = None) -> int:
        """The processes of wildcard `run`; not recorded, as the script's results do not depend on them."""
        return self._settings.runs[wildcards.run].processes

    def raw_source(self, wildcards: Any) -> str:
        """The source of the raw file of wildcards `dataset` and `file`."""
        return raw_source(self._settings, wildcards)[1]

    def raw_revision(self, wildcards: Any) -> str | None:
        """The revision that is pinned for the same raw file; null for a local file."""
        return revision_of(self.raw_source(wildcards))

    def raw_state(self, wildcards: Any) -> list[list[int]]:
        """Bytes and time of the same raw file, if it is local."""
        return _state(self.raw_source(wildcards))

    def model_revision(self, wildcards: Any) -> str | None:
        """The revision that is pinned for wildcard `model`; null for a local folder."""
        return revision_of(self._settings.models[wildcards.model].source)

    def model_state(self, wildcards: Any) -> list[list[int]]:
        """Bytes and time of every file of wildcard `model`, if it is a local folder."""
        return _state(self._settings.models[wildcards.model].source)

    def model_files_state(self, wildcards: Any) -> list[list[int]]:
        """Bytes and time of a local model's small files, and of a file that alone names its tensors."""
        return _state(self._settings.models[wildcards.model].source, naming_files)

    def good_run(self, wildcards: Any) -> str | None:
        """A run that trains only good attempts of wildcard `dataset` or of the run's data set; null if none does."""
        return self._settings.good_run(self._dataset_of(wildcards))

    def _dataset_of(self, wildcards: Any) -> str:
        return str(wildcards.get("dataset") or self._settings.runs[wildcards.run].dataset)

    def row_choice(self, wildcards: Any, output: Any = None) -> dict[str, Any]:
        """Which rows of wildcards `dataset` and `split` are used (a RowChoice)."""
        return self._settings.raw_datasets[wildcards.dataset].choice(wildcards.split).model_dump(mode="json")

    def conversion(self, wildcards: Any, output: Any = None) -> dict[str, Any]:
        """The settings of wildcard `dataset` that decide what its raw rows become."""
        dataset = self._settings.raw_datasets[wildcards.dataset]
        form = form_of(dataset.kind)
        keys = ["kind", "modality", "columns", "prompt", "system_prompt", "ignore_keys"]
        if form.rows:  # several training rows of a raw row
            keys += [*(key for key in form.settings if key not in keys), "row_limits"]
        return _block(dataset, keys, {})

    def form_modules(self, wildcards: Any) -> list[str]:
        """The modules of a data set's raw form, loaded without an import (see `staleness`).

        It is the one of wildcard `dataset`, in a rule without it that of the run.
        """
        kinds = self._settings.datasets[self._dataset_of(wildcards)].kinds
        return sorted({module for kind in kinds for module in modules_of(kind)})

    def picture_roots(self, wildcards: Any) -> list[str]:
        """The picture roots of wildcard `dataset`; with fetch_images, last the store of fetched pictures."""
        dataset = self._settings.raw_datasets[wildcards.dataset]
        return [*dataset.image_roots, *([self._settings.stores.fetched_pictures] if dataset.fetch_images else [])]

    def picture_revisions(self, wildcards: Any, output: Any = None) -> dict[str, list[Any]]:
        """The addresses of known sources' pictures, so that Snakemake notices and shows a change."""
        return {
            name: [source.members, source.archive, source.one_by_one, source.archive and revision_of(source.archive)]
            for name, source in read_sources(self._settings.picture_sources).items()
        }

    def picture_sources(self, wildcards: Any, output: Any = None) -> dict[str, dict[str, Any]]:
        """The configuration's picture sources, but for their licences: another licence fetches nothing again.

        A source of one's own may have only a licence, so each has a constant one.
        """
        blocks = {
            name: source.model_dump(exclude_none=True, exclude={"licence"})
            for name, source in self._settings.picture_sources.items()
        }
        return {name: block | {"licence": "any"} for name, block in blocks.items() if block}

    def part(self, wildcards: Any) -> list[int]:
        """The number of wildcard `part`, 1 without it, and that of all parts (`core.processes.Part`)."""
        return [int(wildcards.get("part", 1)), self._settings.cluster.pods_per_stage]

    def picture_licences(self, wildcards: Any, output: Any = None) -> dict[str, str]:
        """The licences of known picture sources, by the first parts of their pictures' paths.

        {} if the run's data set has no pictures. In a mixture, paths begin with a data set's name.
        """
        dataset = self._settings.runs[wildcards.run].dataset
        if self._settings.datasets[dataset].modality == "text":
            return {}
        sources = read_sources(self._settings.picture_sources).values()
        licences = {beginning: entry.licence for entry in sources if entry.licence for beginning in entry.members or {}}
        if dataset not in self._settings.mixtures:
            return licences
        named = [name for name, member in self._settings.members(dataset).items() if member.has_manifests]
        return {f"{name}/{beginning}": licence for name in named for beginning, licence in licences.items()}

    def _run_with_what_it_names(self, name: str) -> SimpleNamespace:
        run = self._settings.runs[name]
        named = {
            "dataset": self._settings.datasets[run.dataset],
            "model": self._settings.models[run.model],
            "evaluation": run.evaluation,
            "compared_rows": run.compared_rows,
        }
        return SimpleNamespace(**(dict(run) | named))


def _block(settings: object, keys: Sequence[str], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return settings as JSON values. keys: with dots within blocks. renamed: keys by new names."""
    named = {key.rpartition(".")[2]: key for key in keys} | dict(renamed)
    if len(named) < len(keys) + len(renamed):
        raise ValueError(f"two keys of a block have one name: {keys}, {renamed}")
    values = {name: attrgetter(key)(settings) for name, key in named.items()}
    return {name: value.model_dump() if isinstance(value, Settings) else value for name, value in values.items()}


def _alone(block: dict[str, Any]) -> Any:
    """Return the value of a block of one key; a longer block as it is."""
    return block if len(block) > 1 else next(iter(block.values()))


def _state(source: str, choose: Callable[[list[str]], list[str]] = list) -> list[list[int]]:
    """Return bytes and time of a local data file, or of every file of a local model.

    [] for what does not exist here, and for the weights of another run: Snakemake makes these, and knows their time.
    choose: takes the names of a model's files, returns those that count.

    Snakemake itself reruns only for a newer file, and a file that was moved here may be old. Times are whole seconds:
    every copying tool that keeps times preserves these.
    """
    origin = parse_source(source)
    if not isinstance(origin, Path) or not origin.exists() or base_run(source):
        return []
    names = choose(list_files(origin, source, weights=False).names) if origin.is_dir() else []
    files = [origin / name for name in names] if origin.is_dir() else [origin]
    return [[stat.st_size, int(stat.st_mtime)] for stat in map(Path.stat, files)]
