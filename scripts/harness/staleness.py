"""What makes a job stale besides its files: its params and its code, as Snakemake records and compares them.

Snakemake compares the sets of all params' values, without their names: two values that change places are no change to
it, and of a block of settings it shows all that there is, before and now. So each setting is a text of its own here,
`settings.learning_rate=0.0001`, and `snakemake -n` shows those that differ. The digest of the code that the rule's
script imports is one of them, so that no rule can forget it.
"""

import json
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from harness import code_digest


def install(workflow: Any) -> Callable[[], None]:
    """Have Snakemake record and compare these texts; to be called before it plans.

    What no import statement tells of a script's code, its rule says in params: `modules`, a list of those that it finds
    while it runs, and `reads`, a folder of other files in scripts/ (see `code_digest`).

    Gives what is to be called when the plan is made, before jobs run: it looks at the code of all of them. What is
    changed while a stage works was not what the stage read.
    """
    digest = code_digest.of_scripts(Path(workflow.basedir) / "scripts")
    persistence = workflow.persistence

    @wraps(persistence._params)
    def params(job: Any) -> list[str]:
        settings = {name: value for name, value in job.params.items() if not _is_derived(job.rule, name)}
        if job.rule.script:
            modules, reads = settings.get("modules", []), settings.get("reads")
            settings["code"] = digest(Path(job.rule.script).stem, *modules, reads=reads)
        return sorted(texts_of(settings))

    def look_at_code() -> None:
        for job in workflow.dag.jobs:
            params(job)

    persistence._params = params
    return look_at_code


def texts_of(block: dict[str, Any], before: str = "") -> Iterator[str]:
    """Give a text `key=value` for each setting of a block; keys of blocks within it are joined by dots.

    block: values of JSON by name. before: what the keys begin with.
    """
    for key, value in block.items():
        if isinstance(value, dict) and value:
            yield from texts_of(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={json.dumps(value, ensure_ascii=False, default=str)}"


def _is_derived(rule: Any, name: str) -> bool:
    """Tell whether a param is made of the job's files, which Snakemake compares by themselves."""
    return bool(rule._is_deriving_function(getattr(rule.params, name)))
