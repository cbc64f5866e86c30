"""One rule of the workflow alone, in its own folder."""

import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from forked_snakemake import called
from workflow_runs import ROOT

SNAKEFILE = """
import os
import sys
from pathlib import Path
sys.path.insert(0, f"{workflow.basedir}/scripts")
from vlmflow.harness import start
from vlmflow.config.model import check_config
from vlmflow.core.processes import import_path
os.environ["PYTHONPATH"] = import_path()
configfile: "config.yaml"
settings = check_config(config, [])
config = settings.model_dump(mode="json")
names, inputs, params, resources = start.for_rules(workflow, settings)
"""


def one_rule(folder: Path, rule: str, **settings: object) -> Callable[..., str]:
    """Make a workflow of one rule in a folder; return a function that calls Snakemake there and returns its output.

    settings: the configuration; keys that are not named are empty.
    """
    (folder / "Snakefile").write_text(f'{SNAKEFILE}include: "rules/{rule}.smk"\n')
    for name in ("rules", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "config.yaml").write_text(yaml.safe_dump({"models": {}, "datasets": {}, "runs": {}} | settings))

    def snakemake(*words: str) -> str:
        call = [sys.executable, "-m", "snakemake", *words, "--cores=2"]
        call += ["--rerun-triggers", "mtime", "params", "input"]
        done = called(call, folder)
        return done.stdout + done.stderr

    return snakemake
