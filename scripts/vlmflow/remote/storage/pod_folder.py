"""A pod's folder for its jobs' local files, on the volume of the targets; and paths there, without following links.

The profile names the folder as `remote-job-local-storage-prefix: /outputs/.pods/$VLMFLOW_POD`, so that a rename gives
an output its name. VLMFLOW_POD is the pod's own name, from the downward API (kubernetes.job_shape): the host name
differs with hostNetwork, or if a template sets a hostname. A pod that ends removes its folder. The controller removes
the folders of lost pods, and when it starts those of pods that ended while no controller ran.

The controller's other mounts hold what no job may see or change: its token, and what it executes. A link on the volume,
which a job may have planted, could lead there. So the controller follows none (file_stream.opened_folder).
"""

import atexit
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from vlmflow.remote.cluster.file_stream import FILE, opened_folder
from vlmflow.remote.library import VlmflowError, counted
from vlmflow.remote.storage import in_place

VARIABLE = "VLMFLOW_POD"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def variable() -> dict[str, Any]:
    """Return the environment variable with a pod's own name, in the form of a container's spec."""
    return {"name": VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}


def remove_own_at_exit(local_storage_prefix: Path) -> None:
    """Make this process, a pod's Snakemake, remove its folder when it ends, successful or not.

    local_storage_prefix: where this Snakemake keeps local files. A folder without our pod's name stays: others may use
    it.
    """
    if local_storage_prefix.name == os.environ.get(VARIABLE):
        atexit.register(shutil.rmtree, local_storage_prefix, ignore_errors=True)


def remove_of(local_storage_prefix: Path, pod: str) -> None:
    """Remove a pod's folder, if it has one of its own.

    local_storage_prefix: Snakemake's remote-job-local-storage-prefix, as the profile gives it. pod: its name.

    Raises VlmflowError if the name is not a pod's name, and could lead elsewhere.
    """
    if not _is_name(pod):
        raise VlmflowError(f"{pod!r} is not a pod's name", "please report it; nothing was removed")
    if _is_of_one_pod(local_storage_prefix):
        # If a job has replaced a folder on the path by a link, nothing is removed.
        with suppress(OSError, VlmflowError), reached(local_storage_prefix.with_name(pod)) as folder:
            # A pod on a lost node may be alive, and about to rename one of its folders.
            in_place.discard(folder)


def sweep(local_storage_prefix: Path, living: Callable[[], Iterable[str]], say: Callable[[str], None]) -> None:
    """Remove the folders of pods that no longer exist, and what interrupted removals left.

    local_storage_prefix: as `remove_of` takes it. living: returns the names of all pods of the namespace; it is called
    after the folders are listed, since a pod exists before its folder. say: prints what was removed.
    """
    names = []
    if _is_of_one_pod(local_storage_prefix):
        with suppress(OSError, VlmflowError), reached(local_storage_prefix) as folder:
            names = [name for name in os.listdir(folder.parent) if _is_name(name)]
            in_place.discard_left(folder.parent)
    if names and (gone := sorted(set(names) - set(living()))):
        for name in gone:
            remove_of(local_storage_prefix, name)
        ended = counted(len(gone), "pod")
        say(f"Removed the folders of {ended} that ended while no controller was running: {', '.join(gone)}.")


def _is_of_one_pod(local_storage_prefix: Path) -> bool:
    return local_storage_prefix.name == f"${VARIABLE}"


def _is_name(pod: str) -> bool:
    return bool(NAME.fullmatch(pod)) and ".." not in pod


@contextmanager
def reached(path: Path, make: bool = False) -> Iterator[Path]:
    """Yield another path to a file or folder during the block; it leads there whatever folder above is renamed.

    The last name itself may be a link: the caller must not follow it.

    make: whether to make the folders above it if they are missing.

    Raises VlmflowError if a folder on the path is a link or a file, OSError if it cannot be opened; an OSError of the
    block names `path`.
    """
    with ExitStack() as held:
        try:
            folder = held.enter_context(opened_folder(path.parent.absolute(), make))
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise _planted(error.filename) from None
            raise
        try:
            yield Path("/proc/self/fd", str(folder), path.name)
        except OSError as error:
            if error.filename is not None:
                error.filename, error.filename2 = str(path), None
            raise


def read_end(file: Path, limit: int) -> bytes:
    """Return the last bytes of a file, at most `limit`.

    Raises VlmflowError if it is a link or no regular file, or if its path has a link; OSError if it cannot be read.
    """
    with reached(file) as way:
        try:
            descriptor = os.open(way, os.O_RDONLY | FILE)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise _planted(file) from None
            raise
    with open(descriptor, "rb") as stream:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise _planted(file)
        stream.seek(max(0, about.st_size - limit))
        return stream.read(limit)


def _planted(path: Path | str) -> VlmflowError:
    return VlmflowError(
        f"{path} is a link or not the expected kind of file; it is not followed, because a job may have made it",
        f"check where it leads (ls -l {path}) and which job made it; remove it and run the same command again",
    )
