"""Follows all Jobs of one invocation together: their outcomes, why they wait, their progress; recreates removed ones.

One look costs two API calls, or three where groups are no Jobs, however many Jobs there are. All waiting Jobs together
add three every half minute, each running one adds a read of its log every half minute, and vanished pods add one call
together.

A Job that the cluster removed is created again within the same attempt of Snakemake: its retries are for failures. Each
Job has a budget and a backoff. A group whose pods do not all find a node has only the backoff: others need the nodes
that it has. A Job that a queue suspends needs neither: it stays and waits.
"""

import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from vlmflow.remote.cluster.api import Object, Refused
from vlmflow.remote.cluster.groups import as_attempt, job_of
from vlmflow.remote.job import LINES, Ended, RuleJob, newest_progress
from vlmflow.remote.kubernetes.namespace import Namespace, is_refusal
from vlmflow.remote.kubernetes.outcome import Outcome, judge_pods, newest_seen, taken_by
from vlmflow.remote.kubernetes.waiting import ClusterState, Waiting, explain
from vlmflow.remote.library import VlmflowError, counted

EXPLAINED_AFTER = 30.0
"""Seconds of waiting before the reason is printed."""

READ_BEFORE = 10.0
"""Seconds before the reason is printed when events and nodes are first read; they are read again every READ_EVERY."""

READ_EVERY = 30.0
PROGRESS_EVERY = 30.0

BLIND_SECONDS = 300.0
"""How long the API may refuse to show the Jobs (missing rights, an expired login), or answer with what the code does
not understand, before the run ends."""

MOST = 20
"""Disruptions in a row after which a Job is recreated; one more fails it: something removes whatever is created."""

WORKED = 3600.0
"""Seconds of running after which the next disruption counts as the first in a row."""

FIRST_PAUSE, LONGEST_PAUSE = 4.0, 600.0
"""Seconds until a Job is recreated, doubled for each in a row."""

JITTER, GROUP_JITTER = 0.2, 0.8
"""The share by which a pause is shorter or longer, so that many do not coincide. Two groups that keep nodes from each
other must come back at different times, so that one finds room for all of its pods."""

LONGEST_NAME = 40
"""Characters of the first name that are kept in later ones: JobSet refuses a name if those of its pods would have more
than 63 (`NAME-node-0-15-abcde`). A name is a uuid, so 40 still tell one Job from others."""


@dataclass
class Followed:
    """One Job and what was printed about it; times are monotonic seconds.

    hopeless_since: by Waiting.hopeless_after: time without the registry does not count for a missing image.
    seen: the newest pods as last seen, by number. placed_since: since when a pod of a waiting group has a node.
    """

    rule_job: RuleJob
    pending_limit: float | None
    waiting_since: float
    ran_since: float | None = None
    seen: dict[int, Object] = field(default_factory=dict)
    placed_since: float | None = None
    told: str = ""
    told_at: float = 0.0
    hopeless_since: dict[float, float] = field(default_factory=dict)
    log_read: float = 0.0
    progress: str = ""


@dataclass
class Watch:
    """Follows Jobs from their creation to their end.

    selector: the labels of all these Jobs and their pods. say: prints a line for people. gang_timeout: seconds until
    all pods of a group must run, from the moment when one of them has a node.
    """

    cluster: Namespace
    selector: str
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    gang_timeout: float = 600.0

    def __post_init__(self) -> None:
        self._followed: dict[str, Followed] = {}
        self._state = ClusterState()
        self._read = float("-inf")
        self._blind_since: float | None = None

    def follow(self, name: str, rule_job: RuleJob, pending_limit: float | None, since: float | None = None) -> None:
        """Follow a Job from now on. since: in monotonic seconds, when it began to wait if that was before."""
        self._followed[name] = Followed(rule_job, pending_limit, self.clock() if since is None else since)

    def look_patiently(self, names: list[str], warn: Callable[[str], None]) -> dict[str, Outcome]:
        """Return the state of these Jobs; {} if the cluster does not show them now. warn: prints these failures.

        Raises VlmflowError if it has not shown them for BLIND_SECONDS, other than by being unreachable.
        """
        try:
            outcomes = self.look(names)
        except Exception as error:
            # No error here is the Jobs' fault, and each would end the whole run at once.
            self._blind_since = self._blind_since or time.monotonic()
            blind = time.monotonic() - self._blind_since
            away = isinstance(error, Refused) and error.status not in (401, 403)
            why = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            if not away and blind > BLIND_SECONDS:
                raise VlmflowError(
                    f"the cluster has not shown the Jobs for {blind / 60:.0f} minutes: {why}",
                    "log in again, or check your rights with `vlmflow doctor`; then run the same command again",
                ) from None
            warn(f"Unknown: the state of {counted(len(names), 'Job')}: {why}; looking again.")
            return {}
        self._blind_since = None
        return outcomes

    def look(self, names: Iterable[str]) -> dict[str, Outcome]:
        """Return the state of these Jobs; those that have ended are no longer followed.

        Raises Refused if the API does not answer; the next look then finds the same.
        """
        followed = {name: self._followed[name] for name in names}
        pods: dict[str, list[Object]] = {}
        for pod in self.cluster.pods(self.selector):
            pods.setdefault(job_of(pod), []).append(pod)
        # After the pods: if a suspension removed a pod, the Job already shows it.
        jobs = {job["metadata"]["name"]: job for job in self.cluster.jobs(self.selector)}
        self._look_around(followed.values())
        outcomes = {}
        for name, record in followed.items():
            job, own = jobs.get(name), pods.get(name, [])
            outcome = judge_pods(job, own, record.seen, self.cluster.now())
            record.seen = newest_seen(job, own, record.seen)
            outcomes[name] = replace(self._tell(record, job, own, outcome), ran=self._ran(record, outcome))
        self._say_who_took(outcomes)
        for name, outcome in outcomes.items():
            if outcome.state in ("succeeded", "failed"):
                del self._followed[name]
        return outcomes

    def _look_around(self, followed: Iterable[Followed]) -> None:
        """Read what explains waiting, if a Job has waited for long and it was not read just now."""
        now = self.clock()
        due = any(
            len(record.seen) < record.rule_job.nodes
            or any(pod.get("status", {}).get("phase") == "Pending" for pod in record.seen.values())
            for record in followed
            if now - record.waiting_since >= EXPLAINED_AFTER - READ_BEFORE
        )
        if due and now - self._read >= READ_EVERY:
            self._state, self._read = ClusterState.of(self.cluster), now

    def _ran(self, record: Followed, outcome: Outcome) -> float:
        """Return for how many seconds a Job's newest pod has been seen running."""
        now = self.clock()
        if outcome.state == "running":
            record.ran_since = record.ran_since or now
            record.waiting_since = now  # if it is suspended later, its waiting counts from then
        elif outcome.state == "waiting":
            record.ran_since = None
        return now - record.ran_since if record.ran_since else 0.0

    def _say_who_took(self, outcomes: dict[str, Outcome]) -> None:
        """Take from events why pods disappeared that no look has seen end."""
        if unseen := {name: outcome for name, outcome in outcomes.items() if outcome.unseen}:
            with suppress(Refused):  # this changes only the message
                events = self.cluster.events()
                for name, outcome in unseen.items():
                    outcomes[name] = replace(outcome, ended=taken_by(outcome.pod or "", events) or outcome.ended)

    def _tell(self, record: Followed, job: Object | None, own: list[Object], outcome: Outcome) -> Outcome:
        if outcome.state == "waiting" and job is not None:
            return self._tell_waiting(record, explain(job, own, self._state), outcome, own)
        if outcome.state == "running":
            if record.told:
                self.say(f"{record.rule_job.words} is running.")
            record.told, record.hopeless_since, record.placed_since = "", {}, None
            self._tell_progress(record, outcome)
        if outcome.state == "ending" and record.told != outcome.ended.cause:
            record.told = outcome.ended.cause
            self.say(f"{record.rule_job.words} is ending: {outcome.ended.cause}. Its pod still saves its work.")
        return outcome

    def _tell_waiting(self, record: Followed, waiting: Waiting, outcome: Outcome, own: list[Object]) -> Outcome:
        now = self.clock()
        waited = now - record.waiting_since
        if waiting.hopeless_after is None:
            record.hopeless_since = {}
        else:
            since = record.hopeless_since.setdefault(waiting.hopeless_after, now)
            if now - since >= waiting.hopeless_after and not waiting.trying:
                return replace(outcome, state="failed", ended=Ended("refused", waiting.why, waiting.again))
        if self._holds_others_up(record, own):
            why = f"not all of its pods run after {self.gang_timeout:.0f} s (cluster.gang_timeout): {waiting.why}"
            return replace(outcome, state="failed", ended=Ended("preempted", why), incomplete=True)
        if waited >= EXPLAINED_AFTER and waiting.reason != record.told and now - record.told_at >= EXPLAINED_AFTER:
            record.told, record.told_at = waiting.reason, now
            self.say(f"{record.rule_job.words} has waited {waited:.0f} s: {waiting.why}")
        if record.pending_limit is not None and waited >= record.pending_limit:
            why = f"it has waited {waited:.0f} s; its template allows {record.pending_limit:.0f} s: {waiting.why}"
            return replace(outcome, state="failed", ended=Ended("refused", why, again=False))
        return outcome

    def _holds_others_up(self, record: Followed, own: list[Object]) -> bool:
        """Return whether a group that waits for its last pods has kept nodes from others for too long."""
        if record.rule_job.nodes == 1 or not any(pod["spec"].get("nodeName") for pod in own):
            record.placed_since = None
            return False
        record.placed_since = record.placed_since or self.clock()
        return self.clock() - record.placed_since >= self.gang_timeout

    def _tell_progress(self, record: Followed, outcome: Outcome) -> None:
        now = self.clock()
        if outcome.pod and now - record.log_read >= PROGRESS_EVERY:
            record.log_read = now
            line = newest_progress(self.cluster.log_end(outcome.pod, LINES, record.rule_job.nodes))
            if line and line != record.progress:
                record.progress = line
                self.say(line)


@dataclass
class JobRecord:
    """A Job as it was created.

    made: how often it was created. times: disruptions in a row. incomplete: tries in a row in which not all pods of a
    group got to run; refused: tries in a row for which a quota had no room; waiting_since: when the first of them
    began. due: when to recreate it. Both in monotonic seconds.
    not_made: why it is unknown whether its creation succeeded; the next look at the Jobs shows it.
    """

    body: Object
    rule_job: RuleJob
    pending_limit: float | None
    first_name: str
    made: int = 1
    times: int = 0
    incomplete: int = 0
    refused: int = 0
    waiting_since: float | None = None
    due: float | None = None
    not_made: str = ""


NO_ROOM = "exceeded quota"
"""What the API server says of a quota of Jobs (count/jobs.batch) that is full."""


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

    def _put(self, name: str, job: JobRecord) -> None:
        job.waiting_since = self._clock() if job.waiting_since is None else job.waiting_since
        try:
            self._cluster.create_job(as_attempt(job.body, name))
        except Refused as error:
            if is_refusal(error):
                raise
            job.not_made = f"its Job could not be created: {error}"
        self._watch.follow(name, job.rule_job, job.pending_limit, job.waiting_since)
        self._jobs[name] = job

    def plan(self, name: str, outcome: Outcome) -> Outcome:
        """Plan to recreate a Job that was removed; returns its outcome as waiting, or as failed without budget."""
        job = self._jobs[name]
        why = outcome.ended.cause if outcome.pod else job.not_made or outcome.ended.cause
        if not outcome.pod and NO_ROOM in job.not_made:  # as a pod that waits for room: no disruption
            waited = self._clock() - (job.waiting_since or 0)  # `_put` has set it
            if job.pending_limit is not None and waited >= job.pending_limit:
                why = f"it has waited {waited:.0f} s; its template allows {job.pending_limit:.0f} s: {why}"
                return replace(outcome, state="failed", ended=Ended("refused", why, again=False))
            job.refused += 1
            pause = _pause(job.refused, JITTER)
            why += f". It is tried again in {pause:.0f} s; this uses no retry."
        elif outcome.incomplete:
            job.incomplete += 1
            pause = _pause(job.incomplete, GROUP_JITTER)
            why += ". All of them end, so that others may use their nodes; "
            why += f"next try in {pause:.0f} s; this uses no retry."
        else:
            job.incomplete, job.refused, job.waiting_since = 0, 0, None
            job.times = 1 if outcome.ran >= WORKED else job.times + 1
            if job.times > MOST:
                why += f"\nThis was disruption {job.times} in a row; at most {MOST} are tolerated."
                return replace(outcome, ended=replace(outcome.ended, cause=why, again=False))
            pause = _pause(job.times, JITTER)
            why += f". Its Job is recreated in {pause:.0f} s "
            why += f"(disruption {job.times} of at most {MOST} in a row; this uses no retry)."
        job.due = self._clock() + pause
        return replace(outcome, state="waiting", ended=replace(outcome.ended, cause=why, again=True))

    def forget(self, name: str | None) -> None:
        """Forget a Job that has ended."""
        self._jobs.pop(name or "", None)


def _pause(times: int, jitter: float) -> float:
    """Return the seconds until the next try, after so many in a row."""
    pause: float = min(FIRST_PAUSE * 2 ** min(times - 1, 20), LONGEST_PAUSE)
    return pause * random.uniform(1 - jitter, 1 + jitter)  # noqa: S311
