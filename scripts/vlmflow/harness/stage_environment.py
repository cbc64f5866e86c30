"""Passes facts about the Snakemake call to its stages as environment variables.

As params they would make Snakemake rerun a rule when two calls differ. A pod's Snakemake sets the same variables from
the same configuration.
"""

import os
import shlex
from pathlib import Path
from typing import Any

from vlmflow.config.model import Config
from vlmflow.core.child_environment import NAMED
from vlmflow.core.integrity import LEVEL, RECORDS, RECORDS_FOLDER
from vlmflow.core.process import import_path
from vlmflow.harness.messages import CALL, CONFIG, LOCAL, TARGETS


def tell_stages(workflow: Any, settings: Config) -> None:
    """Set the variables that tell this Snakemake's stages where our modules are and how the workflow was called."""
    os.environ["PYTHONPATH"] = import_path()
    os.environ[LEVEL] = settings.integrity
    os.environ[RECORDS] = str(Path(settings.stores.pictures).absolute() / RECORDS_FOLDER)
    os.environ[NAMED] = " ".join(settings.environment)
    storage = workflow.storage_settings
    in_pod = workflow.remote_exec and storage.default_storage_provider is not None
    if in_pod or not workflow.remote_exec:  # a job on a shared file system has them from the call itself
        os.environ[CALL] = shlex.join(_options(workflow))
        os.environ[CONFIG] = shlex.join(
            _shown(workflow, Path(file).absolute()) for file in workflow.overwrite_configfiles
        )
    for name, place in ((TARGETS, storage.default_storage_prefix), (LOCAL, storage.local_storage_prefix)):
        os.environ[name] = str(place) if in_pod else ""


def _options(workflow: Any) -> list[str]:
    here, words = Path.cwd(), []
    if not workflow.remote_exec and not here.samefile(workflow.basedir):
        words += ["--directory", _shown(workflow, here)]
    if workflow.config_settings.config_args:
        words += ["--config", *workflow.config_settings.config_args]
    return words


def _shown(workflow: Any, path: Path) -> str:
    root = Path(workflow.basedir)
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
