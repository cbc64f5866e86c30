"""The configuration of a Snakemake run, checked when the workflow is read."""

import sys
from pathlib import Path
from typing import Any

from vlmflow.archives.sources import read_sources
from vlmflow.config.model import Config, check_config
from vlmflow.errors import VlmflowError


def read(workflow: Any, merged: dict[str, Any]) -> Config:
    """Check what the configuration files and the command line give together, and the table that it lies over.

    Ends the process with a line per fault; an exception would bring a traceback of the Snakefile with it.
    """
    ours = [file for file in workflow.configfiles if file not in workflow.overwrite_configfiles]
    try:
        settings = check_config(merged, [Path(file) for file in [*ours, *workflow.overwrite_configfiles]])
        read_sources(settings.picture_sources)
        return settings
    except VlmflowError as error:
        sys.exit(str(error))
