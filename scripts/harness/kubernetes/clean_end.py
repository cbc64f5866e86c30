"""Ending Jobs so that nothing stays behind: deleted, and waited for while their pods save their work."""

import time
from collections.abc import Callable

from harness.kubernetes.job_shape import RULE, WILDCARDS
from harness.kubernetes.namespace import Namespace, Object
from harness.kubernetes.outcome import is_lost, now_utc


def end_all(cluster: Namespace, selector: str, why: str, say: Callable[[str], None]) -> None:
    """Delete all Jobs with these labels, and wait until they and their pods are gone.

    why: begins the sentence that says what is done, where anything is. Each pod has its own grace to end in; those
    whose node does not answer are not waited for longer than that.
    """
    jobs, pods = cluster.jobs(selector), cluster.pods(selector)
    if jobs:
        names = ", ".join(map(words_of, jobs))
        say(f"{why} Ending {len(jobs)} Job(s), whose pods save their work first: {names}.")
    while jobs or pods:
        for job in jobs:
            if "deletionTimestamp" not in job["metadata"]:
                cluster.delete_job(job["metadata"]["name"], after_its_pods=True)
        # A cluster that was away takes minutes to see that a Job left pods: a trainer would keep its GPUs for nothing.
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                cluster.delete_pod(pod["metadata"]["name"])
        time.sleep(0.5)
        jobs, pods = cluster.jobs(selector), cluster.pods(selector)
        if pods and all(is_lost(pod, now_utc()) for pod in pods):
            names = ", ".join(pod["metadata"]["name"] for pod in pods)
            say(f"Their nodes do not answer; these stay until the nodes come back or are deleted: {names}.")
            break


def words_of(job: Object) -> str:
    """Name what a Job runs as a person does: rule name=value."""
    metadata = job["metadata"]
    rule = (metadata.get("labels") or {}).get(RULE, metadata["name"])
    return f"{rule} {(metadata.get('annotations') or {}).get(WILDCARDS, '')}".strip()
