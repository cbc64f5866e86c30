"""The folder in which a pod keeps its jobs' local files, on the volume that the targets lie on.

It is named in the profile as `remote-job-local-storage-prefix: /outputs/.pods/$HOSTNAME`, so that giving an output
its name is a rename. A pod that ends removes its own; the controller removes those of pods that are lost.
"""

import atexit
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from harness.storage import in_place, no_links
from vlmflow.errors import VlmflowError

HOSTNAME = "$HOSTNAME"


def remove_of(local_storage_prefix: Path, hostname: str) -> None:
    """Remove what a pod left in its folder; nothing where it has none, or none of its own.

    local_storage_prefix: Snakemake's remote-job-local-storage-prefix, as the profile gives it. hostname: the pod's.

    Raises VlmflowError where the host name is none, and could lead elsewhere.
    """
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", hostname) or ".." in hostname:
        raise VlmflowError(f"{hostname!r} is no pod's host name", "report it: nothing was removed")
    if HOSTNAME in local_storage_prefix.name:
        name = local_storage_prefix.name.replace(HOSTNAME, hostname)
        # Where a job has put a link in the folder's place, nothing is removed.
        with suppress(OSError, VlmflowError), no_links.reached(local_storage_prefix.with_name(name)) as folder:
            in_place.discard(folder)  # the pod may be alive on its lost node, and about to give a folder of it a name


def remove_own_at_exit(local_storage_prefix: Path) -> None:
    """Have this process, a pod's Snakemake, remove its folder when it ends, finished or failed.

    local_storage_prefix: where this Snakemake keeps local files. One that does not carry our host's name is left: it
    is not ours alone.
    """
    if local_storage_prefix.name == socket.gethostname():
        atexit.register(shutil.rmtree, local_storage_prefix, ignore_errors=True)
