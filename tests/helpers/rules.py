"""The workflow's rules, as Snakemake reads them."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from snakemake.api import SnakemakeApi
from snakemake.settings.enums import Quietness
from snakemake.settings.types import ConfigSettings, OutputSettings, ResourceSettings

from workflow_runs import ROOT


def read_rules(folder: Path, **settings: Any) -> list[Any]:
    """Give every rule of the workflow but `all`.

    folder: an empty working directory. settings: laid over config.yaml.
    """
    ours = patch.dict(os.environ)  # the Snakefile tells stages of the call there
    with ours, SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
        workflow = api.workflow(
            ResourceSettings(cores=1),
            ConfigSettings(config=settings),
            snakefile=ROOT / "Snakefile",
            workdir=folder,
        )
        return [rule for rule in workflow._workflow.rules if rule.name != "all"]
