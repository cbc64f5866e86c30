"""The classes of stored targets, in place of the plugins' own, in the main process and in every pod."""

import os
import re
import sys
from typing import Any

from vlmflow.remote.storage.fs_object import FsObject
from vlmflow.remote.storage.pod_folder import remove_own_at_exit
from vlmflow.remote.storage.s3_object import S3Object

OBJECTS = (FsObject, S3Object)
"""Store every target completely or not at all; each replaces the class that it derives from."""


def prepare(workflow: Any) -> None:
    """Let a pod's folder end with the pod.

    Ends the process if the address of the targets names an environment variable that is not set.
    """
    _refuse_unset_variables(workflow.storage_settings.default_storage_prefix)
    if workflow.remote_exec:
        remove_own_at_exit(workflow.storage_settings.local_storage_prefix)


def _refuse_unset_variables(prefix: str | None) -> None:
    for name in re.findall(r"\$\{?(\w+)", prefix or ""):
        if name not in os.environ:
            sys.exit(
                f"--default-storage-prefix {prefix}: the environment variable {name} is not set\n"
                f"  what to do: export {name}=… in this shell, and run the same command again"
            )
