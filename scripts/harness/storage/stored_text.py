"""Reading a job's log in the main process, wherever it lies."""

import asyncio
from pathlib import Path
from typing import Any


def text_of(file: Any) -> str:
    """Give the text of a small file of a job, such as its log; nothing where it is not there.

    file: as Snakemake lists it (`job.log`): a path here, or a target in storage.

    Raises WorkflowError where the storage cannot be reached.
    """
    if file.is_storage:
        if not file.storage_object.exists():
            return ""
        asyncio.run(file.storage_object.managed_retrieve())
    return Path(file).read_text(errors="replace") if Path(file).is_file() else ""
