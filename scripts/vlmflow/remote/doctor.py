"""What the doctors of Kubernetes and Slurm share: the jobs of runs, and the table of findings."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from snakemake.api import SnakemakeApi
from snakemake.settings import types
from snakemake.settings.enums import Quietness

from vlmflow.remote import library
from vlmflow.remote.library import CHECKOUT, Config, HubSource, VlmflowError

Read = TypeVar("Read")
Form = TypeVar("Form", bound=msgspec.Struct)

MANY = 10**6
"""Cores for planning: a rule's threads must not be cut to this machine's."""


def settings_and_runs(layers: list[Path], runs: list[str]) -> tuple[Config, list[str]]:
    """Return the settings of configuration files, each over the one before, and the runs to check: `runs`, or all.

    Raises VlmflowError if the settings are wrong, or have no such run.
    """
    settings = library.check_config(library.read_layers(layers), layers)
    if unknown := [run for run in runs if run not in settings.runs]:
        raise VlmflowError(f"--run: unknown run {unknown[0]}", f"use one of {', '.join(settings.runs)}")
    return settings, runs or list(settings.runs)


def planned_jobs(
    run: str,
    files: Iterable[Path],
    folder: Path,
    resources: types.ResourceSettings,
    storage: types.StorageSettings,
    read: Callable[[Any], Read],
    executor: tuple[Any, Any] | None = None,
) -> list[Read]:
    """Return what `read` returns of each of Snakemake's jobs that make a run from nothing; a group is one job.

    files: configuration files over config.yaml, in their order. folder: the working directory. executor: the
    plugin, with its settings, that runs the jobs; None for this machine.

    Raises VlmflowError with Snakemake's message if it refuses the workflow or its configuration.
    """
    output, config = io.StringIO(), types.ConfigSettings(configfiles=[file.absolute() for file in files])
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            with SnakemakeApi(types.OutputSettings(quiet={Quietness.ALL})) as api:
                workflow = api.workflow(resources, config, storage, snakefile=CHECKOUT / "Snakefile", workdir=folder)
                workflow.dag(types.DAGSettings(targets={f"merged/{run}"}))
                # The API's own views of a plan (`summary`, `printdag`) cut all threads to one.
                plan = workflow._workflow
                if executor is not None:
                    plan.execution_settings = types.ExecutionSettings()
                    plan._executor_plugin, plugin_settings = executor
                    plan._executor_plugin.validate_settings(plugin_settings)
                plan._prepare_dag(forceall=True, ignore_incomplete=True, lock_warn_only=True)
                plan._build_dag()
                plan.dag.update_groups()
                return [read(job) for job in plan.dag.get_jobs_or_groups()]
        except SystemExit as refusal:
            cause, _, step = str(refusal).partition("\n  what to do: ")
            raise VlmflowError(cause, step or "fix it; snakemake -n shows the same message") from None


def hub_sources(settings: Config, runs: list[str]) -> list[str]:
    """Return the addresses that some runs fetch from the hub, sorted."""
    models = [settings.models[settings.runs[run].model].source for run in runs]
    files = [address for run in runs for address in settings.datasets[settings.runs[run].dataset].all_addresses]
    return sorted({source for source in [*models, *files] if isinstance(library.parse_source(source), HubSource)})


MARKS = {"ok": ("ok", "32"), "warn": ("note", "33"), "fail": ("FAIL", "31")}
"""The word of a state, and its colour (ANSI)."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    what: the thing that was checked.
    state: ok; warn if a run works without it; fail if not.
    found: what was found, for people.
    next_step: what to do about it; empty if ok.
    """

    what: str
    state: Literal["ok", "warn", "fail"]
    found: str
    next_step: str = ""


def report(findings: Iterable[Finding], as_json_text: bool) -> int:
    """Print findings as they come, or at the end {"ready": bool, "checks": [{what, state, found, next_step}]} as JSON.

    Returns the exit code: 0 if nothing prevents a run.
    """
    colours, printed = sys.stdout.isatty() and "NO_COLOR" not in os.environ, []
    for finding in findings:
        printed.append(finding)
        if not as_json_text:
            print(as_line(finding, colours), flush=True)
    ready = all(finding.state != "fail" for finding in printed)
    if as_json_text:
        print(json.dumps({"ready": ready, "checks": [asdict(finding) for finding in printed]}, indent=1))
    else:
        print(f"\n{'ready' if ready else 'NOT ready'}")
    return 0 if ready else 1


def as_line(finding: Finding, colours: bool) -> str:
    """Format one finding for people, with its next step on a separate line. colours: use ANSI codes."""
    word, code = MARKS[finding.state]
    mark = f"\x1b[{code}m{word:<5}\x1b[0m" if colours else f"{word:<5}"
    detail = finding.found.replace("\n", "\n" + " " * 27)
    step = f"\n{'':<27}what to do: {finding.next_step}" if finding.next_step else ""
    return f"{mark} {finding.what:<20} {detail}{step}"


TRIALS: dict[str, tuple[Literal["warn", "fail"], str, str]] = {
    "write": ("fail", "cannot write", ""),
    "flock": (
        "fail",
        "cannot lock files",
        "two trainers could write one run folder: mount Lustre with -o flock, NFS without nolock; FUSE file systems "
        "without locks do not work",
    ),
    "rename": ("fail", "cannot rename a folder", "targets get their names by renaming: use a POSIX file system"),
    "symlink": ("fail", "cannot make links", "the picture store consists of links: use a POSIX file system"),
    "hard_link": ("warn", "cannot make hard links", "nothing, if the disk has room: merged weights are copied instead"),
}
"""By trial (`folder_trials`): the state if it fails, what that means, and what to do."""


def check_folder(name: str, errors: Mapping[str, str], user: int, unwritable: str) -> Finding:
    """Judge one folder.

    name: for the table. errors: by trial. user: the number of who tried. unwritable: what to do if it cannot write.
    """
    for trial, (state, words, step) in TRIALS.items():
        if trial in errors:
            return Finding(name, state, f"user {user} {words}: {errors[trial]}", step or unwritable)
    return Finding(name, "ok", f"writable as user {user}, with locks, links and renamed folders")


def last_of_form(output: str, form: type[Form]) -> Form | None:
    """Return the last line of a program's output that is JSON of this form, decoded; None if there is none."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=form)
    return None
