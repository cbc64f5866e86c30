"""Keeps processes from loading unused libraries as they start.

This saves half a second of a Snakemake call that runs jobs, and a tenth of a second of each job.

Clears the lock that a killed Snakemake leaves, if nobody holds it any more.

What this workflow changes inside Snakemake, since 9.27.1 has no public way to it; nothing else replaces its parts.

Each function names the upstream line that it works around. A test (tests/unit/harness/test_patches.py) fails when
upstream no longer needs it: then delete the function.
"""

import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError, of_system
from vlmflow.core.processes import tell_stages


def leave_out_what_nobody_uses() -> None:
    """Make pandas unavailable in this process, and switch off pydantic's plugins in the stages that it starts.

    Before each script Snakemake checks whether a param is a pandas table, if pandas is installed; our params are JSON
    values. None in `sys.modules` marks a module as missing. pydantic searches the entry points of every installed
    package for plugins; no lock file has one.

    Call it only in a process that runs jobs: one that only plans (the doctor, a test) may use pandas afterwards.
    """
    sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


LOCK = Path(".snakemake", "vlmflow.lock")
"""The file, in the working directory, on which every main process holds a shared flock."""

_held: list[Any] = []
"""Keeps our lock file open during the life of the process: the kernel releases the lock with it."""


def make_folders() -> None:
    """Make Snakemake's folders in the working directory, or end this process with why that cannot be.

    snakemake/persistence/__init__.py:261 (`Persistence.__init__`) would end in a traceback, also with -n.
    """
    try:
        (LOCK.parent / "locks").absolute().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(str(of_system(error, LOCK.parent.absolute()) or error))


def clear(workflow: Any) -> None:
    """Remove Snakemake's lock files in the working directory if the process that wrote them is gone.

    Snakemake's own lock is a file, which remains after a SIGKILL. Every main process of this workflow also holds a
    shared flock, which ends with the process: if an exclusive one succeeds, the files are stale. If others hold it, the
    files stay, and Snakemake reports that the directory is locked.

    Raises PassingError if the working directory cannot be written to, or has no file locks.
    """
    if not workflow.is_main_process or workflow.dryrun:
        return
    try:
        LOCK.parent.mkdir(exist_ok=True)
        lock = LOCK.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for stale in (LOCK.parent / "locks").glob("*.lock"):
                stale.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError as error:
        raise (of_system(error, LOCK.absolute()) or error) from None
    _held.append(lock)


@contextmanager
def alone() -> Iterator[None]:
    """Lock the working directory: a Snakemake that is started meanwhile waits for the end of the block.

    Raises VlmflowError if one is running, or if the volume has no file locks.
    """
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise VlmflowError(f"{Path.cwd()}: Snakemake is running here", "wait until it ends, or stop it") from None
        except OSError as error:
            raise VlmflowError(
                f"{LOCK.absolute()}: this volume has no file locks ({error}), so the workflow cannot know whether "
                "Snakemake is running here",
                "delete what you no longer need by hand: docs/outputs.md",
            ) from None
        yield


def is_held() -> bool:
    """Return whether a main process runs in the working directory; for a dry run, which holds no lock itself."""
    try:
        with LOCK.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nothing has run here yet, or the volume has no flock
        pass
    return False


def around_planning(workflow: Any, around: Callable[[Callable[[], None]], None]) -> None:
    """Let a function make Snakemake's plan, with and without -n: it gets the function that does it, and calls it.

    snakemake/workflow.py:1500 (`Workflow.execute`): the workflow's hooks are called after the plan, and not with -n.
    """
    workflow._build_dag = partial(around, workflow._build_dag)


def compare_past_ancient_inputs(dag: Any) -> None:
    """Make Snakemake compare jobs that only `ancient` files connect to jobs that run. Call it before planning.

    snakemake/dag.py:1642 (`DAG.update_needrun`): each job downstream of one that runs is skipped, because it will run
    as well; but past an `ancient` input it does not (dag.py:1666). Without this patch, a setting of the estimate and of
    the smoke run makes only the estimate again when it changes, and weights that were trained with the old value pass
    as those of the new one.
    """
    update_needrun, bfs = dag.update_needrun, dag.bfs

    @wraps(bfs)
    def past_no_ancient_input(direction: Any, *jobs: Any) -> Iterator[Any]:
        reached = list(jobs)
        for job in reached:
            yield job
            following = direction[job].items()
            reached += [next_job for next_job, files in following if next_job not in reached and not _is_ancient(files)]

    @wraps(update_needrun)
    async def updated(*args: Any, **options: Any) -> None:
        dag.bfs = past_no_ancient_input
        try:
            await update_needrun(*args, **options)
        finally:
            dag.bfs = bfs

    dag.update_needrun = updated


def _is_ancient(files: Any) -> bool:
    return all(file.is_ancient for file in files)


def ask_for(workflow: Any, files: Iterable[str]) -> None:
    """Add files to the targets of the call. Call it before planning.

    snakemake/dag.py:1654 (`DAG.update_needrun`): a missing file is made again only if a job that needs it runs, so one
    that must be there has to be a target; and a workflow cannot add to the targets of the command.
    """
    workflow.dag.targetfiles |= set(map(workflow.modifier.path_modifier.apply_default_storage, files))


def store_by(*classes: type) -> None:
    """Replace the classes of targets in storage plugins; each class derives from that of its plugin.

    Call it in the Snakefile before the first rule: a target gets its class when it is named.

    snakemake_interface_storage_plugins/storage_provider.py:168 (`get_storage_object_cls`): a provider looks its class
    up in its plugin's module. A plugin of our own would have to be installed beside the repository.
    """
    for ours in classes:
        theirs = ours.__mro__[1]
        sys.modules[theirs.__module__].StorageObject = ours  # type: ignore[attr-defined]


def only_note_sigterm() -> None:
    """Let Snakemake's handler of SIGTERM wait for nothing.

    snakemake/scheduling/job_scheduler.py:574 (`JobScheduler.exit_gracefully`): in the main thread it takes a lock that
    this may hold when the signal comes, while jobs are finished (:231), and the one of a semaphore. Neither is
    reentrant: Snakemake would wait for itself for ever.
    """
    from snakemake.scheduling.job_scheduler import JobScheduler

    def note(scheduler: Any, *signal_and_frame: Any) -> None:
        scheduler._user_kill = "graceful"
        threading.Thread(target=scheduler._open_jobs.release, daemon=True).start()

    JobScheduler.exit_gracefully = note


def on_sigterm(then: Callable[[], None]) -> None:
    """Call a function when Snakemake gets SIGTERM while jobs run; Snakemake starts no more jobs, and waits for these.

    snakemake/scheduling/job_scheduler.py:574 (`JobScheduler.exit_gracefully`): neither the jobs nor the workflow hear
    of the signal.
    """
    from snakemake.scheduling.job_scheduler import JobScheduler

    wait_for_jobs = JobScheduler.exit_gracefully

    def wait_and_say(scheduler: Any, *signal_and_frame: Any) -> None:
        wait_for_jobs(scheduler, *signal_and_frame)
        then()

    JobScheduler.exit_gracefully = wait_and_say


STAGE_SCRIPTS = ".snakemake/scripts/"
"""A part of the command line of each stage that Snakemake runs."""

AFTER_CTRL_C = 2.0
"""Seconds in which stages end that heard of Ctrl-C themselves. Trainings then save; a second signal changes nothing."""


def tell_stages_to_end() -> None:
    """Let the stages on this machine hear of SIGTERM and SIGINT that Snakemake alone gets, from `kill` or a supervisor.

    snakemake/executors/local.py:260 (`Executor.cancel`): Snakemake waits until its jobs end by themselves, a training
    after its last step. After Ctrl-C in a terminal stages have heard of it, and most have ended when this tells them.
    """
    from snakemake.executors.local import Executor

    def end_stages(after: float = 0.0) -> None:
        teller = threading.Timer(after, tell_stages, [lambda stage: STAGE_SCRIPTS in " ".join(stage.cmdline())])
        teller.daemon = True
        teller.start()

    on_sigterm(end_stages)
    wait = Executor.cancel

    def cancel(executor: Any) -> None:
        end_stages(AFTER_CTRL_C)
        wait(executor)

    Executor.cancel = cancel


def watch_executor(plugin: Any, named: Callable[[], None], install: Callable[[], None] | None) -> None:
    """Learn whether a call names the executor of a plugin, and replace this one when Snakemake makes it.

    named: called when Snakemake checks the settings of the plugin, which it does, also with -n, for the one that the
    call names. install: sets `plugin.executor`, when Snakemake makes one; None if that is already ours.

    snakemake/api.py:536 (`DAGApi.execute_workflow`): the executor is looked up by its name after the rules are read,
    which cannot ask for it, and with -n another one runs.
    """
    check = plugin.validate_settings

    def check_and_say(settings: Any) -> None:
        named()
        check(settings)

    plugin.validate_settings = check_and_say
    if install is not None:
        replace = install

        class Made:  # Snakemake asks of which classes it is
            def __new__(cls, *values: Any) -> Any:
                replace()
                return plugin.executor(*values)

        plugin.executor = Made
