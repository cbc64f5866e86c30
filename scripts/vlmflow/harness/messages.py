"""Completes a stage's messages for the workflow that was called: its commands, and the names of a pod's files."""

import os
import re
import shlex

CALL = "VLMFLOW_CALL"
"""The options that a command in a message needs to run the same workflow (--directory, --config), without its files."""

CONFIG = "VLMFLOW_CONFIG"
"""The files of its configuration (--configfile)."""

TARGETS = "VLMFLOW_TARGETS"
"""Set for a stage in a pod: the place of the targets, a folder of the volume or an address in S3."""

LOCAL = "VLMFLOW_LOCAL"
"""Set for a stage in a pod: the pod's folder below which the stage sees its targets."""

COMMAND = re.compile(
    r"make refresh-pictures DATASET=(?P<dataset>[\w.-]+)|\bsnakemake --forcerun (?P<rule>\w+) -- (?P<target>\S+)"
)

IN_S3 = "s3://"

WITHOUT_CONTROLLER = ".venv/bin/snakemake --profile profiles/kubernetes-s3 --executor kubernetes"
"""With targets in S3, Snakemake runs on a laptop (docs/kubernetes.md)."""


def complete_commands(text: str) -> str:
    """Return a message with complete commands, and with targets for the files of a pod; the library knows neither."""
    if local := os.environ.get(LOCAL):
        text = text.replace(f"{local}/fs/", "/").replace(f"{local}/s3/", IN_S3)
    return COMMAND.sub(_completed, text)


def _completed(found: re.Match[str]) -> str:
    files, call, targets = (os.environ.get(name, "") for name in (CONFIG, CALL, TARGETS))
    rule, target = "resolve_images", f"data/{found['dataset']}/stats.json"
    if found["rule"]:
        rule, target = found["rule"], found["target"].removeprefix(f"{targets}/")
    forced = f"{call} --forcerun {rule}".strip()
    of_snakemake = f"--configfile {files} {forced}" if files else forced
    if targets.startswith(IN_S3):
        return f"{WITHOUT_CONTROLLER} {of_snakemake} -- {target}"
    if targets:
        return f"make cluster-run TARGET={target}{_given(CONFIG=files, ARGS=forced)}"
    if found["rule"]:
        return f".venv/bin/snakemake {of_snakemake} -- {target}"
    return f"{found[0]}{_given(CONFIG=files, ARGS=call)}"


def _given(**variables: str) -> str:
    """Return make's variables as a shell takes them, each behind a space; none that is empty."""
    quoted = {name: shlex.quote(words) if '"' in words else f'"{words}"' for name, words in variables.items() if words}
    return "".join(f" {name}={words}" for name, words in quoted.items())
