"""Ending Jobs so that nothing stays behind: deleted, and waited for while their pods save their work."""

import time
from collections.abc import Callable

from harness.kubernetes.job_shape import RULE, WILDCARDS
from harness.kubernetes.namespace import Namespace
from harness.kubernetes.outcome import has_ended, is_lost, is_true
from vlmflow.cluster.api import Object
from vlmflow.core.errors import VlmflowError

IDLE_SECONDS = 60.0
"""How long to wait for Jobs of which nothing runs any more: the cluster removes them when it gets to it."""


def refuse_strangers(cluster: Namespace, selector: str) -> None:
    """Make sure that no Job with these labels still has work to do.

    Raises VlmflowError with their names: another checkout's call makes the same targets.
    """
    working = [job for job in cluster.jobs(selector) if not (is_true(job, "Complete") or is_true(job, "Failed"))]
    if working:
        names = ", ".join(map(words_of, working))
        raise VlmflowError(
            f"{len(working)} Job(s) of another working directory make the same targets: {names}",
            f"wait until they have ended; or end them: kubectl -n {cluster.name} delete jobs -l '{selector}'",
        )


def end_all(cluster: Namespace, selector: str, why: str, say: Callable[[str], None]) -> set[str]:
    """Delete all Jobs with these labels and their pods, and wait until none of them is there or runs any more.

    why: begins the sentence that says what is done, where anything is. Each pod has its own grace to end in; those
    whose node does not answer are not waited for longer than that. Pods that have ended go when the cluster gets to
    it: after an outage that takes minutes.

    Gives the names of the pods that were there and run no more, as far as can be known.
    """
    jobs, pods = cluster.jobs(selector), cluster.pods(selector)
    idle_since, ended = time.monotonic(), set()
    if jobs:
        names = ", ".join(map(words_of, jobs))
        say(f"{why} Ending {len(jobs)} Job(s), whose pods save their work first: {names}.")
    while True:
        for job in jobs:
            if "deletionTimestamp" not in job["metadata"]:
                cluster.delete_job(job["metadata"]["name"], after_its_pods=True)
        for pod in pods:  # without this, one that the cluster forgets for those minutes would keep its GPUs
            if "deletionTimestamp" not in pod["metadata"]:
                cluster.delete_pod(pod["metadata"]["name"])
        running = [pod for pod in pods if not has_ended(pod)]
        ended |= {pod["metadata"]["name"] for pod in pods}
        idle_since = time.monotonic() if running else idle_since
        lost = [pod["metadata"]["name"] for pod in running if is_lost(pod, cluster.now())]
        if lost and len(lost) == len(running):
            say(f"Their nodes do not answer; these stay until the nodes come back or are deleted: {', '.join(lost)}.")
            return ended - set(lost)
        if not running and not jobs:
            return ended
        if time.monotonic() - idle_since > IDLE_SECONDS:
            say(f"The cluster has not removed them yet, but nothing of them runs: {', '.join(map(words_of, jobs))}.")
            return ended
        time.sleep(0.5)
        jobs, pods = cluster.jobs(selector), cluster.pods(selector)


def words_of(job: Object) -> str:
    """Name what a Job runs as a person does: rule name=value."""
    metadata = job["metadata"]
    rule = (metadata.get("labels") or {}).get(RULE, metadata["name"])
    return f"{rule} {(metadata.get('annotations') or {}).get(WILDCARDS, '')}".strip()
