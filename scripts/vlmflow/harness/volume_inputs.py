"""Files outside the storage of the targets as inputs of a rule: a local data set, a local model."""

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CLOCKS_DIFFER = 60.0
"""Seconds by which the clock of a file server may be ahead of this machine's: no stage makes its files so fast."""


def as_inputs(workflow: Any, files: Iterable[Path]) -> list[Any]:
    """Return local files as inputs of a rule, in Snakemake's form.

    With targets in storage, Snakemake would look for each path below the storage's prefix (its path_modifier,
    `apply_default_storage`). Absolute paths are then used unchanged, for a volume that is mounted here and in the pods.
    A file that does not exist here (a laptop has no such volume) is left out; if the pod lacks it too, the stage fails.

    Ends the process if a file's time is in the future: Snakemake would take whatever is made of it for older, and
    remove it, in every call.
    """
    wanted = list(files)
    for file in wanted:
        if file.is_file() and (changed := file.stat().st_mtime) > time.time() + CLOCKS_DIFFER:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed))
            sys.exit(f"{file}: its time, {when}, is in the future\n  what to do: set it to now: touch {file}")
    if workflow.storage_registry.default_storage_provider is None:
        return [str(file) for file in wanted]
    return [workflow.storage_registry.fs(str(file)) for file in wanted if file.is_absolute() and file.is_file()]
