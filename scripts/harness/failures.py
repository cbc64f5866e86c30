"""Prints why stages failed: each cause once, at the end of the output, without Snakemake's text around it."""

import atexit
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snakemake.logging import logger

from vlmflow.core.errors import VlmflowError
from vlmflow.core.stage_end import FAILURE, end_of

EMPTY_WORDS = re.compile(
    r"RuleException:\nCalledProcessError in file .*\n.* returned non-zero exit status 1\.\s*"
    r"|WorkflowError:\nAt least one job did not complete successfully\.\s*",
    re.DOTALL,
)
"""Snakemake's text about a stage that ended with code 1, without a cause. A killed stage has another code."""


def install() -> None:
    """Filter Snakemake's output: drop messages about a failure that do not give its cause."""
    logger.addFilter(_without_empty_words)


def _without_empty_words(record: logging.LogRecord) -> bool:
    if hasattr(record, "rule_msg") and record.rule_msg is None:
        record.msg = ""  # otherwise Snakemake prints "message: None"
    return not (record.levelno == logging.ERROR and EMPTY_WORDS.fullmatch(record.getMessage()))


def show_at_the_end(workflow: Any, text_in_storage: Callable[[Any], str]) -> None:
    """Print at the end of the process why stages failed, from their logs.

    text_in_storage: returns the text of a log that is not a local file; may raise VlmflowError.
    """
    for job in workflow.scheduler.failed:
        for log in job.log:
            try:
                text = text_in_storage(log) if log.is_storage else _text_of(Path(log))
            except VlmflowError as error:
                text = f"{FAILURE}unknown cause: {error}"
            if FAILURE in text:
                cause = text[text.rindex(FAILURE) :].strip()
                atexit.register(print, f"\n{job.name} ({log}):\n{cause}", file=sys.stderr, flush=True)


def _text_of(log: Path) -> str:
    return end_of(log) if log.is_file() else ""
