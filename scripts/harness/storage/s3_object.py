"""Targets in object storage: a file is an object, a folder is objects and a manifest that is written last."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError
from snakemake_interface_storage_plugins.io import IOCacheStorageInterface, Mtime
from snakemake_storage_plugin_s3 import DEFAULT_REGION, StorageObject

from harness.storage import manifest
from harness.storage.manifest import Entry
from vlmflow.errors import VlmflowError
from vlmflow.files import remove, unfinished

NOT_THERE = {"404", "NoSuchKey", "NoSuchBucket"}

SNAKEMAKES_OWN = ".snakemake_timestamp"
"""Snakemake's mark in a folder that a rule made."""


class S3Object(StorageObject):
    """A target in a bucket, in the place of the s3 plugin's own class.

    The plugin takes a folder for there as soon as one of its objects is, keeps objects of an earlier folder, and
    deletes a bucket that is empty (snakemake_storage_plugin_s3, `exists`, `store_object` and `remove`).
    """

    async def inventory(self, cache: IOCacheStorageInterface) -> None:
        """Tell Snakemake whether the target is there, since when, and how large it is."""
        key = self.cache_key()
        if key in cache.exists_in_storage:
            return
        valid = self._what_makes_it_valid()
        cache.exists_in_storage[key] = valid is not None
        if valid is not None:
            cache.mtime[key] = Mtime(storage=valid.last_modified.timestamp())
            cache.size[key] = 0 if self._is_manifest(valid) else valid.content_length

    def exists(self) -> bool:
        """Tell whether the target is there, whole."""
        return self._what_makes_it_valid() is not None

    def mtime(self) -> float:
        """Give the time, in seconds since 1970 by the storage's clock, at which the target became whole."""
        return self._valid().last_modified.timestamp()

    def size(self) -> int:
        """Give the bytes of a file, 0 for a folder."""
        valid = self._valid()
        return 0 if self._is_manifest(valid) else valid.content_length

    def local_footprint(self) -> int:
        """Give the bytes that a local copy takes."""
        valid = self._valid()
        if self._is_manifest(valid):
            return sum(entry.size for entry in self._manifest(valid).values())
        return valid.content_length

    def retrieve_object(self) -> None:
        """Download the target to its local path.

        Raises VlmflowError where the storage does not hold what a folder's manifest says.
        """
        local, valid = self.local_path(), self._valid()
        if not self._is_manifest(valid):
            valid.download_file(str(local))
            return
        wanted = self._manifest(valid)
        self._refuse_differences(wanted, self._entries())
        part = unfinished(local)
        remove(part)
        part.mkdir(parents=True)
        for name, entry in wanted.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            self.s3obj(name).download_file(str(part / name))
            if (part / name).stat().st_size != entry.size:
                raise self._damaged(f"{name}: changed while it was read")
        remove(local)
        part.rename(local)

    def store_object(self) -> None:
        """Upload the local file or folder. A folder is there again only when all of it is.

        Raises VlmflowError where the storage does not hold what was sent to it.
        """
        local = self.local_path()
        self._make_bucket()
        if not local.is_dir():
            self.s3obj().upload_file(str(local))
            return
        files = {str(path.relative_to(local)): path for path in _files_of(local)}
        if manifest.NAME in files:
            raise VlmflowError(f"{local / manifest.NAME}: this name is taken", "have the stage give it another")
        self.s3obj(manifest.NAME).delete()
        for name, path in files.items():
            self.s3obj(name).upload_file(str(path))
        present = self._entries()
        for name in present.keys() - files.keys():
            self.s3obj(name).delete()
        sent = {name: Entry(path.stat().st_size, present[name].etag) for name, path in files.items() if name in present}
        if missing := files.keys() - sent.keys():
            raise self._damaged(f"not there after the upload: {', '.join(sorted(missing))}")
        self._refuse_differences(sent, present)
        self.s3obj(manifest.NAME).put(Body=manifest.dump(sent))

    def remove(self) -> None:
        """Remove the target, of a folder the manifest first; the bucket stays."""
        valid = self._what_makes_it_valid()
        if valid is not None:
            valid.delete()
            if self._is_manifest(valid):
                for name in self._entries():
                    self.s3obj(name).delete()

    def _what_makes_it_valid(self) -> Any:
        """Give the object that a file is, or a folder's manifest; None where neither is there."""
        for found in (self.s3obj(), self.s3obj(manifest.NAME)):
            try:
                found.load()
                return found
            except ClientError as error:
                if error.response["Error"]["Code"] not in NOT_THERE:
                    raise
        return None

    def _valid(self) -> Any:
        valid = self._what_makes_it_valid()
        if valid is None:
            raise FileNotFoundError(self.query)
        return valid

    def _is_manifest(self, valid: Any) -> bool:
        return valid.key != self.key

    def _manifest(self, valid: Any) -> dict[str, Entry]:
        return manifest.load(valid.get()["Body"].read(), f"{self.query}/{manifest.NAME}")

    def _entries(self) -> dict[str, Entry]:
        """Give what the storage holds below the target's key, without the manifest."""
        below = f"{self.key}/"
        found = {item.key.removeprefix(below): Entry(item.size, item.e_tag) for item in self.get_subkeys()}
        found.pop(manifest.NAME, None)
        return found

    def _make_bucket(self) -> None:
        if not self.bucket_exists():
            region = self.provider.settings.region
            place = {} if region == DEFAULT_REGION else {"CreateBucketConfiguration": {"LocationConstraint": region}}
            self.provider.s3c.create_bucket(Bucket=self.bucket, **place)

    def _refuse_differences(self, wanted: dict[str, Entry], present: dict[str, Entry]) -> None:
        if wrong := manifest.differences(wanted, present):
            raise self._damaged("; ".join(wrong[:3]))

    def _damaged(self, what: str) -> VlmflowError:
        return VlmflowError(
            f"{self.query} is damaged: {what}", "remove it there and run the same command again: it is made anew"
        )


def _files_of(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.name != SNAKEMAKES_OWN)
