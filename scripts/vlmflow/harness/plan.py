"""Refuses, before the first job, what would fail later, and limits jobs to this machine's GPUs; not with -n.

What a plan says about the runs that it would train, where earlier stages have left an account that tells it.

Refuses relative paths if jobs do not see this folder, as in pods: bulk data needs a place that all of them share.

Checks while Snakemake plans, with and without -n: unknown targets, and jobs that would fail.
"""

import difflib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

from snakemake.io import get_wildcard_names, strip_wildcard_constraints
from snakemake.iocontainers import Wildcards
from snakemake.utils import available_cpu_count
from snakemake_interface_executor_plugins.settings import SharedFSUsage

from vlmflow.config.data_settings import RAW_SPLITS
from vlmflow.config.machine_needs import refuse_missing, refuse_missing_compiler, refuse_old_driver
from vlmflow.config.model import Config
from vlmflow.config.run_settings import RunSettings
from vlmflow.config.source import base_run, parse_source
from vlmflow.config.strategies import strategy_of
from vlmflow.config.tables import revision_of
from vlmflow.core.account import read_account
from vlmflow.core.child_programs import python_of
from vlmflow.core.errors import VlmflowError, counted
from vlmflow.harness import inputs, patches, resources, stage, staleness
from vlmflow.harness.stage import TRAINING, refuse_long_temporary_folder
from vlmflow.lengths.steps import Steps, evaluations_of, schedule_in_words
from vlmflow.lengths.summary import ACCOUNT, FittedRows
from vlmflow.rows.sharegpt import in_words, is_mixed
from vlmflow.rows.stats import Stats


def run_of(settings: Config, job: Any) -> str:
    """Return the run that a job trains: its wildcard, or that of its search."""
    search = job.wildcards.get("search")
    return settings.search[search].run if search else str(job.wildcards.run)


def refuse_unpinned(workflow: Any, settings: Config) -> None:
    """End the process if the fetch of a model would fail, which may come hours later: it has no revision in pins.yaml.

    An exception would print a traceback of the Snakefile.
    """
    jobs = workflow.dag.needrun_jobs()
    models = {job.wildcards.model for job in jobs if job.name in ("fetch_model", "fetch_model_files")}
    for model in sorted(models):
        source = settings.models[model].source
        if source.startswith("hf://") and revision_of(source) is None:
            sys.exit(
                f"models.{model}.source: {source} has no revision in pins.yaml\n  what to do: run `vlmflow pins` and "
                f"review the table (a new source needs a row `{source}:` first), or write the commit into the address "
                "(…/NAME@COMMIT)"
            )


def share_gpus(workflow: Any, settings: Config) -> None:
    """End the process if a job needs more GPUs than the machine has, and make jobs wait for free ones (`gpu_share`).

    Snakemake limits only resources that --resources or a profile names: two runs would start on the same GPUs. Call it
    when there is a plan, and no scheduler yet.
    """
    most = max(workflow.dag.needrun_jobs(), key=_gpus)
    wanted = _gpus(most)
    present = len(stage.gpus()) if wanted else 0
    if wanted > present:
        run = run_of(settings, most)
        sys.exit(
            f"rule {most.name} needs {counted(wanted, 'GPU')}, this machine has {present}\n  what to do: train on the "
            f"CPU (runs.{run}.device: cpu, for a tiny model: README.md), on fewer GPUs (runs.{run}.processes), or on a "
            "cluster (--executor kubernetes, docs/kubernetes.md)"
        )
    if wanted and "gpu" not in workflow.global_resources:
        workflow.register_resource("gpu", present)


def _gpus(job: Any) -> int:
    return int(job.resources.get("gpu", 0))


Kind = TypeVar("Kind")


def notes(settings: Config, runs: Iterable[str], folder: Path) -> list[str]:
    """Return the lines on some runs, those on the same data set once.

    folder: the working directory. What no readable account tells is not said: the stages that make it will speak.
    """
    lines: dict[str, None] = {}
    for name in runs:
        run = settings.runs[name]
        if note := settings.models[run.model].untested:
            lines[f"models.{run.model}.{note}"] = None
        stats = _account(folder / "data" / run.dataset / "stats.json", Stats)
        if stats and is_mixed(trained := stats.trained_characters):
            lines[f"data set {run.dataset}: {in_words(trained, stats.scored, settings.good_run(run.dataset))}"] = None
        fitted = _account(folder / "fitted" / name / ACCOUNT, FittedRows)
        rows = fitted.train.lengths.rows if fitted else stats.examples["train"] if stats else 0
        if rows:
            lines[f"run {name}: {_schedule(run, rows)}"] = None
    return list(lines)


def _schedule(run: RunSettings, rows: int) -> str:
    steps = Steps.of(rows, run.train, run.ranks).total
    return schedule_in_words(steps, evaluations_of(steps, run.train))


def _account(file: Path, kind: type[Kind]) -> Kind | None:
    try:
        return read_account(file, kind)
    except (OSError, VlmflowError):
        return None


ADVICE = (
    "what to do: on a cluster, stores must be on its volumes; put profiles/kubernetes/stores.yaml before your own file "
    "(--configfile profiles/kubernetes/stores.yaml my-run.yaml), and use absolute paths in yours"
)


def refuse_relative_stores(workflow: Any, settings: Config) -> None:
    """End the process if jobs run elsewhere and a store, a picture root or a local source is a relative path.

    A pod's working directory disappears with the pod: what is stored there is lost without an error.
    """
    if SharedFSUsage.INPUT_OUTPUT in workflow.storage_settings.shared_fs_usage or not workflow.is_main_process:
        return
    relative = [f"{key}: {path} is relative to the working directory" for key, path in relative_places(settings)]
    if relative:
        sys.exit("\n".join([*relative, f"  {ADVICE}"]))


def relative_places(settings: Config) -> list[tuple[str, str]]:
    """Return key and value of every relative path in the configuration that stages read or write, except targets."""
    places = [(f"stores.{name}", path) for name, path in settings.stores]
    places += [(f"models.{name}.source", model.source) for name, model in settings.models.items()]
    for name, dataset in settings.raw_datasets.items():
        places += [(f"datasets.{name}.image_roots.{number}", root) for number, root in enumerate(dataset.image_roots)]
        for split in RAW_SPLITS:
            places += [(f"datasets.{name}.{split}", address) for address in dataset.addresses(split)]
    return [(key, address) for key, address in places if _is_relative(address)]


def _is_relative(address: str) -> bool:
    source = parse_source(address)
    return isinstance(source, Path) and not source.is_absolute() and not base_run(address)


SHIPPED_ROOT = "pictures"
"""The picture root of the data sets in config.yaml."""

SEARCHING = ("propose", "tell")
"""The rules that start the environment `search`."""

LOOKING = ("fetch_images", "resolve_images")
"""The rules that search for pictures in a data set's roots."""


def install(
    workflow: Any,
    settings: Config,
    refuse_elsewhere: Callable[[Any, Config], None],
    when_nothing_is_to_do: Callable[[], None],
) -> None:
    """Add our checks to Snakemake's own planning; also one for a call that has nothing to do.

    The checks end the process, because an exception would print a traceback. Jobs run Snakemake too; there this does
    nothing.
    """
    if not workflow.is_main_process:
        return

    def look_and_plan(plan: Callable[[], None]) -> None:
        patches.clear(workflow)  # here, because only now Snakemake knows whether this is a dry run
        _refuse_unknown_targets(workflow, settings)
        inputs.ask_for_results(workflow, settings)
        if stage.on_slurm():
            resources.arrange(workflow, settings)
        look_at_code = staleness.install(workflow)
        patches.compare_past_ancient_inputs(workflow.dag)
        plan()
        look_at_code()
        jobs = list(workflow.dag.needrun_jobs())
        runs = sorted({run_of(settings, job) for job in jobs if job.rule.name in TRAINING})
        here = workflow.storage_registry.default_storage_provider is None
        try:
            if not stage.jobs_leave(workflow):
                _refuse_trainings_here(settings, runs)
            if here:
                _refuse_missing_roots(workflow, settings, jobs)
                for file in {str(file) for job in jobs for file in job.input}:  # also those that a stage made elsewhere
                    inputs.refuse_unusable(Path(file))
                _refuse_a_missing_environment({job.rule.name for job in jobs})
                _refuse_what_no_row_can_show(workflow, settings, runs, jobs)
            else:
                _refuse_nodes_without_a_shared_volume(workflow, settings, runs)
        except VlmflowError as error:
            sys.exit(str(error))
        refuse_elsewhere(workflow, settings)
        if workflow.dryrun:
            # The accounts may be elsewhere; and Snakemake's own line on the lock calls it an error (see `screen`).
            lines = [*settings.former_names, *(notes(settings, runs, Path()) if here else ())]
            if patches.is_held():
                lines.append("Another Snakemake is running in this folder; this plan shows the state so far.")
            print("".join(f"{line}\n" for line in lines), end="", file=sys.stderr)
        elif workflow.executor_plugin and not len(workflow.dag):  # without: --dag, --report and their like
            when_nothing_is_to_do()
        elif workflow.executor_plugin and workflow.local_exec:
            share_gpus(workflow, settings)

    patches.around_planning(workflow, look_and_plan)


def _refuse_unknown_targets(workflow: Any, settings: Config) -> None:
    """Refuse a file that no rule makes, as Snakemake matches it, and suggest the nearest target.

    Refuse also a rule with wildcards as a target, with a clearer message than Snakemake's.
    """
    for rule in workflow.dag.targetrules:
        if rule.has_wildcards():
            made = ", ".join(_known_targets([rule], settings)) or "what docs/outputs.md lists"
            sys.exit(f"{rule.name}: this is a rule, not a file\n  what to do: use a file that it makes: {made}")
    makers = workflow.dag.output_index.match_producers
    for file in sorted(workflow.dag.targetfiles):
        if makers(file):
            continue
        written = next((target for target in workflow.dag_settings.targets if str(file).endswith(target)), str(file))
        before = str(file).removesuffix(written)  # the prefix of a default storage
        known = [target.removeprefix(before) for target in _known_targets(workflow.rules, settings) if makers(target)]
        nearest = difflib.get_close_matches(written, known, n=1)
        sys.exit(
            f"{written}: no rule makes this target{f'; nearest: {nearest[0]}' if nearest else ''}\n"
            f"  what to do: use one from docs/outputs.md; runs: {', '.join(settings.runs)}; data sets: "
            f"{', '.join(settings.datasets)}; for those in your own file, name it: vlmflow run FILE, "
            "or snakemake --configfile FILE --"
        )


def _known_targets(rules: Iterable[Any], settings: Config) -> Iterator[str]:
    """Yield every output of some rules whose wildcards are only the configuration's names and the raw splits."""
    values: dict[str, Iterable[str]] = {
        "run": settings.runs,
        "model": settings.models,
        "dataset": settings.datasets,
        "search": settings.search,
        "split": RAW_SPLITS,
    }
    for rule in rules:
        for output in rule.output:
            names = get_wildcard_names(str(output))
            if names <= set(values):
                pattern = strip_wildcard_constraints(str(output))
                for chosen in itertools.product(*(values[name] for name in names)):
                    yield pattern.format(**dict(zip(names, chosen, strict=True)))


def _refuse_trainings_here(settings: Config, runs: Sequence[str]) -> None:
    """Refuse planned trainings that would fail on this machine.

    It may lack cores for a training on the CPU, a package, a compiler or a newer driver; or the path of its folder for
    temporary files is too long for the sockets of processes. Raises VlmflowError.
    """
    if runs:
        refuse_long_temporary_folder()
    cores = available_cpu_count()
    for name in runs:
        run = settings.runs[name]
        if run.device == "cpu" and run.ranks > cores:
            on_nodes = f" on {run.nodes} nodes" if run.nodes > 1 else ""
            fewer = f"it to {cores // run.nodes} or less"
            if run.nodes > cores:
                fewer = f"runs.{name}.nodes to {cores} or less, and processes to 1"
            raise VlmflowError(
                f"runs.{name}.processes: {run.ranks} trainers{on_nodes} on device cpu, this machine has "
                f"{counted(cores, 'core')}",
                f"set {fewer}",
            )
        try:
            if run.device == "cuda":
                refuse_old_driver()
            refuse_missing(run.train)
            refuse_missing_compiler(strategy_of(run.strategy, run.deepspeed))
        except VlmflowError as error:
            sys.exit(str(error).replace("runs.NAME", f"runs.{name}"))


def _refuse_what_no_row_can_show(workflow: Any, settings: Config, runs: Sequence[str], jobs: Iterable[Any]) -> None:
    """Refuse planned trainings of which val, where it is there, cannot show `evaluate.require`; as `choose_rows` does.

    Raises VlmflowError.
    """
    made = {str(file) for job in jobs for file in job.output}
    for name in [name for name in runs if settings.runs[name].evaluation.require]:
        from vlmflow.evaluation import chosen_split, report, verdict  # they import scipy, which this plan alone needs

        run, chosen = settings.runs[name], Path("chosen", name, "val")
        choice = None if str(chosen) in made else _account(chosen / report.CHOICE, report.Choice)
        if choice is None:
            pictures = inputs.RuleInputs(workflow, settings).run_pictures(Wildcards(fromdict={"run": name}))
            rows, stats, *manifests = needed = [
                *(Path("data", run.dataset, file) for file in ("val.jsonl", "stats.json")),
                *map(Path, pictures),
            ]
            if any(str(file) in made or not file.exists() for file in needed):
                continue
            files = chosen_split.SplitFiles(rows, stats, Path(settings.stores.pictures), manifests)
            try:
                candidates = chosen_split.candidates_of(
                    files, feedback=run.evaluation.feedback, seed=run.train.seed
                )  # without raw rows and bases, it may be a few more rows
                choice = chosen_split.choice_of(name, files, candidates, halved=True)
            except (OSError, VlmflowError):  # the stages say more of it
                continue
        verdict.refuse_too_few(choice, run.evaluation.require)


def _refuse_nodes_without_a_shared_volume(workflow: Any, settings: Config, runs: Sequence[str]) -> None:
    """Refuse a planned training on several nodes whose pods have no folder in common for its rows and its run.

    Raises VlmflowError.
    """
    places = {
        "remote-job-local-storage-prefix": workflow.storage_settings.remote_job_local_storage_prefix,
        "stores.runs": settings.stores.runs,
    }
    alone = [f"{key} is {path}" for key, path in places.items() if not Path(path or "").is_absolute()]
    for name in runs if alone else ():
        if (nodes := settings.runs[name].nodes) > 1:
            raise VlmflowError(
                f"runs.{name}.nodes: {nodes} nodes need a volume that all of them see: {', '.join(alone)}, which is in "
                "each pod alone",
                "use the profile profiles/kubernetes or profiles/kubernetes-s3 with profiles/kubernetes/stores.yaml, "
                "or set nodes: 1",
            )


def _refuse_a_missing_environment(planned: Set[str]) -> None:
    """Refuse a planned search on this machine without its environment: the stages before it may take hours.

    A tracker is told at the end of a run, and its failure fails nothing else: its missing environment is only reported.

    planned: names of rules. Raises VlmflowError.
    """
    if not planned.isdisjoint(SEARCHING):
        python_of("search")
    if "track" in planned:
        try:
            python_of("track")
        except VlmflowError as error:
            print(f"the rule track will fail, and nothing else: {error}", file=sys.stderr)


def _refuse_missing_roots(workflow: Any, settings: Config, jobs: Iterable[Any]) -> None:
    """Refuse to search for pictures on this machine in a missing folder. Raises VlmflowError.

    A dry run of the shipped runs needs no pictures.
    """
    for job in jobs:
        if job.rule.name in LOOKING:
            dataset = job.wildcards.dataset
            for root in settings.raw_datasets[dataset].image_roots:
                if not Path(root).expanduser().is_dir() and not (workflow.dryrun and root == SHIPPED_ROOT):
                    raise VlmflowError(
                        f"datasets.{dataset}.image_roots: no folder {root}",
                        "set the folders below which the rows' picture paths exist",
                    )
