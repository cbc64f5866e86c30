"""What processes would load at their start though nothing here uses it: left out, as Python and pydantic allow it.

It saves half a second of a call that runs jobs, and a tenth of each job.
"""

import os
import sys


def leave_out_what_nobody_uses() -> None:
    """Leave pandas out of this process, and pydantic's plugins out of the stages that it starts.

    Snakemake looks before each script whether one of its params is a table of pandas, if pandas is there; params here
    are values of JSON. None in `sys.modules` is Python's own way to say that a module is not there. pydantic reads the
    entry points of every installed package for plugins of its own; no lock has one.

    It is for a process that runs jobs: one that only plans (the doctor, a test) may use pandas afterwards.
    """
    sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
