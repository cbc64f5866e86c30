"""The classes of stored targets, in place of the plugins' own, in the main process and in every pod.

A target on a shared volume is here: inputs are links to it, outputs are renamed to it. One in S3 is in s3_object. The
main process reads texts of jobs from either as data, with a size limit, following no link.
"""

import asyncio
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from snakemake.io import get_flag_value
from snakemake_storage_plugin_fs import StorageObject

from vlmflow.remote.library import SHOWN_BYTES, VlmflowError, end_of, plain, remove
from vlmflow.remote.storage import in_place, pod_folder
from vlmflow.remote.storage.s3_object import S3Object

FETCHED_BYTES = 64 << 20
"""The size limit of a log or an account that is downloaded from object storage."""


class FsObject(StorageObject):
    """A target on a volume; replaces the fs plugin's own class.

    The plugin copies each input, deletes an old target before it writes the new one under its final name, and copies
    each output (snakemake_storage_plugin_fs, `retrieve_object` and `store_object`). This class copies nothing if the
    local folder of a job is on the same volume.
    """

    def local_footprint(self) -> int:
        """Return 0, the bytes of a link."""
        return 0

    def exists(self) -> bool:
        """Return whether the target exists, after restoring one that a killed writer had renamed."""
        if not self.query_path.exists():
            with suppress(FileNotFoundError, VlmflowError), pod_folder.reached(self.query_path) as target:
                in_place.put_back(target)
        return bool(self.query_path.exists())

    def content(self, name: str, limit: int) -> bytes | None:
        """Return the last bytes of a file in this folder, at most `limit`; None if it does not exist.

        Raises VlmflowError if the file is a link, which a job may have planted.
        """
        with suppress(FileNotFoundError):
            return pod_folder.read_end(self.query_path / name, limit)
        return None

    def retrieve_object(self) -> None:
        """Link the local path to the target.

        Raises FileNotFoundError if the target does not exist.
        """
        if not self.exists():
            raise FileNotFoundError(self.query)
        self._link_to_target()

    def store_object(self) -> None:
        """Rename the local file or folder to the target, and leave a link in its place.

        Raises OSError if that fails; the target is then unchanged, or another writer's. Raises VlmflowError if the
        controller would have to follow a link, which a job may have planted.
        """
        local = self.local_path()
        if self._is_callers_own():
            with pod_folder.reached(self.query_path, make=True) as target:
                in_place.copy(local, target)
        # Snakemake stores outputs twice: after the job, and at its own end.
        elif not (local.is_symlink() and local.resolve() == self.query_path.resolve()):
            in_place.move(local, self.query_path)
            self._link_to_target()

    def remove(self) -> None:
        """Remove the target, and our link to it: a job that opened the dangling link would write into the target.

        Raises VlmflowError if a folder on its path is a link, which a job may have planted.
        """
        if not self._is_callers_own() and self.local_path().is_symlink():
            self.local_path().unlink()
        with suppress(FileNotFoundError), pod_folder.reached(self.query_path) as target:
            in_place.take_away(target)

    def _is_callers_own(self) -> bool:
        """Return whether the local path is Snakemake's own file, such as the archive of the workflow's sources."""
        return self._overwrite_local_path is not None

    def _link_to_target(self) -> None:
        local = self.local_path()
        remove(local)
        local.parent.mkdir(parents=True, exist_ok=True)
        local.symlink_to(self.query_path.absolute(), target_is_directory=self.query_path.is_dir())


OBJECTS = (FsObject, S3Object)
"""Store every target completely or not at all; each replaces the class that it derives from."""


def prepare(workflow: Any) -> None:
    """Let a pod's folder end with the pod.

    Ends the process if the address of the targets names an environment variable that is not set.
    """
    prefix = workflow.storage_settings.default_storage_prefix
    for name in re.findall(r"\$\{?(\w+)", prefix or ""):
        if name not in os.environ:
            sys.exit(
                f"--default-storage-prefix {prefix}: the environment variable {name} is not set\n"
                f"  what to do: export {name}=… in this shell, and run the same command again"
            )
    if workflow.remote_exec:
        pod_folder.remove_own_at_exit(workflow.storage_settings.local_storage_prefix)


def text_of(file: Any) -> str:
    """Return the end of a job's text file in storage, such as its log; "" if it does not exist.

    file: as Snakemake lists it (`job.log`).

    Raises WorkflowError if the storage cannot be reached, VlmflowError if the file is a link or too large.
    """
    target = file.storage_object
    if not target.exists():
        return ""
    if isinstance(target, FsObject):
        return plain(pod_folder.read_end(target.query_path, SHOWN_BYTES).decode(errors="replace"))
    if target.size() > FETCHED_BYTES:
        raise VlmflowError(
            f"{target.query} has {target.size():,} bytes; the limit of a log is {FETCHED_BYTES:,}",
            "read it in the storage",
        )
    asyncio.run(target.managed_retrieve())
    return end_of(Path(file))


def copy_existing(workflow: Any, files: Iterable[tuple[str, str]], folder: Path) -> None:
    """Copy files of jobs from the default storage into a folder, those that exist, under their own names.

    files: targets, each with the name of a file in its folder, or "": then only an empty file shows that it exists.

    Raises WorkflowError if the storage cannot be reached, VlmflowError if a file is a link.
    """
    for target, name in files:
        stored = get_flag_value(workflow.modifier.path_modifier.apply_default_storage(target), "storage_object")
        content = stored.content(name, FETCHED_BYTES) if name else b"" if stored.exists() else None
        if content is not None:
            (folder / target / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / target / name).write_bytes(content)
