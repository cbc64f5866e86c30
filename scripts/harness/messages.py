"""The commands that a stage's messages name, completed so that they mean the workflow that was called."""

import os
import re

CALL = "VLMFLOW_CALL"
"""The options that a command in a message needs so that it means the same workflow (--configfile, --directory)."""

IN_POD = "VLMFLOW_IN_POD"
"""Set where the stage runs in a pod: what helps is then a command for the cluster."""

REFRESH = re.compile(r"make refresh-pictures DATASET=([\w.-]+)")
SNAKEMAKE = re.compile(r"\bsnakemake (?=--forcerun )")


def whole_commands(text: str) -> str:
    """Complete the commands of a message: the library does not know how the workflow was called."""
    call = os.environ.get(CALL, "")
    if os.environ.get(IN_POD):
        command, args = "cluster-run TARGET=data/{}/stats.json", f"{call} --forcerun resolve_images".strip()
    else:
        command, args = "refresh-pictures DATASET={}", call
    args = f' ARGS="{args}"' if args else ""
    text = REFRESH.sub(lambda found: f"make {command.format(found[1])}{args}", text)
    return SNAKEMAKE.sub(lambda found: " ".join(filter(None, ["snakemake", call, ""])), text)
