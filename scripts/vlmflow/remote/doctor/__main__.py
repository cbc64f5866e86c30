"""Print a table of what a cluster has and lacks for the configuration's runs; exit code 0 if it is ready.

Needs a kubeconfig (KUBECONFIG), or runs in the controller pod. It makes about four short Jobs and removes them.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from vlmflow import CHECKOUT
from vlmflow.config.model import check_config
from vlmflow.config.yaml_file import read_layers
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.client import connect
from vlmflow.remote.doctor.doctor import Doctor
from vlmflow.remote.doctor.needs import jobs_of, need_of
from vlmflow.remote.findings import report

LAYERS = [CHECKOUT / "config.yaml", CHECKOUT / "profiles/kubernetes/stores.yaml"]


def main(
    namespace: str,
    files: list[Path],
    runs: list[str],
    as_json_text: bool,
    patience: float,
    max_threads: int | None = None,
) -> int:
    """Print the findings; returns the exit code."""
    settings = check_config(read_layers([*LAYERS, *files]), [*LAYERS, *files])
    unknown = [run for run in runs if run not in settings.runs]
    if unknown:
        raise VlmflowError(f"--run: unknown run {unknown[0]}", f"use one of {', '.join(settings.runs)}")
    wanted = [
        need_of(settings, run, jobs_of(CHECKOUT / "Snakefile", [*LAYERS[1:], *files], f"merged/{run}", max_threads))
        for run in runs or settings.runs
    ]
    doctor = Doctor(lambda: connect(_say, patience=5), namespace, settings, wanted, CHECKOUT / "envs", patience)
    return report(doctor.look(), as_json_text)


def _say(words: str) -> None:
    print(words, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--namespace", default=os.environ.get("VLMFLOW_NAMESPACE", "vlmflow"))
    parser.add_argument(
        "--configfile", type=Path, nargs="+", default=[], metavar="FILE", help="settings over config.yaml"
    )
    parser.add_argument("--run", nargs="+", default=[], metavar="NAME", help="check these runs alone")
    parser.add_argument(
        "--max-threads", type=int, metavar="N", help="as in make cluster-run: no rule requests more cores"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument(
        "--patience", type=float, default=180, metavar="SECONDS", help="wait this long for a probe's pod"
    )
    given = parser.parse_args()
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    try:
        sys.exit(main(given.namespace, given.configfile, given.run, given.json, given.patience, given.max_threads))
    except VlmflowError as error:
        sys.exit(str(error))
