"""Passes facts about the Snakemake call to its stages as environment variables.

As params they would make Snakemake rerun a rule when two calls differ. A pod's Snakemake sets the same variables from
the same configuration.
"""

import os
import shlex
from pathlib import Path
from typing import Any

from harness.messages import CALL, LOCAL, TARGETS
from vlmflow.config.model import Config
from vlmflow.core.child_environment import NAMED
from vlmflow.core.integrity import LEVEL, RECORDS, RECORDS_FOLDER


def tell_stages(workflow: Any, settings: Config) -> None:
    """Set the variables that tell this Snakemake's stages how the workflow was called."""
    os.environ[LEVEL] = settings.integrity
    os.environ[RECORDS] = str(Path(settings.stores.pictures).absolute() / RECORDS_FOLDER)
    os.environ[NAMED] = " ".join(settings.environment)
    os.environ[CALL] = shlex.join(_options(workflow))
    storage = workflow.storage_settings
    for name, place in ((TARGETS, storage.default_storage_prefix), (LOCAL, storage.local_storage_prefix)):
        os.environ[name] = str(place) if workflow.remote_exec else ""


def _options(workflow: Any) -> list[str]:
    root, here = Path(workflow.basedir), Path.cwd()

    def shown(path: Path) -> str:
        return str(path.relative_to(root) if path.is_relative_to(root) else path)

    words = []
    if not workflow.remote_exec and not here.samefile(root):
        words += ["--directory", shown(here)]
    if workflow.overwrite_configfiles:
        words += ["--configfile", *(shown(Path(file).absolute()) for file in workflow.overwrite_configfiles)]
    if workflow.config_settings.config_args:
        words += ["--config", *workflow.config_settings.config_args]
    return words
