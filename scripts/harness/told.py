"""What stages know of the call besides their rule's inputs and params, through the environment.

A param that differs between two calls would have Snakemake run the rule again. A pod reads the same configuration, and
tells itself the same.
"""

import os
import shlex
from pathlib import Path
from typing import Any

from harness.messages import CALL, IN_POD
from vlmflow.config.model import Config
from vlmflow.integrity import LEVEL, RECORDS, RECORDS_FOLDER


def tell_stages(workflow: Any, settings: Config) -> None:
    """Tell the stages that this Snakemake starts how the workflow was called."""
    os.environ[LEVEL] = settings.integrity
    os.environ[RECORDS] = str(Path(settings.stores.pictures).absolute() / RECORDS_FOLDER)
    os.environ[CALL] = shlex.join(_options(workflow))
    os.environ[IN_POD] = "yes" if workflow.remote_exec else ""


def _options(workflow: Any) -> list[str]:
    root = Path(workflow.basedir)

    def shown(path: Any) -> str:
        absolute = Path(path).absolute()
        return str(absolute.relative_to(root) if absolute.is_relative_to(root) else absolute)

    words = []
    if workflow.overwrite_workdir:
        words += ["--directory", shown(workflow.overwrite_workdir)]
    if workflow.overwrite_configfiles:
        words += ["--configfile", *map(shown, workflow.overwrite_configfiles)]
    return words
