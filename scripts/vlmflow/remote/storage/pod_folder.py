"""A pod's folder for its jobs' local files, on the volume of the targets.

The profile names it as `remote-job-local-storage-prefix: /outputs/.pods/$VLMFLOW_POD`, so that a rename gives an output
its name. VLMFLOW_POD is the pod's own name, from the downward API (remote.kubernetes.job_shape): the host name differs
with hostNetwork, or if a template sets a hostname. A pod that ends removes its folder. The controller removes the
folders of lost pods, and when it starts those of pods that ended while no controller ran.
"""

import atexit
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import counted
from vlmflow.remote.storage import in_place, no_links

VARIABLE = "VLMFLOW_POD"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def remove_of(local_storage_prefix: Path, pod: str) -> None:
    """Remove a pod's folder, if it has one of its own.

    local_storage_prefix: Snakemake's remote-job-local-storage-prefix, as the profile gives it. pod: its name.

    Raises VlmflowError if the name is not a pod's name, and could lead elsewhere.
    """
    if not _is_name(pod):
        raise VlmflowError(f"{pod!r} is not a pod's name", "please report it; nothing was removed")
    if _is_of_one_pod(local_storage_prefix):
        # If a job has replaced a folder on the path by a link, nothing is removed.
        with suppress(OSError, VlmflowError), no_links.reached(local_storage_prefix.with_name(pod)) as folder:
            in_place.discard(folder)  # a pod on a lost node may be alive, and about to rename one of its folders


def sweep(local_storage_prefix: Path, living: Callable[[], Iterable[str]], say: Callable[[str], None]) -> None:
    """Remove the folders of pods that no longer exist, and what interrupted removals left.

    local_storage_prefix: as `remove_of` takes it. living: returns the names of all pods of the namespace; it is called
    after the folders are listed, since a pod exists before its folder. say: prints what was removed.
    """
    names = []
    if _is_of_one_pod(local_storage_prefix):
        with suppress(OSError, VlmflowError), no_links.reached(local_storage_prefix) as folder:
            names = [name for name in os.listdir(folder.parent) if _is_name(name)]
            in_place.discard_left(folder.parent)
    if names and (gone := sorted(set(names) - set(living()))):
        for name in gone:
            remove_of(local_storage_prefix, name)
        ended = counted(len(gone), "pod")
        say(f"Removed the folders of {ended} that ended while no controller was running: {', '.join(gone)}.")


def remove_own_at_exit(local_storage_prefix: Path) -> None:
    """Make this process, a pod's Snakemake, remove its folder when it ends, successful or not.

    local_storage_prefix: where this Snakemake keeps local files. A folder without our pod's name stays: others may use
    it.
    """
    if local_storage_prefix.name == os.environ.get(VARIABLE):
        atexit.register(shutil.rmtree, local_storage_prefix, ignore_errors=True)


def variable() -> dict[str, Any]:
    """Return the environment variable with a pod's own name, in the form of a container's spec."""
    return {"name": VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}


def _is_of_one_pod(local_storage_prefix: Path) -> bool:
    return local_storage_prefix.name == f"${VARIABLE}"


def _is_name(pod: str) -> bool:
    return bool(NAME.fullmatch(pod)) and ".." not in pod
