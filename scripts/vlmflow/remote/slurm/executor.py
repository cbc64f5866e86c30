"""The plugin's executor, extended for real sites; it replaces the plugin's class.

The plugin gives the settings, and the words of sbatch for resources. This class submits without a shell, reads how
jobs end, never takes an unanswered query for an answer, finds the jobs of an earlier call, and lets trainers save.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from snakemake.exceptions import WorkflowError
from snakemake_executor_plugin_slurm import Executor
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from vlmflow.remote.job import Attempts, Ended, RuleJob, interrupt_when_told_to_end, last_lines
from vlmflow.remote.library import VlmflowError
from vlmflow.remote.slurm import in_job, queue
from vlmflow.remote.slurm.partitions import named_by, partitions
from vlmflow.remote.slurm.queue import SlurmError, ask, jobs
from vlmflow.remote.slurm.records import Record, Records
from vlmflow.remote.slurm.request import EarlierJobs, Request, comment_of, rule_job_of, sbatch_words, script, warning_of
from vlmflow.remote.slurm.waiting import News

FIRST_PAUSE, LONGEST_PAUSE = 3.0, 30.0
"""Seconds between two looks: the longer a job is there, the fewer. Each is one query for all jobs."""

OUTAGE_PAUSE = 15.0
"""Seconds until a submission is tried again that the controller did not answer."""

LOOKS_UNTIL_GONE = 3
"""Answers in a row without a job until it counts as one that Slurm has forgotten (MinJobAge)."""

MOST_TIMES = 20
"""How often a job is submitted again within an attempt after Slurm took it away and did not bring it back."""

UNKNOWN_ANSWERS = 4
"""How often in a row a job is submitted whose refusal is not a known one: it may be an outage."""

FULL = ("maxsubmit", "submit limit")
"""What sbatch says (in lower case) while a user has as many jobs as the site allows."""


def install(workflow: Any, settings: Any) -> None:
    """Replace the plugin's executor by ours."""
    SlurmExecutor.config, SlurmExecutor.max_mem_mb = settings.slurm, settings.cluster.max_mem_mb
    ExecutorPluginRegistry().get_plugin("slurm").executor = SlurmExecutor


class SlurmExecutor(Executor):
    """Runs every job in a job of Slurm.

    config: the block `slurm` of the configuration. max_mem_mb: the memory, in MB, of an attempt after one that ran out.
    """

    config: Any
    max_mem_mb: int
    _ending = False

    def __post_init__(self) -> None:
        """Find what an earlier call left. Raises WorkflowError if there is no Slurm, or it does not answer."""
        self._attempts = Attempts(self.max_mem_mb)
        self._submitted: dict[str, SubmittedJobInfo] = {}
        self._missing: dict[str, int] = {}
        self._times: dict[str, int] = {}
        self._warned = ""
        self._news = News(self.logger.info)
        try:
            queue.refuse_without_slurm()
            self._site = partitions()
            self._earlier = EarlierJobs(self.workflow.workdir_init, self.logger.info)
        except VlmflowError as error:
            raise WorkflowError(str(error)) from None
        super().__post_init__()
        aux = Path(self.workflow.persistence.aux_path).absolute()
        self._ends, self._records = aux / "slurm-ends", Records(aux / "slurm-jobs")
        self.next_seconds_between_status_checks = FIRST_PAUSE

    def get_job_args(self, job: Any) -> str:
        """Let the job's Snakemake use the cores and the memory that the job has; not all nodes show it only those."""
        has = self._rule_job_of(job)
        memory = f" --resources mem_mb={has.mem_mb}" if has.mem_mb else ""
        return f"{super().get_job_args(job)} --cores {has.threads}{memory}"

    def additional_general_args(self) -> str:
        """Return nothing: the job's Snakemake runs its stage itself, without the plugin's executor for steps."""
        return ""

    def run_jobs(self, jobs: list[Any]) -> None:
        """Submit jobs, each by itself."""
        interrupt_when_told_to_end()
        for job in jobs:
            self._submit_job(job)

    def run_job(self, job: Any) -> None:
        """Submit a job, or follow the one of an earlier call that makes the same."""
        try:
            info = self._follow_earlier(job) or self._submit(job)
        except (VlmflowError, WorkflowError, OSError) as error:
            why = self._attempts.after(job, _words(job), 0, Ended("refused", str(error), again=False))
            self._report_job_error_threadsafe(SubmittedJobInfo(job), f"{_words(job)}: {why}\n")
            return
        self._submitted[str(info.external_jobid)] = info
        self._report_job_submission_threadsafe(info)
        if self._ending:  # it was submitted while the others were ended
            self.cancel_jobs([info])

    def _follow_earlier(self, job: Any) -> SubmittedJobInfo | None:
        """Return the job of an earlier call that makes the same, if one is there; end those that make it otherwise."""
        comment = comment_of(job, self.workflow.workdir_init)
        _, _, identity, *stages = comment.split()
        same_stages = self._earlier.take(stages)
        for earlier in same_stages:
            if earlier.words[2] == identity and len(same_stages) == 1:
                self.logger.info(f"{_words(job)}: job {earlier.id} of an earlier call makes it")
                self._records.submitted(comment, earlier.id)
                return self._info(job, earlier.id)
            self.logger.info(f"{_words(job)}: ending job {earlier.id} of an earlier call, which makes it otherwise")
            queue.end_jobs({earlier.id: warning_of(job)}, self.logger.info)
            queue.wait_until_ended([earlier.id])
        while record := self._claim(comment):  # the queue did not show it
            if record.comment == comment:
                self.logger.info(f"{_words(job)}: job {record.job} of an earlier call makes it")
                self._records.submitted(comment, record.job)
                return self._info(job, record.job)
            queue.end_jobs({record.job: warning_of(job)}, self.logger.info)
            queue.wait_until_ended([record.job])
        return None

    def _claim(self, comment: str) -> Record | None:
        """Claim the stages of a job, as `Records.claim`, as often as Slurm does not answer."""
        while True:
            try:
                return self._records.claim(comment)
            except SlurmError as error:
                if not error.outage or self._ending:
                    raise
                self._warn(f"{error.cause}; trying again")
            time.sleep(OUTAGE_PAUSE)

    def _submit(self, job: Any) -> SubmittedJobInfo:
        """Submit a job whose stages are claimed."""
        comment = comment_of(job, self.workflow.workdir_init)
        try:
            number = self._asked_for(job, comment)
        except (VlmflowError, WorkflowError, OSError):
            self._records.ended(comment)
            raise
        self._records.submitted(comment, number)
        self._earlier.seen.add(number)
        self.logger.info(f"{_words(job)}: job {number} of Slurm")
        return self._info(job, number)

    def _asked_for(self, job: Any, comment: str) -> str:
        """Ask Slurm for a job; returns its number."""
        rule_job = self._rule_job_of(job)
        log = self._log_of(job, "%j")
        log.parent.mkdir(parents=True, exist_ok=True)
        words = sbatch_words(
            job,
            rule_job,
            comment,
            slurm=self.config,
            minutes=self._minutes(job, rule_job),
            log=log,
            workdir=self.workflow.workdir_init,
            partition=self.get_partition_arg(job),
            settings=self.workflow.executor_settings,
        )
        text = script(self.format_job_exec(job), self.get_python_executable(), rule_job)
        return self._ask_patiently(words, text, comment)

    def _minutes(self, job: Any, rule_job: RuleJob) -> int | None:
        """Return the time limit of a job; one that comes again takes several of its partition's, if it needs more."""
        named = [self._site[name] for name in named_by(Request.of(job), self._site) if name in self._site]
        limits = [partition.max_minutes for partition in named if partition.max_minutes]
        if rule_job.runtime and limits and (warning_of(job) or job.is_group()):
            return min(rule_job.runtime, *limits)
        return rule_job.runtime or None

    def _ask_patiently(self, words: list[str], text: str, comment: str) -> str:
        """Submit a script, as often as the controller does not answer, or has no room; returns the job's number."""
        unknown = 0
        while True:
            try:
                answer = ask(*words, script=text, environment={in_job.ENDS: str(self._ends)})
                if not (number := answer.strip().split(";")[0]).isdecimal():
                    raise SlurmError(
                        f"sbatch: not the number of a job: {answer[:200]!r}", "see what the site adds to it"
                    )
                return number
            except SlurmError as error:
                waits = error.outage or any(word in error.cause.lower() for word in FULL)
                unknown = 0 if waits else unknown + 1
                if self._ending or (not waits and (error.refusal or unknown == UNKNOWN_ANSWERS)):
                    raise
                self._warn(f"{error.cause}; trying again")
            self._records.submitted(comment, "")
            time.sleep(OUTAGE_PAUSE)
            try:  # the answer may have been lost, not the submission; its job may have ended by now
                for job in jobs().values():
                    if job.words == tuple(comment.split()) and job.id not in self._earlier.seen:
                        return job.id
            except SlurmError as error:
                self._warn(error.cause)

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Report jobs that have ended; yield all others, also those of which Slurm tells nothing now."""
        if not active_jobs:
            return
        try:
            present = await asyncio.to_thread(jobs)
        except SlurmError as error:
            self._warn(f"{error.cause}; the jobs go on, and the next look is in a moment")
            for info in active_jobs:
                yield info
            return
        pauses = [LONGEST_PAUSE]
        for info in active_jobs:
            number = str(info.external_jobid)
            job = present.get(number)
            if job is not None and job.is_active:
                pauses.append(FIRST_PAUSE + job.used / 20)
                self._missing.pop(number, None)
                self._news.tell(_words(info.job), job, info.aux["slurm_logfile"])
                yield info
                continue
            if job is None and any(other.startswith(f"{number}_") for other in present):
                queue.end_jobs({number: 0}, self.logger.info)
                fault = f"{_words(info.job)}: job {number} became an array, which starts the stage several times: ended"
                self._submitted.pop(number, None)
                self.report_job_error(info, msg=f"{fault}\n")
                continue
            state = job.state if job is not None else await self._state_of_forgotten(info)
            if not state or not self._has_ended(info, state, job.reason if job is not None else ""):
                yield info
        self.next_seconds_between_status_checks = min(pauses) if len(pauses) > 1 else FIRST_PAUSE

    async def _state_of_forgotten(self, info: SubmittedJobInfo) -> str:
        """Return the state of a job that the queue no longer shows; "" while that is not sure."""
        number = str(info.external_jobid)
        self._missing[number] = self._missing.get(number, 0) + 1
        if self._missing[number] < LOOKS_UNTIL_GONE:
            return ""
        try:  # squeue may show less than there is
            if state := await asyncio.to_thread(queue.state_of, number):
                return "" if state in queue.ACTIVE else state
        except SlurmError as error:
            self._warn(error.cause)
            return ""
        try:
            answer = await asyncio.to_thread(ask, "sacct", "-X", "-n", "-P", "-j", number, "-o", "State")
            if states := answer.strip().splitlines()[-1:]:
                return states[0] if states[0] not in ("RUNNING", "PENDING") else ""
        except SlurmError:
            pass  # a site without accounting
        return "COMPLETED" if all(Path(str(file)).exists() for file in info.job.output) else "GONE"

    def _has_ended(self, info: SubmittedJobInfo, state: str, reason: str) -> bool:
        """Report a job that has ended; returns whether it is over, and not submitted again.

        state, reason: Slurm's words.
        """
        job, words, number = info.job, _words(info.job), str(info.external_jobid)
        verdict = in_job.verdict_file(self._ends, number)
        log = last_lines(info.aux["slurm_logfile"])
        ended = queue.GONE if state == "GONE" else queue.ended_of(state, verdict, reason, log)
        if ended and not warning_of(job):
            ended = queue.without_a_save(ended, sorted(job.rules)[0])
        self._submitted.pop(number, None)
        self._missing.pop(number, None)
        if ended is None:
            self.report_job_success(info)
            if not self.workflow.executor_settings.keep_successful_logs:
                info.aux["slurm_logfile"].unlink(missing_ok=True)
        elif ended.taken_away and not self._ending and self._times.get(words, 0) < MOST_TIMES:
            self._times[words] = self._times.get(words, 0) + 1
            self.logger.info(f"{words}: {ended.cause} (job {number}); submitted again; this uses no retry")
            try:
                self._claim(comment_of(job, self.workflow.workdir_init))
                again = self._submit(job)
            except (VlmflowError, WorkflowError, OSError) as error:
                self.report_job_error(info, msg=f"{words}: {error}\n")
                return True
            info.external_jobid, info.aux = again.external_jobid, again.aux
            self._submitted[str(info.external_jobid)] = info
            return False
        else:
            why = self._attempts.after(job, words, rule_job_of(job).mem_mb, ended)
            logs = [str(info.aux["slurm_logfile"])]
            self.report_job_error(info, msg=f"{words}: {why} (job {number})\n", aux_logs=logs)
        self._records.ended(comment_of(job, self.workflow.workdir_init))
        verdict.unlink(missing_ok=True)
        return True

    def print_job_error(self, job_info: SubmittedJobInfo, msg: str | None = None, **more: Any) -> None:
        """Print why a job failed; of several stages in one job Snakemake would print each, without the reason."""
        if job_info.job.is_group():
            self.logger.error(f"{msg}".strip())
        else:
            super().print_job_error(job_info, msg=msg, **more)

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Let trainers save, and end all jobs of this call, also those that a look at the queue has in hand."""
        self._ending = True
        warnings = {number: warning_of(info.job) for number, info in dict(self._submitted).items()}
        queue.end_jobs(warnings, self.logger.info)

    def _rule_job_of(self, job: Any) -> RuleJob:
        rule_job = rule_job_of(job)
        return replace(rule_job, mem_mb=self._attempts.mem_mb(_words(job), rule_job.mem_mb))

    def _info(self, job: Any, number: str) -> SubmittedJobInfo:
        return SubmittedJobInfo(job, external_jobid=number, aux={"slurm_logfile": self._log_of(job, number)})

    def _log_of(self, job: Any, number: str) -> Path:
        return Path(self.slurm_logdir, job.groupid if job.is_group() else job.name, f"{number}.log")

    def _warn(self, text: str) -> None:
        """Say something once, not at each look."""
        if text != self._warned:
            self._warned = text
            self.logger.warning(text)


def _words(job: Any) -> str:
    """Return the job, for people."""
    return f"{job.groupid} ({', '.join(sorted(job.rules))})" if job.is_group() else RuleJob.of(job).words
