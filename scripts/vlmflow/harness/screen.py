"""What Snakemake prints while it works: the lines that tell a person something.

Its own log (`.snakemake/log`) and `--verbose` have every line, with every reason.
"""

import logging
import sys
from copy import copy
from typing import Any

from snakemake.common import NOTHING_TO_BE_DONE_MSG
from snakemake.jobs import Reason
from snakemake.logging import DefaultFormatter, get_event, is_quiet_about, logger, timestamp
from snakemake_interface_logger_plugins.common import LogEvent

from vlmflow.harness.staleness import differing

BOOKKEEPING = {LogEvent.WORKFLOW_STARTED, LogEvent.RESOURCES_INFO, LogEvent.JOB_STARTED, LogEvent.JOB_FINISHED}
"""Versions and digests, the machine's cores, how many jobs start, which number ended: PROGRESS says how far all are."""

WITHOUT_EVENT = {
    "api.execute_workflow",
    "workflow._build_dag",
    "workflow.execute",
    "job_scheduler.schedule",
    "dag.print_reasons",
    "workflow.log_provenance_info",
    "__init__.lock_warn_only",  # of another Snakemake at work, which it calls an error; `plan` says it
}
"""Snakemake's functions whose messages without an event are about itself: they select jobs, they use this shell."""

OF_PLUGIN = "/snakemake_executor_plugin_slurm/"
"""Where the plugin for Slurm is, which tells of its own log files and queries; our executor tells of the jobs."""


def install(workflow: Any) -> None:
    """Shorten what this process prints on the screen. Call it before Snakemake plans."""
    if workflow.output_settings.verbose:
        return
    for handler in logger.handlers:
        if handler.name == "DefaultStreamHandler":  # there is none if a plugin prints instead
            handler.addFilter(_Filter(workflow))
            handler.setFormatter(_Formatter(workflow))


class _Filter(logging.Filter):
    def __init__(self, workflow: Any) -> None:
        super().__init__()
        self._workflow = workflow
        self._counted = False

    def filter(self, record: logging.LogRecord) -> bool:
        event = get_event(record)
        if event == LogEvent.RUN_INFO:  # the table of jobs, twice in a dry run
            first, self._counted = not self._counted, True
            return first
        if event == LogEvent.JOB_INFO:
            return bool(getattr(record, "rule_msg", None))  # `rule all` has none, and does nothing
        if OF_PLUGIN in record.pathname and record.levelno < logging.ERROR:
            return False
        return event not in BOOKKEEPING if event else not self._is_bookkeeping(record)

    def _is_bookkeeping(self, record: logging.LogRecord) -> bool:
        """Return whether a message without an event is about Snakemake itself.

        What it says on Ctrl-C (an exception), after SIGTERM, and at the end of a dry run is about the run.
        """
        ending = sys.exc_info()[0] or getattr(self._workflow.scheduler, "_user_kill", None)
        if record.levelno != logging.INFO or ending or record.msg is NOTHING_TO_BE_DONE_MSG:
            return False
        if hasattr(record, "quietness"):  # each temporary file that it removes
            return True
        place = f"{record.module}.{record.funcName}"
        return place in WITHOUT_EVENT and not (self._workflow.dryrun and place == "workflow.execute")


class _Formatter(DefaultFormatter):
    def __init__(self, workflow: Any) -> None:
        super().__init__(workflow.output_settings.quiet, workflow.output_settings.show_failed_logs)
        self._workflow = workflow

    def format_job_info(self, msg: dict[str, Any]) -> str:
        """Return the rule's message, and below it why the job runs if it is the first of a chain."""
        said = msg["rule_msg"] if self._workflow.dryrun else f"{timestamp()} {msg['rule_msg']}"
        why = "" if is_quiet_about(self.quiet, "reason") else first_cause(self._workflow.dag, msg["jobid"])
        return f"{said}\nReason: {why}" if why else str(said)


def first_cause(dag: Any, number: int) -> str:
    """Return why a job runs, in Snakemake's words; "" if only because another job does, before or after it.

    dag: Snakemake's plan. number: of the job in it.
    """
    job = next(job for job in dag.jobs if dag.jobid(job) == number)
    known, why = dag.reason(job), Reason()
    if known.derived:  # from another job: `rule all` is one, whose files are what the call asks for
        asked = {file for user, files in dag.depending[job].items() if user.rule.norun for file in files}
        why.missing_output.update(known.missing_output & asked)
    else:
        why = copy(known)
        why._updated_input_run = None  # that earlier jobs run
        if why.params_changed:
            why.params_changed = differing(why.params_changed)
    return str(why)
