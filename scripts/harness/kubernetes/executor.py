"""The plugin's executor with what a real cluster asks for; it takes the plugin's place when the workflow is read.

Upstream builds the Job and formats its command; here are the template, the patience with the API, the judgement of
what became of each Job, and the clean end.
"""

import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kubernetes.client import CoreV1Api
from snakemake.exceptions import WorkflowError
from snakemake.io import wait_for_files
from snakemake_executor_plugin_kubernetes import Executor
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from harness.kubernetes import templates
from harness.kubernetes.clean_end import end_all, refuse_strangers
from harness.kubernetes.disruptions import Disruptions
from harness.kubernetes.job_shape import RuleJob, shape
from harness.kubernetes.namespace import Namespace
from harness.kubernetes.outcome import Outcome, not_created
from harness.kubernetes.ownership import commit_of, owner_of
from harness.kubernetes.patient_watch import PatientWatch
from harness.kubernetes.stage_log import cause
from harness.kubernetes.watch import Watch
from harness.storage import pod_folder
from vlmflow.cluster.client import Refused, connect
from vlmflow.cluster.instance import named
from vlmflow.cluster.pod_templates import CONTAINER
from vlmflow.core.errors import VlmflowError

POLL_SECONDS = 2
"""Between two looks: one costs two calls, however many Jobs there are."""

MORE_MEMORY = 1.5
"""What an attempt gets after one that was killed for its memory, times what that one had."""

LOG_LINES = 2_000
"""How much of a failed pod's log is kept."""


def install(workflow: Any, settings: Any) -> None:
    """Put the hardened executor in the plugin's place; in pods, which run Snakemake too, nothing is to be done.

    Ends the process where a pod template of the checkout is wrong; an exception would bring a traceback of the
    Snakefile with it. Those that the cluster has are checked when the executor starts, before the first job.
    """
    if not workflow.is_main_process:
        return
    HardenedExecutor.max_mem_mb = settings.cluster.max_mem_mb
    ExecutorPluginRegistry().get_plugin("kubernetes").executor = HardenedExecutor
    # Snakemake does not say yet which executor it will use, but that none shares a file system with this process.
    if not workflow.storage_settings.shared_fs_usage:
        try:
            templates.check_files(Path(workflow.basedir) / "k8s" / "templates")
        except VlmflowError as error:
            sys.exit(str(error))


class HardenedExecutor(Executor):
    """Runs every job of a rule in a pod of its own.

    max_mem_mb: the most memory, in MB, that an attempt gets after one that was killed for its memory.
    """

    max_mem_mb: int
    _ending = _has_secret = False  # here, since Snakemake's thread of looks begins before __post_init__

    def __post_init__(self) -> None:
        """Connect, end what an earlier call left, and check the templates, before the first job."""
        self._after_oom: dict[str, int] = {}
        commit = commit_of(Path(self.workflow.basedir))
        self._env = {"VLMFLOW_COMMIT": commit} if commit else {}
        try:
            self._api = connect(self._say)
            super().__post_init__()
            self._templates = templates.of_namespace(self.cluster, self.logger.warning)
        except VlmflowError as error:
            raise WorkflowError(str(error)) from None
        except Refused as error:
            what = f"namespace {self.namespace}: {error}"
            raise WorkflowError(f"{what}\n  what to do: `make doctor` shows what the cluster lacks") from None
        self.next_seconds_between_status_checks = POLL_SECONDS
        # The controller's cores are no measure of what a pod may have.
        self.workflow.global_resources["_cores"] = None
        self.workflow.resource_settings.cores = None

    def register_secret(self) -> None:
        """Begin the work with the API: upstream's first call of it is here."""
        self.kubeapi = CoreV1Api(self._api)
        self.batchapi = SimpleNamespace(create_namespaced_job=self._create)
        self.cluster = Namespace(self.namespace, self._api)
        kept = self.workflow.persistence.aux_path
        kept.mkdir(parents=True, exist_ok=True)
        targets = f"{named(self.namespace)} {self.workflow.storage_settings.default_storage_prefix}"
        self._owner = owner_of(self.run_namespace, kept, targets)
        self._watch = Watch(self.cluster, self._owner.ours, self._say)
        self._sight = PatientWatch(self._watch, self.logger.warning)
        self._disruptions = Disruptions(self.cluster, self._watch)
        refuse_strangers(self.cluster, self._owner.strangers)
        self._end(self._owner.earlier, "An earlier call left work behind.")
        prefix = self.workflow.storage_settings.remote_job_local_storage_prefix
        pod_folder.sweep(prefix, self.cluster.pod_names, self._say)
        self._secret_record = kept / "kubernetes-secret"
        self.unregister_secret()  # that of an earlier call, which was killed

    def unregister_secret(self) -> None:
        """Delete the Secret with the storage's keys, where there is one."""
        if self._secret_record.is_file():
            name = self._secret_record.read_text()
            if self._try(lambda: self.cluster.delete_secret(name), f"Secret {name} stays until the next call"):
                self._secret_record.unlink()

    def envvars(self) -> dict[str, str]:
        """Leave out what the plugin s3 sets in every call, a region by default, where targets lie elsewhere."""
        in_s3 = self.workflow.storage_settings.default_storage_provider == "s3"
        return {name: value for name, value in super().envvars().items() if in_s3 or "_STORAGE_S3_" not in name}

    def _make_secret(self) -> None:
        """Make the Secret with the storage's keys before the first Job; a call with nothing to do needs none."""
        if not self.envvars() or self._has_secret:
            return
        self._secret_record.write_text(self.run_namespace)
        try:
            super().register_secret()
        except Refused as error:
            if error.word != "AlreadyExists":  # made by a try whose answer was lost
                raise
        self._has_secret = True

    def run_job(self, job: Any) -> None:
        """Create the Job of one job; what the API refuses fails this job alone."""
        # On SIGTERM Snakemake would wait until all is done. A closed terminal would kill it, and leave its Jobs.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, signal.default_int_handler)
        self._rule_job = self._rule_job_of(job)
        try:
            self._make_secret()
            super().run_job(job)
        except (VlmflowError, WorkflowError, Refused) as error:
            self._report_failure(SubmittedJobInfo(job), not_created(error))

    def get_job_args(self, job: Any) -> str:
        """Have a pod whose job fails remove no target: it has stored none; what has the name is another attempt's."""
        return f"{super().get_job_args(job)} --keep-incomplete"

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Report jobs that have ended; yield all others: nothing may be known of one, or it is made again."""
        active = active_jobs if self._ending else self._make_again(active_jobs)
        there = [name for info in active if not self._disruptions.resting(name := info.external_jobid)]
        try:
            outcomes = self._sight.look(there) if there and not self._ending else {}
        except VlmflowError as error:
            raise WorkflowError(str(error)) from None
        for info in active:
            outcome = outcomes.get(info.external_jobid)
            if outcome and outcome.disrupted:
                outcome = self._plan_again(info, outcome)
            if outcome is None or outcome.state not in ("succeeded", "failed"):
                yield info
            elif outcome.state == "succeeded":
                missing = await self._missing_targets(info.job)
                if missing:
                    self._report_failure(info, replace(outcome, why=f"it ended well, but {missing}"))
                else:
                    self.logger.info(f"Job {info.external_jobid} succeeded.")
                    self.report_job_success(info)
                    self._clean_up(info)
                    self._disruptions.forget(info.external_jobid)
            else:
                self._report_failure(info, outcome)

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """End all Jobs of this call, also one whose creation was interrupted and that is in no list here."""
        self._ending = True
        self._try(lambda: self._end(self._owner.ours, "Stopping."), "Jobs may go on")

    def shutdown(self) -> None:
        """Leave nothing behind: no Secret, and no Job but those that are to be kept (--kubernetes-omit-job-cleanup)."""
        self._ending = True
        if not self.workflow.executor_settings.omit_job_cleanup:
            self._try(lambda: self._end(self._owner.ours, "Stopping."), "Jobs may go on")
        super().shutdown()

    def _kubernetes_retry(self, func: Callable[[], Any]) -> Any:
        """Upstream's own retry waits five minutes under a lock; the client here is patient by itself."""
        return func()

    def _create(self, namespace: str, body: Any) -> None:
        """Create upstream's Job in its template's shape."""
        template = templates.choose(self._templates, self._rule_job.template, self._rule_job.gpus)
        plain = self._api.sanitize_for_serialization(body)
        job = shape(plain, template, self._rule_job, self._owner.labels, self._env)
        self._disruptions.create(job, self._rule_job, template.pending_limit)

    def _make_again(self, infos: list[SubmittedJobInfo]) -> list[SubmittedJobInfo]:
        """Make the Jobs anew that were taken away and whose pause is over; gives all but what the API refuses."""
        active = []
        for info in infos:
            try:
                before, info.external_jobid = info.external_jobid, self._disruptions.create_due(info.external_jobid)
            except Refused as error:
                self._report_failure(info, not_created(error))
                continue
            if self._ending and before != info.external_jobid:  # what ends all Jobs has not seen this one
                self._clean_up(info)
            active.append(info)
        return active

    def _plan_again(self, info: SubmittedJobInfo, outcome: Outcome) -> Outcome:
        """Plan to make a Job anew that was taken away, and remove what is left of it; retries are for failures."""
        planned = self._disruptions.plan(info.external_jobid, outcome)
        if planned.state == "waiting":
            self._say(f"{self._rule_job_of(info.job).words}: {planned.why}")
            self._keep_log(info, outcome)
            self._clean_up(info)
            self._remove_folder_of(outcome.pod)
        return planned

    def _keep_log(self, info: SubmittedJobInfo, outcome: Outcome) -> tuple[str, Path]:
        """Give the end of a failed pod's log, and the file that keeps it."""
        log = self.cluster.log_end(outcome.pod, CONTAINER, LOG_LINES) if outcome.pod else ""
        kept = self.log_path / f"{info.external_jobid}.log"
        if log:
            with suppress(OSError):  # a full disk here is no fault of the jobs that go on
                kept.write_text(log)
        return log, kept

    def _rule_job_of(self, job: Any) -> RuleJob:
        rule_job = RuleJob.of(job)
        return replace(rule_job, mem_mb=self._after_oom.get(rule_job.words, rule_job.mem_mb))

    async def _missing_targets(self, job: Any) -> str:
        """Say which of a job's targets are not there; Snakemake itself would end the whole call for one."""
        try:
            seconds = self.workflow.execution_settings.latency_wait
            await wait_for_files(job.products(include_logfiles=False), seconds, ignore_pipe_or_service=True)
        except OSError as error:
            return f"{error}".partition("\n")[2].replace("\n", "; ") + f" after {seconds} s"
        except WorkflowError as error:  # the storage does not answer
            return f"whether its targets are there is not known: {error}"
        return ""

    def _report_failure(self, info: SubmittedJobInfo, outcome: Outcome) -> None:
        job, rule_job = info.job, self._rule_job_of(info.job)
        log, kept = self._keep_log(info, outcome)
        why, again = outcome.why, outcome.again
        if outcome.out_of_memory:
            more = min(int(rule_job.mem_mb * MORE_MEMORY), self.max_mem_mb)
            again = more > rule_job.mem_mb
            self._after_oom[rule_job.words] = more
            why += f" ({rule_job.mem_mb} MB)"
            if not again:
                why += "; cluster.max_mem_mb allows no more"
            elif job.restart_times > job.attempt - 1:
                why += f"; the next attempt gets {more} MB"
        if not again:
            # Snakemake counts attempts and has no other word for "not again".
            job.attempt = max(job.attempt, job.restart_times + 1)
            why += "\nNot tried again: it would end in the same way."
        text = f"{rule_job.words}: {why}" + (f"\n{cause(log)}" if log else "")
        self.report_job_error(info, msg=f"{text}\n", aux_logs=[str(kept)] if log else [])
        self._clean_up(info)
        self._disruptions.forget(info.external_jobid)
        self._remove_folder_of(outcome.pod)

    def _clean_up(self, info: SubmittedJobInfo) -> None:
        name = info.external_jobid
        if name and not self.workflow.executor_settings.omit_job_cleanup:
            self._try(lambda: self.cluster.delete_job(name), f"Job {name} stays until its time to live is over")

    def _end(self, selector: str, why: str) -> None:
        for pod in end_all(self.cluster, selector, why, self._say):
            self._remove_folder_of(pod)

    def _remove_folder_of(self, pod: str | None) -> None:
        prefix = self.workflow.storage_settings.remote_job_local_storage_prefix
        if prefix and pod:
            pod_folder.remove_of(Path(prefix), pod)

    def _try(self, call: Callable[[], None], else_: str) -> bool:
        try:
            call()
        except Refused as error:
            self.logger.warning(f"{else_}: {error}")
            return False
        return True

    def _say(self, text: str) -> None:
        self.logger.info(text)
