"""Targets on a shared volume: inputs are links to them, outputs are renamed to them."""

from contextlib import suppress
from pathlib import Path

from snakemake_storage_plugin_fs import StorageObject

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import remove
from vlmflow.remote.storage import in_place, no_links


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
            with suppress(FileNotFoundError, VlmflowError), no_links.reached(self.query_path) as target:
                in_place.put_back(target)
        return bool(self.query_path.exists())

    def content(self, name: str, limit: int) -> bytes | None:
        """Return the last bytes of a file in this folder, at most `limit`; None if it does not exist.

        name: the file's; "" for no bytes of the target itself.

        Raises VlmflowError if the file is a link, which a job may have planted.
        """
        if not name:
            return b"" if self.exists() else None
        with suppress(FileNotFoundError):
            return no_links.read_end(self.query_path / name, limit)
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
            with no_links.reached(self.query_path, make=True) as target:
                in_place.copy(local, target)
        elif not self._is_stored(local):  # Snakemake stores outputs twice: after the job, and at its own end
            in_place.move(local, self.query_path)
            self._link_to_target()

    def remove(self) -> None:
        """Remove the target, and our link to it: a job that opened the dangling link would write into the target.

        Raises VlmflowError if a folder on its path is a link, which a job may have planted.
        """
        if not self._is_callers_own() and self.local_path().is_symlink():
            self.local_path().unlink()
        with suppress(FileNotFoundError), no_links.reached(self.query_path) as target:
            in_place.take_away(target)

    def _is_callers_own(self) -> bool:
        """Return whether the local path is Snakemake's own file, such as the archive of the workflow's sources."""
        return self._overwrite_local_path is not None

    def _is_stored(self, local: Path) -> bool:
        return local.is_symlink() and local.resolve() == self.query_path.resolve()

    def _link_to_target(self) -> None:
        local = self.local_path()
        remove(local)
        local.parent.mkdir(parents=True, exist_ok=True)
        local.symlink_to(self.query_path.absolute(), target_is_directory=self.query_path.is_dir())
