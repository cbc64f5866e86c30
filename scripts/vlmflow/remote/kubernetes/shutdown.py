"""Ends Jobs so that nothing is left: deletes them, and waits while their pods save their work."""

import time
from collections.abc import Callable

from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import counted
from vlmflow.remote.cluster.api import Object
from vlmflow.remote.kubernetes.job_shape import RULE, WILDCARDS
from vlmflow.remote.kubernetes.namespace import Namespace
from vlmflow.remote.kubernetes.outcome import has_ended, is_lost, is_true

IDLE_SECONDS = 60.0
"""How long to wait for Jobs without running pods: the cluster removes them in its own time."""


def refuse_strangers(cluster: Namespace, selector: str) -> None:
    """Make sure that no Job with these labels still has work to do.

    Raises VlmflowError with their names: a run from another working directory makes the same targets.
    """
    working = [job for job in cluster.jobs(selector) if not is_true(job, "Complete", "Failed")]
    if working:
        names = ", ".join(map(words_of, working))
        raise VlmflowError(
            f"the same targets are made by {counted(len(working), 'Job')} of another working directory: {names}",
            f"wait until they end, or delete them: kubectl -n {cluster.name} delete {cluster.kinds} -l '{selector}'",
        )


def end_all(cluster: Namespace, selector: str, why: str, say: Callable[[str], None]) -> set[str]:
    """Delete all Jobs with these labels and their pods, and wait until they are gone, or at least none of them runs.

    why: the first sentence of the message, if there is anything to end. say: prints a message. Each pod has its own
    grace period; a pod on a node that does not answer is not waited for longer than that. The cluster may remove ended
    pods minutes later, for instance after an outage.

    Returns the names of the pods that existed and do not run any more, as far as is known.
    """
    ended = _end_jobs(cluster, selector, why, say)
    cluster.delete_rest(selector)
    return ended


def _end_jobs(cluster: Namespace, selector: str, why: str, say: Callable[[str], None]) -> set[str]:
    jobs, pods = cluster.jobs(selector), cluster.pods(selector)
    idle_since, ended = time.monotonic(), set()
    if jobs:
        names = ", ".join(map(words_of, jobs))
        say(f"{why} Ending {counted(len(jobs), 'Job')}; their pods save their work first: {names}.")
    while True:
        for job in jobs:
            if "deletionTimestamp" not in job["metadata"]:
                cluster.delete_job(job["metadata"]["name"], after_its_pods=True)
        for pod in pods:  # without this, a pod that the cluster has not deleted yet would keep its GPUs for minutes
            if "deletionTimestamp" not in pod["metadata"]:
                cluster.delete_pod(pod["metadata"]["name"])
        running = [pod for pod in pods if not has_ended(pod)]
        ended |= {pod["metadata"]["name"] for pod in pods}
        idle_since = time.monotonic() if running else idle_since
        lost = [pod["metadata"]["name"] for pod in running if is_lost(pod, cluster.now())]
        if lost and len(lost) == len(running):
            say(f"These pods remain until their nodes, which do not answer, return or are deleted: {', '.join(lost)}.")
            return ended - set(lost)
        if not running and not jobs:
            return ended
        if time.monotonic() - idle_since > IDLE_SECONDS:
            say(f"The cluster has not removed these Jobs yet, but no pod runs: {', '.join(map(words_of, jobs))}.")
            return ended
        time.sleep(0.5)
        jobs, pods = cluster.jobs(selector), cluster.pods(selector)


def words_of(job: Object) -> str:
    """Return what a Job runs, for people: rule name=value."""
    metadata = job["metadata"]
    rule = (metadata.get("labels") or {}).get(RULE, metadata["name"])
    return f"{rule} {(metadata.get('annotations') or {}).get(WILDCARDS, '')}".strip()
