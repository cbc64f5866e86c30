"""The configuration of a Snakemake run, checked when the workflow is read."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import snakemake.common.configfile
import snakemake.settings.types

from vlmflow.config import yaml_file
from vlmflow.config.model import Config, check_config
from vlmflow.config.picture_sources import read_sources
from vlmflow.core.errors import VlmflowError


def say_where_files_are_wrong() -> None:
    """Check every configuration file before Snakemake reads it, since its errors name neither the file nor the line.

    Snakemake reads --configfile before the Snakefile, so profiles/default calls this. Snakemake's reader itself stays.
    """
    read_theirs = snakemake.common.configfile.load_configfile

    def load_configfile(file: str | Path) -> dict[str, Any]:
        if Path(file).is_dir() or not Path(file).exists():
            sys.exit(
                f"--configfile: {file} is not a file\n  what to do: give a file; put targets after the files and --"
            )
        with _ending_on_fault():
            yaml_file.read_config(Path(file))
        content: dict[str, Any] = read_theirs(file)
        return content

    snakemake.common.configfile.load_configfile = load_configfile
    snakemake.settings.types.load_configfile = load_configfile


def read(workflow: Any, merged: dict[str, Any]) -> Config:
    """Check the merged configuration of files and command line, and the table of picture sources; returns it.

    Ends the process with a line per fault; an exception would print a traceback of the Snakefile.
    """
    ours = [file for file in workflow.configfiles if file not in workflow.overwrite_configfiles]
    files = [Path(file) for file in [*ours, *workflow.overwrite_configfiles]]
    with _ending_on_fault():
        if workflow.is_main_process:  # it has checked them for its jobs, also those in pods
            for file in files:
                yaml_file.read_config(file)  # Snakemake accepts a duplicate key
        settings = check_config(merged, files)
        read_sources(settings.picture_sources)
    return settings


@contextmanager
def _ending_on_fault() -> Iterator[None]:
    try:
        yield
    except VlmflowError as error:
        sys.exit(str(error))
