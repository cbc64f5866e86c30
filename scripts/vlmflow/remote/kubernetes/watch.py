"""Follows all Jobs of one invocation together: the outcome of each, why it waits, its progress.

One look costs two API calls, or three where groups are no Jobs, however many Jobs there are. All waiting Jobs together
add three every half minute, each running one adds a read of its log every half minute, and vanished pods add one call
together.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from vlmflow.core.errors import VlmflowError, counted
from vlmflow.remote.cluster.api import Object, Refused
from vlmflow.remote.cluster.pods import job_of
from vlmflow.remote.job import LINES, Ended, RuleJob, newest_progress
from vlmflow.remote.kubernetes.namespace import Namespace
from vlmflow.remote.kubernetes.outcome import Outcome, judge_pods, newest_seen, taken_by
from vlmflow.remote.kubernetes.waiting import ClusterState, Waiting, explain

EXPLAINED_AFTER = 30.0
"""Seconds of waiting before the reason is printed."""

READ_BEFORE = 10.0
"""Seconds before the reason is printed when events and nodes are first read; they are read again every READ_EVERY."""

READ_EVERY = 30.0
PROGRESS_EVERY = 30.0

BLIND_SECONDS = 300.0
"""How long the API may refuse to show the Jobs (missing rights, an expired login), or answer with what the code does
not understand, before the run ends."""


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


class Watch:
    """Follows Jobs from their creation to their end.

    selector: the labels of all these Jobs and their pods. say: prints a line for people.
    """

    def __init__(
        self,
        cluster: Namespace,
        selector: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        gang_timeout: float = 600.0,
    ) -> None:
        """gang_timeout: seconds until all pods of a group must run, from the moment when one of them has a node."""
        self._gang_timeout = gang_timeout
        self._cluster = cluster
        self._selector = selector
        self._say = say
        self._clock = clock
        self._followed: dict[str, Followed] = {}
        self._state = ClusterState()
        self._read = float("-inf")

    def follow(
        self, name: str, rule_job: RuleJob, pending_limit: float | None, waiting_since: float | None = None
    ) -> None:
        """Follow a Job from now on. waiting_since: in monotonic seconds, when it began to wait if that was before."""
        since = self._clock() if waiting_since is None else waiting_since
        self._followed[name] = Followed(rule_job, pending_limit, since)

    def look(self, names: Iterable[str]) -> dict[str, Outcome]:
        """Return the state of these Jobs; those that have ended are no longer followed.

        Raises Refused if the API does not answer; the next look then finds the same.
        """
        followed = {name: self._followed[name] for name in names}
        pods: dict[str, list[Object]] = {}
        for pod in self._cluster.pods(self._selector):
            pods.setdefault(job_of(pod), []).append(pod)
        # After the pods: if a suspension removed a pod, the Job already shows it.
        jobs = {job["metadata"]["name"]: job for job in self._cluster.jobs(self._selector)}
        self._look_around(followed.values())
        outcomes = {}
        for name, each in followed.items():
            own = pods.get(name, [])
            outcome = judge_pods(jobs.get(name), own, each.seen, self._cluster.now())
            each.seen = newest_seen(jobs.get(name), own, each.seen)
            outcomes[name] = replace(self._tell(each, jobs.get(name), own, outcome), ran=self._ran(each, outcome))
        self._say_who_took(outcomes)
        for name, outcome in outcomes.items():
            if outcome.state in ("succeeded", "failed"):
                del self._followed[name]
        return outcomes

    def _ran(self, each: Followed, outcome: Outcome) -> float:
        """Return for how many seconds a Job's newest pod has been seen running."""
        now = self._clock()
        if outcome.state == "running":
            each.ran_since = each.ran_since or now
            each.waiting_since = now  # if it is suspended later, its waiting counts from then
        elif outcome.state == "waiting":
            each.ran_since = None
        return now - each.ran_since if each.ran_since else 0.0

    def _say_who_took(self, outcomes: dict[str, Outcome]) -> None:
        """Take from events why pods disappeared that no look has seen end."""
        unseen = {name: outcome for name, outcome in outcomes.items() if outcome.unseen}
        if unseen:
            with suppress(Refused):  # this changes only the message
                events = self._cluster.events()
                for name, outcome in unseen.items():
                    outcomes[name] = replace(outcome, ended=taken_by(outcome.pod or "", events) or outcome.ended)

    def _tell(self, each: Followed, job: Object | None, own: list[Object], outcome: Outcome) -> Outcome:
        if outcome.state == "waiting" and job is not None:
            return self._tell_waiting(each, explain(job, own, self._state), outcome, own)
        if outcome.state == "running":
            if each.told:
                self._say(f"{each.rule_job.words} is running.")
            each.told, each.hopeless_since, each.placed_since = "", {}, None
            self._tell_progress(each, outcome)
        if outcome.state == "ending" and each.told != outcome.ended.cause:
            each.told = outcome.ended.cause
            self._say(f"{each.rule_job.words} is ending: {outcome.ended.cause}. Its pod still saves its work.")
        return outcome

    def _holds_others_up(self, each: Followed, own: list[Object]) -> bool:
        """Return whether a group that waits for its last pods has kept nodes from others for too long."""
        if each.rule_job.nodes == 1 or not any(pod["spec"].get("nodeName") for pod in own):
            each.placed_since = None
            return False
        each.placed_since = each.placed_since or self._clock()
        return self._clock() - each.placed_since >= self._gang_timeout

    def _tell_waiting(self, each: Followed, waiting: Waiting, outcome: Outcome, own: list[Object]) -> Outcome:
        now = self._clock()
        waited = now - each.waiting_since
        if waiting.hopeless_after is None:
            each.hopeless_since = {}
        else:
            since = each.hopeless_since.setdefault(waiting.hopeless_after, now)
            if now - since >= waiting.hopeless_after and not waiting.trying:
                return replace(outcome, state="failed", ended=Ended("refused", waiting.why, waiting.again))
        if self._holds_others_up(each, own):
            why = f"not all of its pods run after {self._gang_timeout:.0f} s (cluster.gang_timeout): {waiting.why}"
            return replace(outcome, state="failed", ended=Ended("preempted", why), incomplete=True)
        if waited >= EXPLAINED_AFTER and waiting.reason != each.told and now - each.told_at >= EXPLAINED_AFTER:
            each.told, each.told_at = waiting.reason, now
            self._say(f"{each.rule_job.words} has waited {waited:.0f} s: {waiting.why}")
        if each.pending_limit is not None and waited >= each.pending_limit:
            why = f"it has waited {waited:.0f} s; its template allows {each.pending_limit:.0f} s: {waiting.why}"
            return replace(outcome, state="failed", ended=Ended("refused", why, again=False))
        return outcome

    def _tell_progress(self, each: Followed, outcome: Outcome) -> None:
        now = self._clock()
        if outcome.pod and now - each.log_read >= PROGRESS_EVERY:
            each.log_read = now
            line = newest_progress(self._cluster.log_end(outcome.pod, LINES, each.rule_job.nodes))
            if line and line != each.progress:
                each.progress = line
                self._say(line)

    def _look_around(self, followed: Iterable[Followed]) -> None:
        now = self._clock()
        due = any(
            len(each.seen) < each.rule_job.nodes
            or any(pod.get("status", {}).get("phase") == "Pending" for pod in each.seen.values())
            for each in followed
            if now - each.waiting_since >= EXPLAINED_AFTER - READ_BEFORE
        )
        if due and now - self._read >= READ_EVERY:
            cluster = self._cluster
            self._state = ClusterState(cluster.holding_pods(), cluster.events(), cluster.nodes())
            self._read = now


class PatientWatch:
    """A Watch that tolerates minutes in which the cluster fails: it looks again later. warn: prints these failures."""

    def __init__(self, watch: Watch, warn: Callable[[str], None]) -> None:
        self._watch = watch
        self._warn = warn
        self._blind_since: float | None = None

    def look(self, names: list[str]) -> dict[str, Outcome]:
        """Return the state of these Jobs; {} if the cluster does not show them now.

        Raises VlmflowError if it has not shown them for BLIND_SECONDS, other than by being unreachable.
        """
        try:
            outcomes = self._watch.look(names)
        except Exception as error:
            # No error here is the Jobs' fault, and each would end the whole run at once.
            self._blind_since = self._blind_since or time.monotonic()
            blind = time.monotonic() - self._blind_since
            away = isinstance(error, Refused) and error.status not in (401, 403)
            why = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            if not away and blind > BLIND_SECONDS:
                what = f"the cluster has not shown the Jobs for {blind / 60:.0f} minutes: {why}"
                next_step = "log in again, or check your rights with `make doctor`; then run the same command again"
                raise VlmflowError(what, next_step) from None
            self._warn(f"Unknown: the state of {counted(len(names), 'Job')}: {why}; looking again.")
            return {}
        self._blind_since = None
        return outcomes
