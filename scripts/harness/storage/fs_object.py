"""Targets on a shared volume: inputs are links to them, outputs are renamed to them."""

from contextlib import suppress
from pathlib import Path

from snakemake_storage_plugin_fs import StorageObject

from harness.storage import in_place, no_links
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import remove


class FsObject(StorageObject):
    """A target that a volume holds, in the place of the fs plugin's own class.

    The plugin copies each input, deletes an old target before it writes the new one under its final name, and copies
    each output byte (snakemake_storage_plugin_fs, `retrieve_object` and `store_object`). A job's local folder should
    lie on the same volume: there, nothing is copied.
    """

    def local_footprint(self) -> int:
        """Give 0, the bytes that a link takes."""
        return 0

    def exists(self) -> bool:
        """Tell whether the target is there; it is there again where a killed writer had taken its name away."""
        if not self.query_path.exists():
            with suppress(FileNotFoundError, VlmflowError), no_links.reached(self.query_path) as target:
                in_place.put_back(target)
        return bool(self.query_path.exists())

    def retrieve_object(self) -> None:
        """Link the local path to the target.

        Raises FileNotFoundError where the target is not there.
        """
        if not self.exists():
            raise FileNotFoundError(self.query)
        self._link_to_target()

    def store_object(self) -> None:
        """Give the local file or folder the target's name, and leave a link in its place.

        Raises OSError where that fails; the target is then as it was, or another writer's.
        Raises VlmflowError where the controller would have to follow a link that a job may have planted.
        """
        local = self.local_path()
        if self._is_callers_own():
            with no_links.reached(self.query_path, make=True) as target:
                in_place.copy(local, target)
        elif not self._is_stored(local):  # Snakemake stores a job's outputs twice: when it is done, and at the end
            in_place.move(local, self.query_path)
            self._link_to_target()

    def remove(self) -> None:
        """Remove the target, and our link to it: a job that opened the dangling link would write into the target.

        Raises VlmflowError where a folder on the way is a link, which a job may have planted.
        """
        if not self._is_callers_own() and self.local_path().is_symlink():
            self.local_path().unlink()
        with suppress(FileNotFoundError), no_links.reached(self.query_path) as target:
            in_place.take_away(target)

    def _is_callers_own(self) -> bool:
        """Tell whether the local path is a file of Snakemake's own, such as the archive of the workflow's sources."""
        return self._overwrite_local_path is not None

    def _is_stored(self, local: Path) -> bool:
        return local.is_symlink() and local.resolve() == self.query_path.resolve()

    def _link_to_target(self) -> None:
        local = self.local_path()
        remove(local)
        local.parent.mkdir(parents=True, exist_ok=True)
        local.symlink_to(self.query_path.absolute(), target_is_directory=self.query_path.is_dir())
