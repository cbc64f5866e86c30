"""Files that lie outside the storage of the targets as inputs of a rule: a local data set, a local model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def as_inputs(workflow: Any, files: Iterable[Path]) -> list[Any]:
    """Give local files as inputs of a rule, in Snakemake's form.

    Where targets lie in storage, Snakemake would look for each path below the storage's prefix (its path_modifier,
    `apply_default_storage`). There, absolute paths are taken as they are, for a volume that is mounted here and in the
    pods; what is not here (a laptop has no such volume) is no input, and the stage says so where it is not in the pod.
    """
    if workflow.storage_registry.default_storage_provider is None:
        return [str(file) for file in files]
    return [workflow.storage_registry.fs(str(file)) for file in files if file.is_absolute() and file.is_file()]
