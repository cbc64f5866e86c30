"""The params and the code that make a job stale, as Snakemake records and compares them.

Snakemake compares the sets of all params' values without their names: it misses two values that change places, and for
a block of settings it prints the whole block, old and new. So each setting becomes a separate text here,
`settings.train.learning_rate=0.0001`, and `snakemake -n` shows those that differ. The digest of the code that the
rule's script imports is added for every rule.
"""

import json
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from harness import code_digest


def install(workflow: Any) -> Callable[[], None]:
    """Make Snakemake record and compare these texts. Call it before Snakemake plans.

    A rule names in its params what the imports of its script do not show: `modules`, a list of modules that it loads
    while it runs, and `reads`, a folder of other files in scripts/ (see `code_digest`).

    Returns a function to call after planning, before jobs run: it computes the digests of all jobs, so that a change
    during a stage does not enter the record of what this stage used.
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
    """Yield a text `key=value` for each setting of a block; keys of blocks within it are joined by dots.

    block: JSON values by name. before: a prefix of the keys.
    """
    for key, value in block.items():
        if isinstance(value, dict) and value:
            yield from texts_of(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={json.dumps(value, ensure_ascii=False, default=str)}"


def _is_derived(rule: Any, name: str) -> bool:
    """Return whether a param derives from the job's files, which Snakemake compares separately, or its resources."""
    return bool(rule._is_deriving_function(getattr(rule.params, name)))
