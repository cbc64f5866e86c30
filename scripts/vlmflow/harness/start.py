"""What the Snakefile does besides its rules: before the first of them, before the jobs, and after them.

This is the only module through which the workflow reaches `remote`, and only if a call asks for it: by an executor that
runs jobs elsewhere, or by a default storage.
"""

import os
from functools import partial
from importlib import import_module
from typing import Any

from snakemake.utils import min_version
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from vlmflow.config.model import Config
from vlmflow.harness import (
    before_start,
    end_of_run,
    failures,
    patches,
    place,
    plan,
    quick_start,
    screen,
    sign_of_life,
    stage,
    stage_environment,
)
from vlmflow.harness.inputs import RuleInputs
from vlmflow.harness.names import Names
from vlmflow.harness.params import RuleParams
from vlmflow.harness.refuse_relative_stores import refuse_relative_stores
from vlmflow.harness.resources import RuleResources

EXECUTORS = {"kubernetes": "vlmflow.remote.kubernetes.executor", "slurm": "vlmflow.remote.slurm.executor"}
"""Our own executors: the module of each, by the plugin whose settings it has and which it replaces (`install`)."""


def before_rules(workflow: Any, settings: Config) -> Config:
    """Prepare Snakemake for the rules: storage, executor, planning checks, locks, and the end of stages with it.

    Returns `settings`.
    """
    min_version("9.27")
    if workflow.remote_exec:  # a pod runs a job, and no `onstart`
        quick_start.leave_out_what_nobody_uses()
        if place.IN_SLURM in os.environ:
            import_module("vlmflow.remote.slurm.in_job").install(workflow, patches.on_sigterm)
    stage.let_stages_end_with_this_process()
    failures.install()
    stage_environment.tell_stages(workflow, settings)
    if workflow.storage_settings.default_storage_provider is not None:
        storage = import_module("vlmflow.remote.storage.plugins")
        storage.prepare(workflow)
        patches.store_by(*storage.OBJECTS)
    if workflow.is_main_process:
        screen.install(workflow)
        _install_executors(workflow, settings)
    plan.install(workflow, settings, _refuse_plan, lambda: after_success(workflow, settings))
    return settings


def for_rules(workflow: Any, settings: Config) -> tuple[Names, RuleInputs, RuleParams, RuleResources]:
    """Return the objects that the rules use: wildcard constraints, inputs, params and resources."""
    return Names(settings), RuleInputs(workflow, settings), RuleParams(settings), RuleResources(workflow, settings)


def before_jobs(workflow: Any, settings: Config) -> None:
    """Refuse what would fail later (`snakemake -n` still plans it), and make jobs start faster."""
    refuse_relative_stores(workflow, settings)
    before_start.refuse_unpinned(workflow, settings)
    quick_start.leave_out_what_nobody_uses()
    if workflow.local_exec:
        sign_of_life.watch(workflow)


def after_success(workflow: Any, settings: Config) -> None:
    """Print at the end of the process what the runs of the call are."""
    end_of_run.show_at_the_end(workflow, settings, lambda *asked: _stored().copy_existing(*asked))


def after_failures(workflow: Any) -> None:
    """Print at the end of the process why stages failed."""
    failures.show_at_the_end(workflow, lambda log: str(_stored().text_of(log)))


def _refuse_plan(workflow: Any, settings: Config) -> None:
    """Refuse jobs that the scheduler of the call could never start."""
    if place.on_slurm():
        import_module("vlmflow.remote.slurm.partitions").refuse_plan(workflow, settings)


def _stored() -> Any:
    return import_module("vlmflow.remote.storage.stored_text")


def _install_executors(workflow: Any, settings: Config) -> None:
    """Replace the plugins' executors by ours: now if jobs share no file system with this process, as in a cluster.

    Otherwise when Snakemake makes one: here it does not know its executor yet, and most calls run their jobs locally.
    """
    registry = ExecutorPluginRegistry()
    for name in filter(registry.is_installed, EXECUTORS):
        install = partial(_install_executor, name, workflow, settings)
        later = bool(workflow.storage_settings.shared_fs_usage)
        patches.watch_executor(
            registry.get_plugin(name), partial(place.note_executor, name), install if later else None
        )
        if not later:
            install()


def _install_executor(name: str, workflow: Any, settings: Config) -> None:
    import_module(EXECUTORS[name]).install(workflow, settings)
