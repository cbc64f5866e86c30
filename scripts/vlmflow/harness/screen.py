"""Prints why stages failed: each cause once, at the end of the output, without Snakemake's text around it.

Says which jobs run here when nothing has said anything for most of a minute: a stage may compute for long.

Prints at the end of the process what the runs of a call are: rows, losses, gate, verdict, pages, weights.

What Snakemake prints while it works: the lines that tell a person something.

Its own log (`.snakemake/log`) and `--verbose` have every line, with every reason.
"""

import atexit
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

from snakemake.common import NOTHING_TO_BE_DONE_MSG
from snakemake.jobs import Reason
from snakemake.logging import DefaultFormatter, get_event, is_quiet_about, logger, timestamp
from snakemake_interface_logger_plugins.common import LogEvent

from vlmflow.config.model import Config
from vlmflow.core.errors import FAILURE, VlmflowError, end_of, printable_lines
from vlmflow.harness.staleness import differing


def collect_failures() -> None:
    """Filter Snakemake's output: drop messages about a failure that do not give its cause."""
    logger.addFilter(_gives_a_cause)


def _gives_a_cause(record: logging.LogRecord) -> bool:
    """Return whether a message says more than that a stage ended with code 1; a killed one has another code.

    Snakemake prints an exception while it handles it.
    """
    if hasattr(record, "rule_msg") and record.rule_msg is None:
        record.msg = ""  # otherwise Snakemake prints "message: None"
    cause = getattr(sys.exc_info()[1], "__context__", None)
    of_a_stage = isinstance(cause, subprocess.CalledProcessError) and cause.returncode == 1
    return not (get_event(record) == LogEvent.ERROR and of_a_stage)


def show_failures_at_the_end(workflow: Any, text_in_storage: Callable[[Any], str]) -> None:
    """Print at the end of the process why stages failed, from their logs.

    text_in_storage: returns the text of a log that is not a local file; may raise VlmflowError.
    """
    logger.addFilter(_is_not_the_end)
    for job in workflow.scheduler.failed:
        for log in job.log:
            try:
                text = text_in_storage(log) if log.is_storage else _text_of(Path(log))
            except VlmflowError as error:
                text = f"{FAILURE}unknown cause: {error}"
            if FAILURE in text:
                cause = text[text.rindex(FAILURE) :].strip()
                atexit.register(print, f"\n{job.name} ({log}):\n{cause}", file=sys.stderr, flush=True)


def _is_not_the_end(record: logging.LogRecord) -> bool:
    """Return whether a message is no WorkflowError: the last one only says that jobs have failed."""
    return getattr(record, "exception", None) != "WorkflowError"


def _text_of(log: Path) -> str:
    return end_of(log) if log.is_file() else ""


SILENCE = 45.0
"""Seconds. A terminal's time lags by up to 8, and no minute shall pass without a line."""


def watch(workflow: Any) -> None:
    """Start a thread that ends with this process. Call it before the first job."""
    threading.Thread(target=_watch, args=(workflow,), daemon=True).start()


def _watch(workflow: Any) -> None:
    last = time.time()
    while True:
        time.sleep(max(last + SILENCE - time.time(), 1))
        last = max(last, _last_line())
        with suppress(Exception):  # a line that cannot be made is no reason to show a traceback
            running = list(workflow.scheduler.running)
            if running and time.time() - last >= SILENCE:
                logger.info(f"still running: {'; '.join(sorted(map(_named, running)))}")
                last = time.time()


def _last_line() -> float:
    """Return when this process or a stage last wrote to standard error, in seconds since 1970; 0 if nothing tells it.

    A file and a terminal do; the pipes of a newer Linux do not, so that there the line comes beside a stage's own.
    """
    try:
        return os.fstat(sys.stderr.fileno()).st_mtime
    except (OSError, ValueError):
        return 0.0


def _named(job: Any) -> str:
    return f"{job.message or job.rule.name}{''.join(f' ({log})' for log in job.log[:1])}"


CopyFromStorage = Callable[[Any, Iterable[tuple[str, str]], Path], None]
"""Copies from the storage of a workflow those of some targets (`overview.summary_files`) that exist into a folder."""


def show_runs_at_the_end(workflow: Any, settings: Config, copy_from_storage: CopyFromStorage) -> None:
    """Print the summary of every run whose weights the call asks for, or needs; what fails here fails no run."""
    runs = sorted({job.wildcards.run for job in workflow.dag.jobs if job.rule.name == "publish_merged"})
    texts = []
    for run in runs:
        try:
            texts.append(_summary(workflow, run, settings.runs[run].dataset, copy_from_storage))
        except Exception as error:  # whatever an account of another version holds, or the storage says
            texts.append(f"\n{run} is done. Its summary cannot be shown: {type(error).__name__}: {error}\n")
    if texts:
        atexit.register(print, printable_lines("".join(texts)), flush=True)


def _summary(workflow: Any, run: str, dataset: str, copy_from_storage: CopyFromStorage) -> str:
    from vlmflow.reports.overview import summary, summary_files  # takes time, which plans and pods do not need

    prefix = os.path.expandvars(workflow.storage_settings.default_storage_prefix or "")
    if workflow.storage_settings.default_storage_provider is None:
        here, asked_in = Path.cwd(), Path(workflow.rundir)
        shown = here.relative_to(asked_in) if here.is_relative_to(asked_in) else here
        return summary(Path(), run, dataset, "" if shown == Path() else f"{shown}/")
    with tempfile.TemporaryDirectory(prefix="vlmflow-summary-") as copies:
        copy_from_storage(workflow, summary_files(run, dataset), Path(copies))
        return summary(Path(copies), run, dataset, f"{prefix}/").replace(copies, prefix)


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
        caller = f"{record.module}.{record.funcName}"
        return caller in WITHOUT_EVENT and not (self._workflow.dryrun and caller == "workflow.execute")


class _Formatter(DefaultFormatter):
    def __init__(self, workflow: Any) -> None:
        super().__init__(workflow.output_settings.quiet, workflow.output_settings.show_failed_logs)
        self._workflow = workflow

    def format_job_info(self, msg: dict[str, Any]) -> str:
        """Return the rule's message, and below it why the job runs if it is the first of a chain."""
        text = msg["rule_msg"] if self._workflow.dryrun else f"{timestamp()} {msg['rule_msg']}"
        why = "" if is_quiet_about(self.quiet, "reason") else first_cause(self._workflow.dag, msg["jobid"])
        return f"{text}\nReason: {why}" if why else str(text)


def first_cause(dag: Any, number: int) -> str:
    """Return why a job runs, in Snakemake's words; "" if only because another job does, before or after it.

    dag: Snakemake's plan. number: of the job in it.
    """
    job = next(job for job in dag.jobs if dag.jobid(job) == number)
    known, why = dag.reason(job), Reason()
    if known.derived:  # from another job: `rule all` is one, whose files are what the call asks for
        wanted = {file for user, files in dag.depending[job].items() if user.rule.norun for file in files}
        why.missing_output.update(known.missing_output & wanted)
    else:
        why = copy(known)
        why._updated_input_run = None  # that earlier jobs run
        if why.params_changed:
            why.params_changed = differing(why.params_changed)
    return str(why)
