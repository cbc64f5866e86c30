"""The plugin's executor, extended for real clusters; it replaces the plugin's class when the workflow is read.

Upstream builds the Job and formats its command. This class adds the pod template, retries of the API, the judgement of
each Job's outcome, and the clean end.
"""

import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kubernetes.client import CoreV1Api
from snakemake.exceptions import WorkflowError
from snakemake.io import wait_for_files
from snakemake_executor_plugin_kubernetes import Executor
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from vlmflow.remote.cluster.api import Refused, connect
from vlmflow.remote.cluster.groups import INDEXED_JOB, KINDS, PYTORCHJOB, TRAINJOB, IndexedJob, check_served
from vlmflow.remote.cluster.kubectl import own_name
from vlmflow.remote.job import Attempts, Ended, RuleJob, cause, interrupt_when_told_to_end
from vlmflow.remote.kubernetes import templates
from vlmflow.remote.kubernetes.job_shape import commit_of, owner_of, shape
from vlmflow.remote.kubernetes.namespace import Namespace, end_all, refuse_strangers
from vlmflow.remote.kubernetes.outcome import Outcome, not_created
from vlmflow.remote.kubernetes.watch import Disruptions, Watch
from vlmflow.remote.library import CHECKOUT, PACKAGE, VlmflowError
from vlmflow.remote.storage import pod_folder

POLL_SECONDS = 2
"""Between two looks: each costs two calls, however many Jobs there are."""

LOG_LINES = 2_000
"""Lines of a failed pod's log that are kept."""


def install(workflow: Any, settings: Any) -> None:
    """Replace the plugin's executor by the hardened one; does nothing in pods, which also run Snakemake.

    Ends the process in an installed package, or if a pod template of the checkout is wrong; an exception would print a
    traceback of the Snakefile. The cluster's own templates are checked when the executor starts, before the first job.
    """
    if not workflow.is_main_process:
        return
    if CHECKOUT.is_relative_to(PACKAGE):
        sys.exit(
            "vlmflow: pods get their files from a git repository: clone vlmflow, and write there: "
            "snakemake --executor kubernetes TARGET"
        )
    HardenedExecutor.config = settings.cluster
    ExecutorPluginRegistry().get_plugin("kubernetes").executor = HardenedExecutor
    # Snakemake does not yet know its executor here, only whether it shares a file system with this process.
    if not workflow.storage_settings.shared_fs_usage:
        try:
            templates.check_files(Path(workflow.basedir) / "k8s" / "templates")
        except VlmflowError as error:
            sys.exit(str(error))


class HardenedExecutor(Executor):
    """Runs every job of a rule in its own pod. config: the block `cluster` of the configuration."""

    config: Any
    # Here, because Snakemake's polling thread starts before __post_init__.
    _ending = _has_secret = False

    def __post_init__(self) -> None:
        """Connect, end what an earlier invocation left, and check the templates. Raises WorkflowError."""
        self._attempts = Attempts(self.config.max_mem_mb)
        commit = commit_of(Path(self.workflow.basedir))
        self._env = {"VLMFLOW_COMMIT": commit} if commit else {}
        try:
            self._api = connect(self.logger.info)
            super().__post_init__()
            self._templates = templates.read_templates(templates.templates_of(self.cluster), self.namespace)
        except VlmflowError as error:
            raise WorkflowError(str(error)) from None
        except Refused as error:
            raise WorkflowError(
                f"namespace {self.namespace}: {error}\n  what to do: `vlmflow doctor` shows what the cluster lacks"
            ) from None
        self.next_seconds_between_status_checks = POLL_SECONDS
        # The controller's cores do not limit what a pod may have.
        self.workflow.register_resource("_cores", None)
        self.workflow.resource_settings.cores = None

    def register_secret(self) -> None:
        """Set up the API clients and end earlier work: upstream's first API call is in this method."""
        self.kubeapi = CoreV1Api(self._api)
        self.batchapi = SimpleNamespace(create_namespaced_job=self._create)
        self.cluster = Namespace(self._api, self.namespace, KINDS[self.config.multi_node])
        check_served(self.cluster, self.cluster.groups)
        kept = self.workflow.persistence.aux_path
        kept.mkdir(parents=True, exist_ok=True)
        targets = f"{own_name(self.namespace)} {self.workflow.storage_settings.default_storage_prefix}"
        self._owner = owner_of(self.run_namespace, kept, targets)
        self._watch = Watch(self.cluster, self._owner.ours, self.logger.info, gang_timeout=self.config.gang_timeout)
        self._disruptions = Disruptions(self.cluster, self._watch)
        self._local_prefix = self.workflow.storage_settings.remote_job_local_storage_prefix
        for kind in (PYTORCHJOB, TRAINJOB, INDEXED_JOB):
            self._end_earlier(kind)
        pod_folder.sweep(self._local_prefix, self._pod_names, self.logger.info)
        self._secret_record = kept / "kubernetes-secret"
        self.unregister_secret()  # that of an earlier, killed invocation

    def _pod_names(self) -> set[str]:
        """Return the names of all pods of the namespace, also of those that no Job made."""
        return {pod["metadata"]["name"] for pod in self.cluster.pods()}

    def _end_earlier(self, kind: IndexedJob) -> None:
        """End what earlier invocations left, also as another kind of groups, if the cluster shows that kind.

        Before Jobs and their pods: the Training Operator may make a pod again whose PyTorchJob exists.
        """
        cluster = Namespace(self._api, self.namespace, kind)
        try:
            refuse_strangers(cluster, self._owner.strangers)
            self._end(cluster, self._owner.earlier, "An earlier run left Jobs.")
        except Refused as refused:
            if kind in (self.cluster.groups, INDEXED_JOB):
                raise
            if refused.status not in (403, 404):
                self.logger.warning(f"{kind.kind}s of an earlier run, if there are any, remain: {refused}")

    def unregister_secret(self) -> None:
        """Delete the Secret with the storage's keys, if it exists."""
        if self._secret_record.is_file():
            name = self._secret_record.read_text()
            if self._try(lambda: self.cluster.delete("secrets", name), f"Secret {name} remains until the next run"):
                self._secret_record.unlink()

    def envvars(self) -> dict[str, str]:
        """Return the variables for pods; those of the plugin s3, which always sets a region, only for targets in S3."""
        in_s3 = self.workflow.storage_settings.default_storage_provider == "s3"
        return {name: value for name, value in super().envvars().items() if in_s3 or "_STORAGE_S3_" not in name}

    def _make_secret(self) -> None:
        """Create the Secret with the storage's keys before the first Job; an invocation without jobs needs none."""
        if not self.envvars() or self._has_secret:
            return
        self._secret_record.write_text(self.run_namespace)
        try:
            super().register_secret()
        except Refused as error:
            if error.word != "AlreadyExists":  # created by a try whose answer was lost
                raise
        self._has_secret = True

    def run_job(self, job: Any) -> None:
        """Create the Job of one job; if the API refuses it, only this job fails."""
        interrupt_when_told_to_end()
        self._rule_job = self._rule_job_of(job)
        try:
            self._make_secret()
            super().run_job(job)
        except (VlmflowError, WorkflowError, Refused) as error:
            self._report_failure(SubmittedJobInfo(job), not_created(error))

    def get_job_args(self, job: Any) -> str:
        """Add --keep-incomplete: a pod whose job fails has stored no target; one with its name is another attempt's."""
        return f"{super().get_job_args(job)} --keep-incomplete"

    def _create(self, namespace: str, body: Any) -> None:
        """Create upstream's Job, merged with its pod template."""
        template = templates.choose(self._templates, self._rule_job.template, self._rule_job.gpus)
        plain = self._api.sanitize_for_serialization(body)
        job = shape(plain, template, self._rule_job, self._owner.labels, self._env)
        self._disruptions.create(job, self._rule_job, template.pending_limit)

    def _kubernetes_retry(self, func: Callable[[], Any]) -> Any:
        """Call without upstream's retry, which waits five minutes under a lock; our client retries by itself."""
        return func()

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Report jobs that have ended, and yield all others, also those of unknown state or to be recreated."""
        active = active_jobs if self._ending else self._make_again(active_jobs)
        there = [name for info in active if not self._disruptions.resting(name := info.external_jobid)]
        try:
            outcomes = self._watch.look_patiently(there, self.logger.warning) if there and not self._ending else {}
        except VlmflowError as error:
            raise WorkflowError(str(error)) from None
        for info in active:
            outcome = outcomes.get(info.external_jobid)
            if outcome and outcome.runs_on:
                self._try(partial(self.cluster.delete_job, info.external_jobid), "A group that failed runs on")
            if outcome and outcome.ended.taken_away:
                outcome = self._plan_again(info, outcome)
            if outcome is None or outcome.state not in ("succeeded", "failed"):
                yield info
            elif outcome.state == "succeeded":
                if missing := await self._missing_targets(info.job):
                    self._report_failure(info, replace(outcome, ended=Ended(cause=f"its pod succeeded, but {missing}")))
                else:
                    self.logger.info(f"Job {info.external_jobid} succeeded.")
                    self.report_job_success(info)
                    self._clean_up(info)
                    self._disruptions.forget(info.external_jobid)
            else:
                self._report_failure(info, outcome)

    def _make_again(self, infos: list[SubmittedJobInfo]) -> list[SubmittedJobInfo]:
        """Recreate removed Jobs whose pause is over; returns all jobs but those that the API refuses."""
        active = []
        for info in infos:
            try:
                before, info.external_jobid = info.external_jobid, self._disruptions.create_due(info.external_jobid)
            except Refused as error:
                self._report_failure(info, not_created(error))
                continue
            if self._ending and before != info.external_jobid:  # cancel_jobs has not seen this one
                self._clean_up(info)
            active.append(info)
        return active

    def _plan_again(self, info: SubmittedJobInfo, outcome: Outcome) -> Outcome:
        """Plan to recreate a Job that was removed, and clean up what is left of it; Snakemake's retries stay unused."""
        planned = self._disruptions.plan(info.external_jobid, outcome)
        if planned.state == "waiting":
            self.logger.info(f"{self._rule_job_of(info.job).words}: {planned.ended.cause}")
            self._save_log(info, outcome)
            self._clean_up(info)
            self._remove_folders_of((outcome.pod, *outcome.others))
        return planned

    async def _missing_targets(self, job: Any) -> str:
        """Return which targets of a job are missing, "" if none; Snakemake itself would end the whole run for one."""
        try:
            seconds = self.workflow.execution_settings.latency_wait
            await wait_for_files(job.products(include_logfiles=False), seconds, ignore_pipe_or_service=True)
        except OSError as error:
            return f"{error}".partition("\n")[2].replace("\n", "; ") + f" after {seconds} s"
        except WorkflowError as error:  # the storage does not answer
            return f"the storage does not show whether its targets exist: {error}"
        return ""

    def _report_failure(self, info: SubmittedJobInfo, outcome: Outcome) -> None:
        rule_job = RuleJob.of(info.job)
        log, kept = self._save_log(info, outcome)
        why = self._attempts.after(info.job, rule_job.words, rule_job.mem_mb, outcome.ended)
        text = f"{rule_job.words}: {why}" + (f"\n{cause(log)}" if log else "")
        self.report_job_error(info, msg=f"{text}\n", aux_logs=[str(kept)] if log else [])
        self._clean_up(info)
        self._disruptions.forget(info.external_jobid)
        self._remove_folders_of((outcome.pod, *outcome.others))

    def _save_log(self, info: SubmittedJobInfo, outcome: Outcome) -> tuple[str, Path]:
        """Save the ends of the logs of a failed Job's pods; returns the text and file of the one that failed."""
        files = {outcome.pod: self.log_path / f"{info.external_jobid}.log"}
        files |= {pod: self.log_path / f"{pod}.log" for pod in outcome.others}
        nodes = self._rule_job_of(info.job).nodes
        logs = {pod: self.cluster.log_end(pod, LOG_LINES, nodes) for pod in files if pod}
        for pod, log in logs.items():
            if log:
                with suppress(OSError):  # a full disk here must not fail the jobs that still run
                    files[pod].write_text(log, encoding="utf-8")
        return logs.get(outcome.pod or "", ""), files[outcome.pod]

    def _rule_job_of(self, job: Any) -> RuleJob:
        rule_job = RuleJob.of(job)
        return replace(rule_job, mem_mb=self._attempts.mem_mb(rule_job.words, rule_job.mem_mb))

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """End all Jobs of this invocation, also one whose creation was interrupted and that no list here has."""
        self._ending = True
        self._try(lambda: self._end(self.cluster, self._owner.ours, "Stopping."), "Jobs may still run")

    def shutdown(self) -> None:
        """Remove the Secret and all Jobs; --kubernetes-omit-job-cleanup keeps the Jobs."""
        self._ending = True
        if not self.workflow.executor_settings.omit_job_cleanup:
            self.cancel_jobs([])
        super().shutdown()

    def _clean_up(self, info: SubmittedJobInfo) -> None:
        name = info.external_jobid
        if name and not self.workflow.executor_settings.omit_job_cleanup:
            self._try(lambda: self.cluster.delete_job(name), f"Job {name} remains until its ttlSecondsAfterFinished")

    def _end(self, cluster: Namespace, selector: str, why: str) -> None:
        self._remove_folders_of(end_all(cluster, selector, why, self.logger.info))

    def _remove_folders_of(self, pods: Iterable[str | None]) -> None:
        for pod in filter(None, pods):
            pod_folder.remove_of(self._local_prefix, pod)

    def _try(self, call: Callable[[], None], else_: str) -> bool:
        try:
            call()
        except Refused as error:
            self.logger.warning(f"{else_}: {error}")
            return False
        return True
