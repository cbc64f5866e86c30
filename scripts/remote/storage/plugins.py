"""Replaces the storage plugins' classes by ours, in the main process and in every pod."""

import os
import re
import sys
from typing import Any

import snakemake_storage_plugin_fs
import snakemake_storage_plugin_s3

from remote.storage.fs_object import FsObject
from remote.storage.pod_folder import remove_own_at_exit
from remote.storage.s3_object import S3Object


def install(workflow: Any) -> None:
    """Make Snakemake store every target that is named from now on completely or not at all.

    Call it in the Snakefile before the first rule. A provider looks up its object class by name in its module
    (snakemake_interface_storage_plugins.storage_provider, `get_storage_object_cls`), and the default provider already
    exists when the Snakefile is read.

    Ends the process if the address of the targets names an environment variable that is not set.
    """
    _refuse_unset_variables(workflow.storage_settings.default_storage_prefix)
    snakemake_storage_plugin_fs.StorageObject = FsObject
    snakemake_storage_plugin_s3.StorageObject = S3Object
    if workflow.remote_exec:
        remove_own_at_exit(workflow.storage_settings.local_storage_prefix)


def _refuse_unset_variables(prefix: str | None) -> None:
    for name in re.findall(r"\$\{?(\w+)", prefix or ""):
        if name not in os.environ:
            sys.exit(
                f"--default-storage-prefix {prefix}: the environment variable {name} is not set\n"
                f"  what to do: export {name}=… in this shell, and run the same command again"
            )
