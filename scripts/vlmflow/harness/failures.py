"""Prints why stages failed: each cause once, at the end of the output, without Snakemake's text around it."""

import atexit
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snakemake.logging import get_event, logger
from snakemake_interface_logger_plugins.common import LogEvent

from vlmflow.core.errors import VlmflowError
from vlmflow.core.stage_end import FAILURE, end_of


def install() -> None:
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


def show_at_the_end(workflow: Any, text_in_storage: Callable[[Any], str]) -> None:
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
