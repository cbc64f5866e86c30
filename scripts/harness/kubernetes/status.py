"""Shows what runs in a namespace now: `python -m harness.kubernetes.status NAMESPACE`, or `make status`.

One line for each Job: what it runs, its state, its age, its node, and its progress or why it waits.
"""

import argparse
import sys
from datetime import datetime

from harness.kubernetes.clean_end import words_of
from harness.kubernetes.job_shape import RULE
from harness.kubernetes.namespace import Namespace
from harness.kubernetes.outcome import judge, newest, read_time
from harness.kubernetes.stage_log import LINES, newest_progress
from harness.kubernetes.surroundings import Surroundings
from harness.kubernetes.waiting import explain
from vlmflow.cluster.api import Object
from vlmflow.cluster.client import Refused, connect
from vlmflow.cluster.instance import selector
from vlmflow.cluster.pod_templates import CONTAINER
from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import clock

PATIENCE = 10.0
"""Seconds to retry the API: a person waits for this answer."""


def main() -> None:
    """Print the table for the namespace of the command line."""
    parser = argparse.ArgumentParser(prog="python -m harness.kubernetes.status", description=__doc__)
    parser.add_argument("namespace")
    namespace = parser.parse_args().namespace
    try:
        cluster = Namespace(namespace, connect(lambda text: print(text, file=sys.stderr), PATIENCE))
        lines = table(cluster)
    except VlmflowError as error:
        sys.exit(str(error))
    except Refused as error:
        sys.exit(f"namespace {namespace}: {error}\n  what to do: `make doctor` shows what the cluster lacks")
    print("\n".join(lines) if lines else f"namespace {namespace} has no Job of vlmflow")


def table(cluster: Namespace) -> list[str]:
    """Return the lines, in columns, the oldest Job first; [] if there is none."""
    jobs = sorted(cluster.jobs(f"{selector()},{RULE}"), key=lambda job: job["metadata"]["creationTimestamp"])
    if not jobs:
        return []
    pods: dict[str, list[Object]] = {}
    for pod in cluster.pods(f"{selector()},{RULE}"):
        pods.setdefault(pod["metadata"]["labels"].get("job-name", ""), []).append(pod)
    around = Surroundings(cluster.holding_pods(), cluster.events(), cluster.nodes())
    rows = [_row(cluster, job, pods.get(job["metadata"]["name"], []), around, cluster.now()) for job in jobs]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def _row(cluster: Namespace, job: Object, own: list[Object], around: Surroundings, now: datetime) -> list[str]:
    outcome = judge(job, own, None, now)
    pod = newest(own) or {}
    detail = outcome.why
    if outcome.state == "waiting":
        detail = explain(job, own, around).why
    elif outcome.state == "running":
        detail = newest_progress(cluster.log_end(pod["metadata"]["name"], CONTAINER, LINES))
    since = clock((now - read_time(job["metadata"]["creationTimestamp"])).total_seconds())
    return [words_of(job), outcome.state, since, pod.get("spec", {}).get("nodeName", "-"), detail]


if __name__ == "__main__":
    main()
