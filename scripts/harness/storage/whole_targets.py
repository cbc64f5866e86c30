"""Puts our storage steps in the place of the storage plugins' own, in the main process and in every pod."""

from typing import Any

import snakemake_storage_plugin_fs
import snakemake_storage_plugin_s3

from harness.storage.fs_object import FsObject
from harness.storage.pod_folder import remove_own_at_exit
from harness.storage.s3_object import S3Object


def install(workflow: Any) -> None:
    """Have every target that is named from now on be stored whole or not at all.

    Call it in the Snakefile before the first rule. A provider takes the class of its objects from its module by name
    (snakemake_interface_storage_plugins.storage_provider, `get_storage_object_cls`), and the default provider exists
    already when the Snakefile is read.
    """
    snakemake_storage_plugin_fs.StorageObject = FsObject
    snakemake_storage_plugin_s3.StorageObject = S3Object
    if workflow.remote_exec:
        remove_own_at_exit(workflow.storage_settings.local_storage_prefix)
