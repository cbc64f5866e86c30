"""What the Snakefile does besides its rules: before the first of them, and before the jobs."""

from typing import Any

from snakemake.utils import min_version

from harness import before_start, failures, plan, quick_start, stage, stage_environment
from harness.inputs import RuleInputs
from harness.kubernetes import executor
from harness.names import Names
from harness.params import RuleParams
from harness.refuse_relative_stores import refuse_relative_stores
from harness.resources import RuleResources
from harness.storage import plugins
from vlmflow.config.model import Config


def before_rules(workflow: Any, settings: Config) -> Config:
    """Prepare Snakemake for the rules: storage, executor, planning checks, locks, and the end of stages with it.

    Returns `settings`.
    """
    min_version("9.27")
    if workflow.remote_exec:  # a pod runs a job, and no `onstart`
        quick_start.leave_out_what_nobody_uses()
    stage.let_stages_end_with_this_process()
    failures.install()
    stage_environment.tell_stages(workflow, settings)
    plugins.install(workflow)
    executor.install(workflow, settings)
    plan.install(workflow, settings)
    return settings


def for_rules(workflow: Any, settings: Config) -> tuple[Names, RuleInputs, RuleParams, RuleResources]:
    """Return the objects that the rules use: wildcard constraints, inputs, params and resources."""
    return Names(settings), RuleInputs(workflow, settings), RuleParams(settings), RuleResources(workflow, settings)


def before_jobs(workflow: Any, settings: Config) -> None:
    """Refuse what would fail later (`snakemake -n` still plans it), and make jobs start faster."""
    refuse_relative_stores(workflow, settings)
    before_start.refuse_what_cannot_end(workflow, settings)
    quick_start.leave_out_what_nobody_uses()
