"""The configuration as one model: the keys, their meaning and their defaults."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field, field_validator, model_validator

from vlmflow import CHECKOUT
from vlmflow.config.after_training import each_requirement
from vlmflow.config.data_settings import RAW_SPLITS, DatasetSettings
from vlmflow.config.faults import say_faults
from vlmflow.config.mixture_settings import AnyDataset, MixtureSettings, take_members
from vlmflow.config.model_settings import ModelSettings, name_kinds
from vlmflow.config.raw_forms import has_feedback
from vlmflow.config.run_settings import RunSettings
from vlmflow.config.search_settings import SearchSettings, check_search
from vlmflow.config.settings import GOOD, Name, Positive, Settings
from vlmflow.config.source import NO_COUNT, HubSource, base_run, parse_source, refuse_path
from vlmflow.config.tables import PictureSource
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.account import Integrity
from vlmflow.core.errors import VlmflowError

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\*?$")]
"""The name of an environment variable, or the beginning of names before a `*`."""

LightStages = Literal["fetch", "data", "pages"]
"""Kinds of stages that need no GPU and little time; `harness.resources` has the rules of each."""

TARGETS = (
    *("raw", "models", "model_files", "images", "converted", "data", "lengths", "fitted", "chosen"),
    *("estimates", "checkpoints", "work", "verified", "eval", "answers", "search"),
    *("merged", "tracked", "reports", "logs", "benchmarks"),
)
"""The folders in the working directory whose files the workflow makes and removes."""


class StoreSettings(Settings):
    """Folders for large files, which Snakemake does not track; manifests among the outputs describe them.

    Relative paths are relative to the working directory.
    """

    raw: str = "stores/raw"
    """Downloaded data files, by repository and revision."""

    models: str = "stores/models"
    """Downloaded model folders, by repository and revision; `bfloat16` has the bases that were in FP8, `views` links to
    the model files that stages see."""

    pictures: str = "stores/pictures"
    """One folder per data set, with a link or a rewritten copy of every picture that a row names."""

    fetched_pictures: str = "stores/fetched-pictures"
    """Pictures fetched by fetch_images, under the paths that the rows name; a picture root like any other."""

    runs: str = "stores/runs"
    """Run folders: working checkpoints and finished adapters, by run and digest of data and settings."""

    evaluations: str = "stores/evaluations"
    """Losses and answers of models that were evaluated, and `looks.jsonl`, the log of looks at test splits."""

    trackers: str = "stores/trackers"
    """Offline runs of Weights & Biases, one folder per run."""

    @field_validator("*")
    @classmethod
    def _folder(cls, folder: str) -> str:
        refuse_path(folder)
        if not folder:
            raise ValueError("'' is not a folder")
        return str(Path(folder).expanduser())


class ClusterSettings(Settings):
    """What a Kubernetes cluster can give."""

    max_mem_mb: Positive = 512_000
    """A pod that ran out of memory is retried with 50 % more, up to this many MB: the memory of a large node."""

    gang_timeout: Annotated[int, Field(ge=1, le=3000)] = 600
    """Seconds in which all pods of a run with several `nodes` must run, once one of them has a node. Otherwise they all
    end, and others may use the node; they come again after a pause that grows up to ten minutes. Pulling the image
    counts."""

    multi_node: Literal["indexed_job", "pytorchjob", "trainjob"] = "indexed_job"
    """The object that a run with several `nodes` becomes. indexed_job: a Job and a Service, which every cluster has.
    pytorchjob: one of Kubeflow's Training Operator 1.9. trainjob: one of Kubeflow's Trainer 2.1. The last two need the
    operator, and a component in the overlay (docs/kubernetes.md). A changed value makes nothing run again."""

    pods_per_stage: Positive = 1
    """How many pods share the pictures of one raw split in the stages that decode them all (resolve_images,
    hash_pictures). The results are the same bytes for any number. A changed number makes these stages run again."""


class SlurmSettings(Settings):
    """How jobs are given to Slurm (docs/slurm.md). A changed value makes nothing run again."""

    gpus: Literal["gpus", "gpus-per-node", "gres"] = "gpus"
    """How the site wants GPUs to be asked for: `--gpus=2`, `--gpus-per-node=2`, or `--gres=gpu:2`. A run on several
    nodes asks per node also with `gpus`."""

    gpu_model: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    """The kind of GPU, as the site names it (`sinfo -o %G`): `a100` makes `--gres=gpu:a100:2`."""

    here: list[LightStages] = ["fetch", "pages"]
    """The light stages that run where Snakemake runs. fetch: those that download, because compute nodes of many sites
    reach no network; data: from raw rows to the estimate of a run; pages: reports and what they sum up."""

    together: list[LightStages] = ["data"]
    """The light stages of which connected ones share one job of Slurm. Those in neither list have jobs of their own."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if twice := sorted(set(self.here) & set(self.together)):
            raise ValueError(f"here and together both name {twice[0]}: a stage runs in one place")
        return self


class Config(Settings):
    """The whole configuration: `config.yaml`, overridden by `--configfile` and `--config`."""

    stores: StoreSettings = StoreSettings()
    cluster: ClusterSettings = ClusterSettings()
    slurm: SlurmSettings = SlurmSettings()

    integrity: Integrity = "quick"
    """How a stage checks that pictures, rows, model and adapter are still what an earlier stage recorded. quick: it
    reads pictures and model files again only if their size, mtime or inode has changed since they were last read; full:
    it reads all of them, in every stage. A changed value makes nothing run again."""

    environment: list[VariableName] = []
    """Variables of the shell that trainers, and all other programs of the stages, get besides those that each gets
    (docs/training.md, The full training): names, or beginnings of names with a `*` (`IBV_*`). Name none that
    changes what is trained: no digest covers its value. A changed list makes nothing run again."""

    models: dict[Name, ModelSettings]
    """Base models, by name; fetched into `models/NAME`."""

    datasets: dict[Name, AnyDataset]
    """Data sets, by name; validated into `data/NAME`. A block with the key `mix` is a mixture of others."""

    picture_sources: dict[Name, PictureSource] = {}
    """Sources of pictures, by name: they override the rows of picture_sources.yaml key by key, or add new ones."""

    runs: dict[Name, RunSettings]
    """Runs, by name; `merged/NAME` is the target."""

    search: dict[Name, SearchSettings] = {}
    """Searches for settings of a run, by name; `search/NAME/best.yaml` is the target."""

    @property
    def raw_datasets(self) -> dict[str, DatasetSettings]:
        """The data sets that have raw rows of their own, by name: all but mixtures."""
        return {name: dataset for name, dataset in self.datasets.items() if isinstance(dataset, DatasetSettings)}

    @property
    def mixtures(self) -> dict[str, MixtureSettings]:
        """The mixtures, by name."""
        return {name: dataset for name, dataset in self.datasets.items() if isinstance(dataset, MixtureSettings)}

    @property
    def former_names(self) -> list[str]:
        """A line on each key that is set by its former name."""
        return [
            f"datasets.{name}.mended: is now called fixed_rows; rename the key, as the next release does not read it"
            for name, dataset in self.raw_datasets.items()
            if dataset.mended is not None
        ]

    def members(self, dataset: str) -> dict[str, DatasetSettings]:
        """Return the data sets that have the raw rows of a data set, by name: itself, or those of a mixture."""
        settings = self.datasets[dataset]
        return settings.members if isinstance(settings, MixtureSettings) else {dataset: settings}

    def good_run(self, dataset: str) -> str | None:
        """Return a run that trains only good attempts of the same data, or None.

        Its data set is this one but for `min_score`, which it sets, and `single_turn`.
        """
        own = self.datasets[dataset]
        for name, run in self.runs.items():
            other = self.datasets[run.dataset]
            if isinstance(own, MixtureSettings) or isinstance(other, MixtureSettings):
                continue
            alike = other.model_copy(update={"min_score": own.min_score, "single_turn": own.single_turn}) == own
            if alike and (own.min_score or 0) < GOOD <= (other.min_score or 0):
                return name
        return None

    @model_validator(mode="after")
    def _mixtures_are_of_data_sets(self) -> Self:
        take_members(self.datasets)
        return self

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        for name, run in self.runs.items():
            for key, known in (("model", self.models), ("dataset", self.datasets)):
                if (wanted := getattr(run, key)) not in known:
                    raise ValueError(f"runs.{name}.{key}: unknown {key} {wanted!r}; {key}s has: {_names(known)}")
        return self

    @model_validator(mode="after")
    def _bases_are_made_before_their_runs(self) -> Self:
        for name, model in self.models.items():
            if (base := base_run(model.source)) is not None and base not in self.runs:
                raise ValueError(f"models.{name}.source: unknown run {base!r}; runs has: {_names(self.runs)}")
            if base is not None and model.dequantize:
                raise ValueError(f"models.{name}.dequantize: the weights of a run are not quantised; remove the key")
        for name, run in self.runs.items():
            bases = [name, *self.bases_of(name)]
            if len(set(bases)) < len(bases):
                told = "; ".join(f"run {child} is trained from merged/{of}" for child, of in pairwise(bases))
                raise ValueError(f"models.{run.model}.source: {told}: no run can be its own base")
        return self

    def bases_of(self, run: str) -> list[str]:
        """Return the runs from whose weights a run is trained: the one that its model names, that one's, and so on.

        If a run is its own base, it is the last one.
        """
        bases = [run]
        while len(set(bases)) == len(bases):
            base = base_run(self.models[self.runs[bases[-1]].model].source)
            if base is None:
                break
            bases.append(base)
        return bases[1:]

    @model_validator(mode="after")
    def _searches_are_possible(self) -> Self:
        for name, search in self.search.items():
            if search.run not in self.runs:
                raise ValueError(f"search.{name}.run: unknown run {search.run!r}; runs has: {_names(self.runs)}")
            run = self.runs[search.run]
            check_search(name, search, run, feedback=self._feedback_of(run))
        return self

    def _feedback_of(self, run: RunSettings) -> bool:
        """Return whether a run is evaluated by feedback."""
        wanted = run.evaluation.feedback
        return any(map(has_feedback, self.datasets[run.dataset].kinds)) if wanted is None else wanted

    @model_validator(mode="after")
    def _data_can_give_what_is_required(self) -> Self:
        for name, run in self.runs.items():
            dataset = self.datasets[run.dataset]
            feedback = self._feedback_of(run) or ("auto" in dataset.kinds and run.evaluation.feedback is None)
            for measure, word in each_requirement(run.evaluation.require):
                needs = "pictures" if measure == "sees" else "feedback" if measure or word == "uses_feedback" else None
                if (needs == "pictures" and dataset.modality == "text") or (needs == "feedback" and not feedback):
                    raise ValueError(
                        f"runs.{name}.evaluate.require: {measure or word} is told by {needs}, and data set "
                        f"{run.dataset} has none; require learned or not_worse, or what it has"
                    )
        return self

    @model_validator(mode="after")
    def _only_history_is_shortened(self) -> Self:
        for name, run in self.runs.items():
            if run.over_long == "shorten" and self.datasets[run.dataset].form != "timestep":
                raise ValueError(
                    f"runs.{name}.over_long: 'shorten' drops earlier attempts, but data set {run.dataset} trains on "
                    "them; "
                    "set form: timestep for the data set, or over_long: leave_out"
                )
        return self

    @model_validator(mode="after")
    def _stores_are_apart(self) -> Self:
        for name, folder in self.stores:
            _refuse_target(f"stores.{name}", Path(folder))
        return self

    @model_validator(mode="after")
    def _sources_are_readable_and_apart(self) -> Self:
        for name, model in self.models.items():
            if base_run(model.source) is None:
                _source(f"models.{name}.source", model.source)
        for name, dataset in self.raw_datasets.items():
            for number, root in enumerate(dataset.image_roots):
                refuse_path(root, f"datasets.{name}.image_roots.{number}")
                store = Path(self.stores.pictures).resolve()
                if Path(root).expanduser().resolve().is_relative_to(store):
                    raise ValueError(f"datasets.{name}.image_roots.{number}: {root!r} is inside stores.pictures")
            for file in dataset.fixed_row_files:
                key = f"datasets.{name}.{'fixed_rows' if dataset.mended is None else 'mended'}"
                if not isinstance(_file(key, file), Path):
                    raise ValueError(f"{key}: {file!r} is not a file on this machine")
            files: dict[str, str] = {}
            for split in RAW_SPLITS:
                for address in dataset.addresses(split):
                    source = _file(f"datasets.{name}.{split}", address)
                    _refuse_no_count(f"datasets.{name}.{split}", address, source)
                    file = source.name
                    if file in files:
                        raise ValueError(
                            f"datasets.{name}.{split}: {address} and {files[file]} would both become "
                            f"raw/{name}/{file}; rename one of the files, or make two data sets"
                        )
                    files[file] = address
        return self

    @model_validator(mode="after")
    def _kinds_of_models_are_known(self) -> Self:
        name_kinds(self.models, self.runs)
        return self


@cache
def config_schema() -> dict[str, Any]:
    """Return the JSON schema of the configuration, with the docstrings of its keys."""
    return Config.model_json_schema()


def check_config(merged: dict[str, Any], files: list[Path]) -> Config:
    """Check the merged configuration and fill in the defaults.

    merged: the configuration from the files and the command line together.
    files: the files from which it was merged, lowest first, for messages.

    Raises VlmflowError with one line per error: file, key path, value, what is allowed, nearest known key.
    """
    try:
        return Config.model_validate(merged)
    except pydantic.ValidationError as error:
        lines = say_faults(error, config_schema(), merged, files)
        raise VlmflowError(lines, "fix the configuration; docs/config.md lists every key") from None


def _refuse_no_count(where: str, address: str, source: HubSource | Path) -> None:
    """Refuse `#0` or `#abc` after an address, unless a file has that name."""
    match = NO_COUNT.search(address)
    if match and not (isinstance(source, Path) and source.is_file()):
        raise ValueError(
            f"{where}: {address!r}: '#' must be followed by the number of rows to draw, at least 1, not {match[1]!r}"
        )


def _file(where: str, text: str) -> HubSource | Path:
    source = _source(where, text)
    if source.name in ("", ".."):
        raise ValueError(f"{where}: {text!r} is a folder; name the file")
    return source


def _source(where: str, text: str) -> HubSource | Path:
    refuse_path(text, where)
    try:
        source = parse_source(text)
    except VlmflowError as error:
        raise ValueError(f"{where}: {error.cause}; {error.next_step}") from None
    refuse_path(str(source), where)
    if isinstance(source, Path):
        _refuse_target(where, source)
    return source


def _refuse_target(where: str, path: Path) -> None:
    """Refuse a user's path inside the targets: Snakemake removes what a rule is about to make."""
    for target in TARGETS:
        if path.resolve().is_relative_to(Path(target).resolve()):
            base = "; merged/RUN names the weights of a run" if where.startswith("models.") else ""
            raise ValueError(f"{where}: {str(path)!r} is inside {target}/, which the workflow makes and removes{base}")


def _names(known: dict[str, Any]) -> str:
    return ", ".join(known) or "none"


CONFIG = CHECKOUT / "config.yaml"


def settings_of(files: list[Path]) -> Config:
    """Return the configuration of config.yaml and `files`, of which later ones take precedence.

    Raises VlmflowError with a line per fault: file, line and column, or key and value, and what is allowed.
    """
    return check_config(read_layers([CONFIG, *files]), [CONFIG, *files])
