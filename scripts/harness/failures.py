"""Why stages failed: the cause once, in the last lines of the output, without what Snakemake says around it."""

import atexit
import logging
import re
import sys
from typing import Any

from snakemake.logging import logger

from harness.stage import FAILURE
from harness.storage.stored_text import text_of
from vlmflow.core.errors import VlmflowError

EMPTY_WORDS = re.compile(
    r"RuleException:\nCalledProcessError in file .*\n.* returned non-zero exit status 1\.\s*"
    r"|WorkflowError:\nAt least one job did not complete successfully\.\s*",
    re.DOTALL,
)
"""What Snakemake says of a stage that ended with code 1: this, and no cause. A killed stage has another code."""


def install() -> None:
    """Leave out of Snakemake's output what says nothing of a failure."""
    logger.addFilter(_without_empty_words)


def _without_empty_words(record: logging.LogRecord) -> bool:
    if hasattr(record, "rule_msg") and record.rule_msg is None:
        record.msg = ""  # else Snakemake writes "message: None"
    return not (record.levelno == logging.ERROR and EMPTY_WORDS.fullmatch(record.getMessage()))


def show_at_the_end(workflow: Any) -> None:
    """Print why stages failed when all else has been said, from their logs."""
    for job in workflow.scheduler.failed:
        for log in job.log:
            try:
                text = text_of(log)
            except VlmflowError as error:
                text = f"{FAILURE}unknown cause: {error}"
            if FAILURE in text:
                cause = text[text.rindex(FAILURE) :].strip()
                atexit.register(print, f"\n{job.name} ({log}):\n{cause}", file=sys.stderr, flush=True)
