"""Keeps processes from loading unused libraries as they start.

This saves half a second of a Snakemake call that runs jobs, and a tenth of a second of each job.
"""

import os
import sys


def leave_out_what_nobody_uses() -> None:
    """Make pandas unavailable in this process, and switch off pydantic's plugins in the stages that it starts.

    Before each script Snakemake checks whether a param is a pandas table, if pandas is installed; our params are JSON
    values. None in `sys.modules` marks a module as missing. pydantic searches the entry points of every installed
    package for plugins; no lock file has one.

    Call it only in a process that runs jobs: one that only plans (the doctor, a test) may use pandas afterwards.
    """
    sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
