"""Targets in object storage: a file is an object with its SHA-256, a folder is objects and a manifest (s3_folder)."""

from typing import Any

from botocore.exceptions import ClientError
from snakemake_interface_storage_plugins.io import IOCacheStorageInterface, Mtime
from snakemake_storage_plugin_s3 import DEFAULT_REGION, StorageObject

from vlmflow.remote.library import VlmflowError, sha256_of
from vlmflow.remote.storage.s3_folder import Folder, damaged, is_not_there

UNFINISHED_UPLOADS = {
    "ID": "unfinished-uploads",
    "Status": "Enabled",
    "Filter": {"Prefix": ""},
    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
}
"""A rule for a bucket that we make: parts of interrupted uploads cost money and are listed nowhere."""


class S3Object(StorageObject):
    """A target in a bucket; replaces the s3 plugin's own class.

    In the plugin a folder exists as soon as one of its objects does. The plugin also keeps objects of an earlier
    version, creates a bucket if it may not read it, and deletes an empty one (snakemake_storage_plugin_s3, `exists`,
    `store_object`, `bucket_exists` and `remove`).
    """

    async def inventory(self, cache: IOCacheStorageInterface) -> None:
        """Enter into Snakemake's cache whether the target exists, its time and its size."""
        key = self.cache_key()
        if key in cache.exists_in_storage:
            return
        valid = self._what_makes_it_valid()
        cache.exists_in_storage[key] = valid is not None
        if valid is not None:
            cache.mtime[key] = Mtime(storage=valid.last_modified.timestamp())
            cache.size[key] = 0 if self._is_manifest(valid) else valid.content_length

    def exists(self) -> bool:
        """Return whether the complete target exists."""
        return self._what_makes_it_valid() is not None

    def mtime(self) -> float:
        """Return when the target was completed, in seconds since 1970 by the storage's clock.

        Raises FileNotFoundError if it does not exist.
        """
        return float(self._valid().last_modified.timestamp())

    def size(self) -> int:
        """Return the bytes of a file, 0 for a folder."""
        valid = self._valid()
        return 0 if self._is_manifest(valid) else int(valid.content_length)

    def local_footprint(self) -> int:
        """Return the bytes of a local copy."""
        valid = self._valid()
        if self._is_manifest(valid):
            return sum(entry.size for entry in (self._folder.entries() or {}).values())
        return int(valid.content_length)

    def content(self, name: str, limit: int) -> bytes | None:
        """Return the first bytes of a file in this folder, at most `limit`; None if it does not exist."""
        return self._folder.content(name, limit)

    def retrieve_object(self) -> None:
        """Download the target to its local path, and check its content.

        Raises VlmflowError if the content differs from what was stored.
        """
        valid = self._valid()
        if self._is_manifest(valid):
            self._folder.retrieve(self.local_path())
        else:
            self._retrieve_file(valid)

    def store_object(self) -> None:
        """Upload the local file or folder. A new version of a folder is valid only when it is complete.

        Raises VlmflowError if the storage does not have what was sent.
        """
        local = self.local_path()
        self._make_bucket()
        if local.is_dir():
            self._folder.store(local)
        else:
            self.s3obj().upload_file(str(local), ExtraArgs={"Metadata": {"sha256": sha256_of(local)}})

    def remove(self) -> None:
        """Remove the target, but not the bucket."""
        valid = self._what_makes_it_valid()
        if valid is not None and self._is_manifest(valid):
            self._folder.remove()
        elif valid is not None:
            valid.delete()

    def bucket_exists(self) -> bool:
        """Return whether the bucket exists.

        Raises VlmflowError if the storage does not show it.
        """
        try:
            self.provider.s3c.meta.client.head_bucket(Bucket=self.bucket)
        except ClientError as error:
            if is_not_there(error):
                return False
            raise VlmflowError(
                f"bucket {self.bucket}: cannot find out whether it exists: {error}",
                "check that the credentials may list the bucket (docs/kubernetes.md), then run the same command again",
            ) from None
        return True

    @property
    def _folder(self) -> Folder:
        return Folder(self.s3bucket(), self.key)

    def _retrieve_file(self, valid: Any) -> None:
        local = self.local_path()
        while True:
            valid.download_file(str(local))
            wanted, etag = valid.metadata.get("sha256"), valid.e_tag
            if wanted in (None, sha256_of(local)):  # None: somebody else put it there
                return
            valid.reload()
            if valid.e_tag == etag:  # otherwise another writer has replaced it meanwhile
                local.unlink()
                raise damaged(self.query, f"its sha256 is not {wanted}")

    def _what_makes_it_valid(self) -> Any:
        """Return the object of a file, or of a folder's manifest; None if neither exists."""
        for stored in (self.s3obj(), self._folder.manifest):
            try:
                stored.load()
                return stored
            except ClientError as error:
                if not is_not_there(error):
                    raise
        return None

    def _valid(self) -> Any:
        valid = self._what_makes_it_valid()
        if valid is None:
            raise FileNotFoundError(self.query)
        return valid

    def _is_manifest(self, valid: Any) -> bool:
        return bool(valid.key != self.key)

    def _make_bucket(self) -> None:
        if not self.bucket_exists():
            region = self.provider.settings.region
            where = {} if region == DEFAULT_REGION else {"CreateBucketConfiguration": {"LocationConstraint": region}}
            self.provider.s3c.create_bucket(Bucket=self.bucket, **where)
            lifecycle, client = {"Rules": [UNFINISHED_UPLOADS]}, self.provider.s3c.meta.client
            try:
                client.put_bucket_lifecycle_configuration(Bucket=self.bucket, LifecycleConfiguration=lifecycle)
            except ClientError as error:  # some servers have no lifecycles
                fault = f"cannot set a lifecycle for unfinished uploads: {error}"
                self.provider.logger.warning(f"bucket {self.bucket}: {fault}")
