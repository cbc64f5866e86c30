"""The configuration of a Snakemake run, checked when the workflow is read.

Passes facts about the Snakemake call to its stages as environment variables.

As params they would make Snakemake rerun a rule when two calls differ. A pod's Snakemake sets the same variables from
the same configuration.

What the Snakefile does besides its rules: before the first of them, before the jobs, and after them.

This is the only module through which the workflow reaches `remote`, and only if a call asks for it: by an executor that
runs jobs elsewhere, or by a default storage.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from functools import partial, reduce
from importlib import import_module
from operator import getitem
from pathlib import Path
from typing import Any

from snakemake.utils import min_version
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from vlmflow.config import yaml_file
from vlmflow.config.model import Config, check_config
from vlmflow.config.tables import read_sources
from vlmflow.core.account import LEVEL, RECORDS, RECORDS_FOLDER
from vlmflow.core.child_programs import NAMED
from vlmflow.core.errors import VERDICT, VlmflowError
from vlmflow.core.processes import import_path
from vlmflow.harness import patches, plan, screen, stage
from vlmflow.harness.inputs import Names, RuleInputs
from vlmflow.harness.params import RuleParams
from vlmflow.harness.plan import refuse_relative_stores
from vlmflow.harness.resources import RuleResources
from vlmflow.harness.stage import CALL, CONFIG, LOCAL, TARGETS


def read(workflow: Any, merged: dict[str, Any]) -> Config:
    """Check the merged configuration of files and command line, and the table of picture sources; returns it.

    Ends the process with a line per fault; an exception would print a traceback of the Snakefile.
    """
    ours = [file for file in workflow.configfiles if file not in workflow.overwrite_configfiles]
    files = [Path(file) for file in [*ours, *workflow.overwrite_configfiles]]
    try:
        if workflow.is_main_process:  # it has checked them for its jobs, also those in pods
            for file in files:
                yaml_file.read_config(file)  # Snakemake accepts a duplicate key
        settings = check_config(merged, files)
        read_sources(settings.picture_sources)
    except VlmflowError as error:
        sys.exit(str(error))
    return settings


def tell_stages(workflow: Any, settings: Config) -> None:
    """Set the variables that tell this Snakemake's stages where our modules are and how the workflow was called."""
    os.environ["PYTHONPATH"] = import_path()
    os.environ[LEVEL] = settings.integrity
    os.environ[RECORDS] = str(Path(settings.stores.pictures).absolute() / RECORDS_FOLDER)
    os.environ[NAMED] = " ".join(settings.environment)
    storage = workflow.storage_settings
    in_pod = workflow.remote_exec and storage.default_storage_provider is not None
    if in_pod or not workflow.remote_exec:  # a job on a shared file system has them from the call itself
        os.environ[CALL] = shlex.join(_options(workflow))
        os.environ[CONFIG] = shlex.join(
            _shown(workflow, Path(file).absolute()) for file in workflow.overwrite_configfiles
        )
    for name, prefix in ((TARGETS, storage.default_storage_prefix), (LOCAL, storage.local_storage_prefix)):
        os.environ[name] = str(prefix) if in_pod else ""


def _options(workflow: Any) -> list[str]:
    here, words = Path.cwd(), []
    if not workflow.remote_exec and not here.samefile(workflow.basedir):
        words += ["--directory", _shown(workflow, here)]
    if workflow.config_settings.config_args:
        words += ["--config", *workflow.config_settings.config_args]
    return words


def _shown(workflow: Any, path: Path) -> str:
    """Return a path for a command: relative for whoever stands in the clone, or for a pod; for others absolute."""
    root = Path(workflow.basedir)
    below = path.is_relative_to(root) and (workflow.remote_exec or Path.cwd().samefile(root))
    return str(path.relative_to(root) if below else path)


EXECUTORS = {"kubernetes": "vlmflow.remote.kubernetes.executor", "slurm": "vlmflow.remote.slurm.executor"}
"""Our own executors: the module of each, by the plugin whose settings it has and which it replaces (`install`)."""


def before_rules(workflow: Any, settings: Config) -> Config:
    """Prepare Snakemake for the rules: storage, executor, planning checks, locks, and the end of stages with it.

    Returns `settings`.
    """
    min_version("9.27")
    patches.only_note_sigterm()
    if workflow.remote_exec:  # a pod runs a job, and no `onstart`
        patches.leave_out_what_nobody_uses()
        if stage.IN_SLURM in os.environ:
            import_module("vlmflow.remote.slurm.in_job").install(workflow, patches.on_sigterm)
        elif VERDICT in os.environ:
            import_module("vlmflow.remote.job").say_memory_kills(workflow)
    stage.let_stages_end_with_this_process()
    screen.collect_failures()
    tell_stages(workflow, settings)
    if workflow.storage_settings.default_storage_provider is not None:
        storage = import_module("vlmflow.remote.storage.plugins")
        storage.prepare(workflow)
        patches.store_by(*storage.OBJECTS)
    if workflow.is_main_process:
        patches.make_folders()
        patches.tell_stages_to_end()
        screen.install(workflow)
        _install_executors(workflow, settings)
    plan.install(workflow, settings, _refuse_plan, lambda: after_success(workflow, settings))
    return settings


def for_rules(workflow: Any, settings: Config) -> tuple[Names, RuleInputs, RuleParams, RuleResources]:
    """Return the objects that the rules use: wildcard constraints, inputs, params and resources."""
    return Names(settings), RuleInputs(workflow, settings), RuleParams(settings), RuleResources(workflow, settings)


def lookup(*, dpath: str, within: Mapping[str, Any], default: Any = ...) -> Any:
    """Return a value of the configuration, or a function of wildcards that gives it, as Snakemake's `lookup` does.

    That one goes through the whole configuration for each value: a tenth of the time of a plan.
    """

    def value(wildcards: Any) -> Any:
        *blocks, key = dpath.format_map(dict(wildcards.items())).split("/")
        block: Mapping[str, Any] = reduce(getitem, blocks, within)
        return block[key] if default is ... else block.get(key, default)

    return value if "{" in dpath else value({})


def before_jobs(workflow: Any, settings: Config) -> None:
    """Refuse what would fail later (`snakemake -n` still plans it), and make jobs start faster."""
    refuse_relative_stores(workflow, settings)
    plan.refuse_unpinned(workflow, settings)
    patches.leave_out_what_nobody_uses()
    if workflow.local_exec:
        screen.watch(workflow)


def after_success(workflow: Any, settings: Config) -> None:
    """Print at the end of the process what the runs of the call are."""
    screen.show_runs_at_the_end(workflow, settings, lambda *files: _stored().copy_existing(*files))


def after_failures(workflow: Any) -> None:
    """Print at the end of the process why stages failed."""
    screen.show_failures_at_the_end(workflow, lambda log: str(_stored().text_of(log)))


def _refuse_plan(workflow: Any, settings: Config) -> None:
    """Refuse jobs that the scheduler of the call could never start."""
    if stage.on_slurm():
        import_module("vlmflow.remote.slurm.partitions").refuse_plan(workflow, settings)


def _stored() -> Any:
    return import_module("vlmflow.remote.storage.plugins")


def _install_executors(workflow: Any, settings: Config) -> None:
    """Replace the plugins' executors by ours: now if jobs share no file system with this process, as in a cluster.

    Otherwise when Snakemake makes one: here it does not know its executor yet, and most calls run their jobs locally.
    """
    registry = ExecutorPluginRegistry()
    for name in filter(registry.is_installed, EXECUTORS):
        install = partial(_install_executor, name, workflow, settings)
        later = bool(workflow.storage_settings.shared_fs_usage)
        patches.watch_executor(
            registry.get_plugin(name), partial(stage.note_executor, name), install if later else None
        )
        if not later:
            install()


def _install_executor(name: str, workflow: Any, settings: Config) -> None:
    import_module(EXECUTORS[name]).install(workflow, settings)
