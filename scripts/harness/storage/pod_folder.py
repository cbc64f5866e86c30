"""The folder in which a pod keeps its jobs' local files, on the volume that the targets lie on.

It is named in the profile as `remote-job-local-storage-prefix: /outputs/.pods/$VLMFLOW_POD`, so that giving an output
its name is a rename. VLMFLOW_POD is the pod's own name, by the downward API (harness.kubernetes.job_shape): a host name
is another one with hostNetwork, or where a template gives a hostname. A pod that ends removes its folder; the
controller removes those of pods that are lost, and when it starts those of pods that went while it was away.
"""

import atexit
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.storage import in_place, no_links
from vlmflow.core.errors import VlmflowError

VARIABLE = "VLMFLOW_POD"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def remove_of(local_storage_prefix: Path, pod: str) -> None:
    """Remove what a pod left in its folder; nothing where it has none, or none of its own.

    local_storage_prefix: Snakemake's remote-job-local-storage-prefix, as the profile gives it. pod: its name.

    Raises VlmflowError where the name is none, and could lead elsewhere.
    """
    if not _is_name(pod):
        raise VlmflowError(f"{pod!r} is not a pod's name", "please report it; nothing was removed")
    if _is_of_one_pod(local_storage_prefix):
        # Where a job has put a link in the folder's place, nothing is removed.
        with suppress(OSError, VlmflowError), no_links.reached(local_storage_prefix.with_name(pod)) as folder:
            in_place.discard(folder)  # the pod may be alive on its lost node, and about to give a folder of it a name


def sweep(local_storage_prefix: Path | None, living: Callable[[], Iterable[str]], say: Callable[[str], None]) -> None:
    """Remove the folders of pods that are no more, and say so; and what removals that were cut off left.

    local_storage_prefix: as `remove_of` takes it. living: gives the names of all pods of the namespace; it is asked
    after the folders were listed, since a pod is there before its folder.
    """
    prefix, names = Path(local_storage_prefix or "."), []
    if _is_of_one_pod(prefix):
        with suppress(OSError, VlmflowError), no_links.reached(prefix) as folder:
            names = [name for name in os.listdir(folder.parent) if _is_name(name)]
            in_place.discard_left(folder.parent)
    if names and (gone := sorted(set(names) - set(living()))):
        for name in gone:
            remove_of(prefix, name)
        say(f"Removed what {len(gone)} pod(s) left that ended while no controller was running: {', '.join(gone)}.")


def remove_own_at_exit(local_storage_prefix: Path) -> None:
    """Have this process, a pod's Snakemake, remove its folder when it ends, finished or failed.

    local_storage_prefix: where this Snakemake keeps local files. One that does not carry our pod's name is left: it
    is not ours alone.
    """
    if local_storage_prefix.name == os.environ.get(VARIABLE):
        atexit.register(shutil.rmtree, local_storage_prefix, ignore_errors=True)


def variable() -> dict[str, Any]:
    """Give the variable with a pod's own name, as a container's spec has it."""
    return {"name": VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}


def _is_of_one_pod(local_storage_prefix: Path) -> bool:
    return local_storage_prefix.name == f"${VARIABLE}"


def _is_name(pod: str) -> bool:
    return bool(NAME.fullmatch(pod)) and ".." not in pod
