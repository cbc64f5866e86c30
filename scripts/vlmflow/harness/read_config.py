"""The configuration of a Snakemake run, checked when the workflow is read."""

import sys
from pathlib import Path
from typing import Any

from vlmflow.config import yaml_file
from vlmflow.config.model import Config, check_config
from vlmflow.config.picture_sources import read_sources
from vlmflow.core.errors import VlmflowError


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
