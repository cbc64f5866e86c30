"""Jobs that the cluster took away are made again, under the same attempt of Snakemake: its retries are for failures.

Each has a budget and a backoff of its own. A Job that a queue suspends needs neither: it stays, and waits.
"""

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.kubernetes.job_shape import RuleJob
from harness.kubernetes.namespace import Namespace, is_refusal
from harness.kubernetes.outcome import Outcome
from harness.kubernetes.watch import Watch
from vlmflow.cluster.api import Object
from vlmflow.cluster.client import Refused

MOST = 20
"""Disruptions in a row that are waited for; after one more a job has failed: something takes away whatever is made."""

WORKED = 3600.0
"""Seconds of running after which a disruption is the first in a row again: capacity came, and work was done."""

FIRST_PAUSE, LONGEST_PAUSE = 4.0, 600.0
"""Seconds until a Job is made again, doubled with each in a row, and spread by a fifth so that many do not meet."""


@dataclass
class Made:
    """A Job as it was created.

    made: how often. times: disruptions in a row. due: when it is made again, in monotonic seconds. not_made: why nobody
    knows whether its creation was done; the next look at the Jobs tells.
    """

    body: Object
    rule_job: RuleJob
    pending_limit: float | None
    first_name: str
    made: int = 1
    times: int = 0
    due: float | None = None
    not_made: str = ""


class Disruptions:
    """The Jobs of one invocation, by the name of the one that is there or is to be made again."""

    def __init__(self, cluster: Namespace, watch: Watch, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._watch = watch
        self._clock = clock
        self._jobs: dict[str, Made] = {}

    def create(self, body: Object, rule_job: RuleJob, pending_limit: float | None) -> None:
        """Create and follow a Job. Raises Refused where it is refused for good."""
        name = body["metadata"]["name"]
        self._put(name, Made(body, rule_job, pending_limit, name))

    def resting(self, name: str) -> bool:
        """Tell whether a Job is not there, and waits to be made again."""
        return self._jobs[name].due is not None

    def create_due(self, name: str) -> str:
        """Make a Job anew where its pause is over; gives the name under which it is there, or is to be.

        Raises Refused where it is refused for good.
        """
        job = self._jobs[name]
        if job.due is None or self._clock() < job.due:
            return name
        job.due, job.not_made, job.made, job.body = None, "", job.made + 1, copy.deepcopy(job.body)
        new_name = f"{job.first_name}-{job.made}"
        job.body["metadata"]["name"] = new_name
        del self._jobs[name]
        self._put(new_name, job)
        return new_name

    def plan(self, name: str, outcome: Outcome) -> Outcome:
        """Plan to make a Job again that was taken away; gives it as waiting, or as failed where its budget is over."""
        job = self._jobs[name]
        why = outcome.why if outcome.pod else job.not_made or outcome.why
        job.times = 1 if outcome.ran >= WORKED else job.times + 1
        if job.times > MOST:
            why = f"{why}\nThis was disruption {job.times} in a row, and {MOST} are waited for."
            return replace(outcome, why=why, again=False)
        pause = min(FIRST_PAUSE * 2 ** (job.times - 1), LONGEST_PAUSE) * random.uniform(0.8, 1.2)  # noqa: S311
        job.due = self._clock() + pause
        count = f"disruption {job.times} of at most {MOST} in a row; no retry is used up"
        return replace(outcome, state="waiting", why=f"{why}. Its Job is made again in {pause:.0f} s ({count}).")

    def forget(self, name: str | None) -> None:
        """Forget a Job that has ended."""
        self._jobs.pop(name or "", None)

    def _put(self, name: str, job: Made) -> None:
        try:
            self._cluster.create_job(job.body)
        except Refused as error:
            if is_refusal(error):
                raise
            job.not_made = f"its Job could not be created: {error}"
        self._watch.follow(name, job.rule_job, job.pending_limit)
        self._jobs[name] = job
