"""Ends Jobs so that nothing is left: deletes them, and waits while their pods save their work.

Recreates Jobs that the cluster removed, within the same attempt of Snakemake: its retries are for failures.

Each Job has a budget and a backoff. A group whose pods do not all find a node has only the backoff: others need the
nodes that it has. A Job that a queue suspends needs neither: it stays and waits.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from vlmflow.core.errors import VlmflowError, counted
from vlmflow.remote.cluster.api import Object, Refused
from vlmflow.remote.cluster.pods import named
from vlmflow.remote.job import RuleJob
from vlmflow.remote.kubernetes.job_shape import RULE, WILDCARDS
from vlmflow.remote.kubernetes.namespace import Namespace, is_refusal
from vlmflow.remote.kubernetes.outcome import Outcome, has_ended, is_lost, is_true
from vlmflow.remote.kubernetes.watch import Watch

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


MOST = 20
"""Disruptions in a row after which a Job is recreated; one more fails it: something removes whatever is created."""

WORKED = 3600.0
"""Seconds of running after which the next disruption counts as the first in a row."""

FIRST_PAUSE, LONGEST_PAUSE = 4.0, 600.0
"""Seconds until a Job is recreated, doubled for each in a row."""

LONGEST_NAME = 40
"""Characters of the first name that are kept in later ones: JobSet refuses a name if those of its pods would have more
than 63 (`NAME-node-0-15-abcde`). A name is a uuid, so 40 still tell one Job from others."""

JITTER, GROUP_JITTER = 0.2, 0.8
"""The share by which a pause is shorter or longer, so that many do not coincide. Two groups that keep nodes from each
other must come back at different times, so that one finds room for all of its pods."""


@dataclass
class JobRecord:
    """A Job as it was created.

    made: how often it was created. times: disruptions in a row. incomplete: tries in a row in which not all pods of a
    group got to run; waiting_since: when the first of them began. due: when to recreate it. Both in monotonic seconds.
    not_made: why it is unknown whether its creation succeeded; the next look at the Jobs shows it.
    """

    body: Object
    rule_job: RuleJob
    pending_limit: float | None
    first_name: str
    made: int = 1
    times: int = 0
    incomplete: int = 0
    waiting_since: float | None = None
    due: float | None = None
    not_made: str = ""


class Disruptions:
    """The Jobs of one invocation, by the name under which each exists or will be recreated."""

    def __init__(self, cluster: Namespace, watch: Watch, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._watch = watch
        self._clock = clock
        self._jobs: dict[str, JobRecord] = {}

    def create(self, body: Object, rule_job: RuleJob, pending_limit: float | None) -> None:
        """Create and follow a Job. Raises Refused if it is refused permanently."""
        name = body["metadata"]["name"]
        self._put(name, JobRecord(body, rule_job, pending_limit, name))

    def resting(self, name: str) -> bool:
        """Return whether a Job was removed and waits to be recreated."""
        return self._jobs[name].due is not None

    def create_due(self, name: str) -> str:
        """Recreate a Job if its pause is over; returns the name under which it exists or will be recreated.

        Raises Refused if it is refused permanently.
        """
        job = self._jobs[name]
        if job.due is None or self._clock() < job.due:
            return name
        job.due, job.not_made, job.made = None, "", job.made + 1
        new_name = f"{job.first_name[:LONGEST_NAME]}-{job.made}"
        del self._jobs[name]
        self._put(new_name, job)
        return new_name

    def plan(self, name: str, outcome: Outcome) -> Outcome:
        """Plan to recreate a Job that was removed; returns its outcome as waiting, or as failed without budget."""
        job = self._jobs[name]
        why = outcome.ended.cause if outcome.pod else job.not_made or outcome.ended.cause
        job.incomplete = job.incomplete + 1 if outcome.incomplete else 0
        job.waiting_since = job.waiting_since if outcome.incomplete else None
        if outcome.incomplete:
            pause = _pause(job.incomplete, GROUP_JITTER)
            job.due = self._clock() + pause
            said = f"All of them end, so that others may use their nodes; next try in {pause:.0f} s; this uses no retry"
            return _with(replace(outcome, state="waiting"), f"{why}. {said}.")
        job.times = 1 if outcome.ran >= WORKED else job.times + 1
        if job.times > MOST:
            why = f"{why}\nThis was disruption {job.times} in a row; at most {MOST} are tolerated."
            return _with(outcome, why, again=False)
        pause = _pause(job.times, JITTER)
        job.due = self._clock() + pause
        count = f"disruption {job.times} of at most {MOST} in a row; this uses no retry"
        return _with(replace(outcome, state="waiting"), f"{why}. Its Job is recreated in {pause:.0f} s ({count}).")

    def forget(self, name: str | None) -> None:
        """Forget a Job that has ended."""
        self._jobs.pop(name or "", None)

    def _put(self, name: str, job: JobRecord) -> None:
        job.waiting_since = self._clock() if job.waiting_since is None else job.waiting_since
        try:
            self._cluster.create_job(named(job.body, name))
        except Refused as error:
            if is_refusal(error):
                raise
            job.not_made = f"its Job could not be created: {error}"
        self._watch.follow(name, job.rule_job, job.pending_limit, job.waiting_since)
        self._jobs[name] = job


def _with(outcome: Outcome, cause: str, again: bool = True) -> Outcome:
    return replace(outcome, ended=replace(outcome.ended, cause=cause, again=again))


def _pause(times: int, jitter: float) -> float:
    """Return the seconds until the next try, after so many in a row."""
    pause: float = min(FIRST_PAUSE * 2 ** min(times - 1, 20), LONGEST_PAUSE)
    return pause * random.uniform(1 - jitter, 1 + jitter)  # noqa: S311
