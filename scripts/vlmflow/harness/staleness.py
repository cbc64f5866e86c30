"""The params and the code that make a job stale, as Snakemake records and compares them.

Snakemake compares the set of all params' values without their names: it misses two values that change places, and for
a block of settings it prints the whole block, old and new. So every rule with a script has one more param, `recorded`:
a text for each setting, `settings.train.learning_rate=0.0001`, and the digest of the code that the script reaches.

A params function that returns a block takes `output` (`harness.params`). Snakemake leaves out what derives from a job's
files: of a block it would also compare the order of the keys.
"""

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from vlmflow.core.files import user_cache
from vlmflow.harness.code_digest import Code

NOT_RECORDED = {"recorded", "processes"}
"""Params that make nothing stale: the results of the scripts that read `processes` do not depend on it."""


def install(workflow: Any) -> Callable[[], None]:
    """Add `recorded` to the params of every rule. Call it before Snakemake plans.

    A rule names in its params what the names in its script do not show: `modules`, a list of modules that it loads by
    computed names, and `reads`, a folder of other files in scripts/ (see `code_digest`).

    Returns a function to call after planning, before jobs run: it computes the digests of all jobs, so that a change
    during a stage does not enter the record of what this stage used.
    """
    code = Code(Path(workflow.basedir) / "scripts", kept_in=user_cache() / "code.msgpack")
    digest = cache(code.digest)

    def recorded(rule: Any, wildcards: Any) -> tuple[str, ...]:
        params = settings_of(rule, wildcards)
        read = digest(f"stages.{Path(rule.script).stem}", *params.get("modules", []), reads=params.get("reads"))
        return tuple(sorted(texts_of({**params, "code": read})))

    for rule in workflow.rules:
        if rule.script:
            rule.set_params(recorded=partial(recorded, rule))

    def look_at_code() -> None:
        for job in workflow.dag.jobs:
            if job.rule.script:
                recorded(job.rule, job.wildcards)
        code.keep()

    return look_at_code


def settings_of(rule: Any, wildcards: Any) -> dict[str, Any]:
    """Return the params of a rule that make its jobs stale, by name, for some wildcards."""
    given = {name: value for name, value in rule.params.items() if name not in NOT_RECORDED}
    return {name: value(wildcards) if callable(value) else value for name, value in given.items()}


def texts_of(block: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yield a text `key=value` for each setting of a block; keys of blocks within it are joined by dots.

    block: JSON values by name. before: a prefix of the keys.
    """
    for key, value in block.items():
        if isinstance(value, dict) and value:
            yield from texts_of(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={json.dumps(value, ensure_ascii=False, default=str)}"


def differing(change: Any) -> Any:
    """Return Snakemake's ParamsChange with only the texts of `recorded` that differ."""
    old, new = _texts(change.only_old), _texts(change.only_new)
    return replace(change, only_old=old - new, only_new=new - old)


def _texts(values: set[str]) -> set[str]:
    """Return the texts in `recorded`, the only param that is a tuple; an earlier version recorded each by itself."""
    found = [value for value in values if value.startswith("(")]
    return {text for value in found for text in ast.literal_eval(value)} if found else values
