"""Where the jobs of a call run: on this machine, or elsewhere, and by which executor.

Refuses a folder for temporary files whose path is too long for sockets in it.

Completes a stage's messages for the workflow that was called: its commands, and the names of a pod's files.

Gives each job of this machine GPUs of its own: Snakemake counts GPUs, and every program takes the first ones.

A GPU is held by a lock on a file, so also among several calls of Snakemake by one user, until the stage's process ends.
In a pod the node has already chosen them. So has Slurm: a stage in a job of its own asks for no lock. In each job the
first GPU has the number 0, so one job's locks are not another's.

The common entry of every script: its rule calls it, or a shell, with the same names.

A script has a keyword-only function `main`. Its parameters have the names of the rule's inputs, outputs and params;
`threads` is optional:

    if __name__ == "__main__":
        run_stage(main, globals().get("snakemake"))

From a shell each parameter is an option: `PYTHONPATH=scripts python -m stages.convert_rows --raw FILE …`.

Many settings are one parameter, a block: a rule passes it as a dict (`params.dataset("kind", "seed")`), a shell as
YAML (`--settings '{kind: fire, seed: 42}'`), and `main` gets it checked, as the model in the parameter's annotation.
A part of the configuration (`PartOf[DatasetSettings]`) has the keys that the rule names; others have their defaults.
"""

import argparse
import fcntl
import gc
import inspect
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, get_origin

import pydantic

from vlmflow.core.errors import (
    FAILURE,
    NOT_AGAIN,
    SAVED,
    VERDICT,
    InterruptedTrainingError,
    PassingError,
    VlmflowError,
    of_system,
    printable_lines,
)
from vlmflow.core.processes import descends_from, die_with_parent

IN_SLURM = "VLMFLOW_SLURM_ENDS"
"""The variable that only jobs of the executor for Slurm have (`remote.slurm.in_job`)."""

_named_executors: list[str] = []
"""The executor that the call names; [] for this machine."""


def note_executor(name: str) -> None:
    """Note the executor that the call names."""
    _named_executors[:] = [name]


def on_slurm() -> bool:
    """Return whether the call sends its jobs to Slurm. Its answer is known when Snakemake plans."""
    return _named_executors == ["slurm"]


def jobs_leave(workflow: Any) -> bool:
    """Return whether jobs run on other machines, or this process is such a job. It is known when Snakemake plans."""
    in_storage = workflow.storage_settings.default_storage_provider is not None
    return bool(workflow.remote_exec or in_storage or on_slurm())


TRAINING = ("train_smoke", "train_model", "trial")
"""The rules that start trainers, whose sockets are there; other stages have none."""

LONGEST = 107 - len("/torch-shm-dir-XXXXXX/manager.sock")
"""Bytes of the folder's path. A socket's may have 107 (unix(7)), and this name is the longest that is put there, of
PyTorch; that of Python's multiprocessing has 32 bytes."""


def refuse_long_temporary_folder() -> None:
    """Raise VlmflowError if the trainers' sockets would not fit in the folder for temporary files (TMPDIR)."""
    folder = tempfile.gettempdir()
    if len(folder.encode(errors="surrogateescape")) > LONGEST:
        raise VlmflowError(
            f"TMPDIR: {folder} has more than {LONGEST} bytes: trainers and other processes could make no sockets there",
            "name a folder with a shorter path, on a disk with free space: export TMPDIR=/tmp",
        )


CALL = "VLMFLOW_CALL"
"""The options that a command in a message needs to run the same workflow (--directory, --config), without its files."""

CONFIG = "VLMFLOW_CONFIG"
"""The files of its configuration (--configfile)."""

TARGETS = "VLMFLOW_TARGETS"
"""Set for a stage in a pod: the place of the targets, a folder of the volume or an address in S3."""

LOCAL = "VLMFLOW_LOCAL"
"""Set for a stage in a pod: the pod's folder below which the stage sees its targets."""

COMMAND = re.compile(
    r"vlmflow refresh-pictures FILE (?P<dataset>[\w.-]+)|\bsnakemake --forcerun (?P<rule>\w+) -- (?P<target>\S+)"
)

IN_S3 = "s3://"

WITHOUT_CONTROLLER = "snakemake --profile profiles/kubernetes-s3 --executor kubernetes"
"""With targets in S3, Snakemake runs on a laptop (docs/kubernetes.md)."""


def complete_commands(text: str) -> str:
    """Return a message with complete commands, and with targets for the files of a pod; the library knows neither."""
    if local := os.environ.get(LOCAL):
        text = text.replace(f"{local}/fs/", "/").replace(f"{local}/s3/", IN_S3)
    return COMMAND.sub(_completed, text)


def _completed(match: re.Match[str]) -> str:
    files, call, targets = (os.environ.get(name, "") for name in (CONFIG, CALL, TARGETS))
    rule, target = "resolve_images", f"data/{match['dataset']}/stats.json"
    if match["rule"]:
        rule, target = match["rule"], match["target"].removeprefix(f"{targets}/")
    also = " --also ".join(shlex.quote(file) for file in shlex.split(files))
    forced = f"{call} --forcerun {rule}".strip()
    if targets and not targets.startswith(IN_S3):
        return f"vlmflow cluster run {also or 'FILE'} {target} {forced}"
    if targets or not also:
        snakemake = WITHOUT_CONTROLLER if targets else "snakemake"
        return f"{snakemake} {f'--configfile {files} ' if files else ''}{forced} -- {target}"
    if match["dataset"]:
        return f"vlmflow refresh-pictures {also} {match['dataset']} {call}".strip()
    return f"vlmflow run {also} {target} {forced}"


VISIBLE = "CUDA_VISIBLE_DEVICES"

PAUSE = 1.0
"""Seconds between two looks for a free GPU."""

_held: list[int] = []
"""The open files of the locks: they go with the process."""


def take(count: int) -> None:
    """Choose `count` free GPUs for this process and its children, through CUDA_VISIBLE_DEVICES.

    It waits for them as long as others hold them. It holds all that this process may use if that is no more than
    `count`, and then names none.
    """
    names = gpus() if count and IN_SLURM not in os.environ else []
    if not 0 < count <= len(names):
        return  # too few are refused before the first job, or by the stage
    folder, logged = _folder(), False
    while len(taken := _locked(folder, names, count)) < count:
        if not logged:
            logging.getLogger("vlmflow").info(f"waiting for {count} of {len(names)} GPUs: others of you use them")
            logged = True
        time.sleep(PAUSE)
    if count < len(names):
        if VISIBLE not in os.environ:
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the names are the driver's numbers
        os.environ[VISIBLE] = ",".join(taken)


def gpus() -> list[str]:
    """Return the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or the driver's numbers of all."""
    if (given := os.environ.get(VISIBLE)) is not None:
        return given.split(",") if given else []
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []  # the stage itself shows what is wrong with the driver
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))]


def _locked(folder: Path, names: list[str], count: int) -> dict[str, int]:
    """Lock so many GPUs, or none; returns their files by name."""
    files: dict[str, int] = {}
    for name in names:
        file = os.open(folder / name.replace("/", "_"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files[name] = file
        except BlockingIOError:
            os.close(file)
        if len(files) == count:
            _held.extend(files.values())
            return files
    for file in files.values():
        os.close(file)
    return {}


def _folder() -> Path:
    """Return the folder of this machine's locks, which is this user's alone; TMPDIR may be on a disk that others share.

    Raises VlmflowError if another user made it.
    """
    job = f"-{number}" if (number := os.environ.get("SLURM_JOB_ID", "")).isdigit() else ""
    folder = Path(tempfile.gettempdir(), f"vlmflow-gpus-{os.getuid()}-{socket.gethostname()}{job}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise VlmflowError(f"{folder}: belongs to another user", "remove it, or set TMPDIR to a folder of your own")
    return folder


SNAKEMAKE = "VLMFLOW_SNAKEMAKE"
"""The environment variable with the process id of the Snakemake that started a stage."""

PARAMS_FOR_SNAKEMAKE = {"modules", "reads", "recorded", "revision", "state"}
"""Params that only tell Snakemake what is stale."""


def run_stage(main: Callable[..., None], job: Any = None) -> None:
    """Call `main` with the values of the rule (`job`, Snakemake's script object) or of the command line.

    Ends the process with code 1 if the stage fails, with the cause and a next step in the last lines of its log.
    """
    if job is None:
        values, log = _from_command_line(main)
    else:
        _end_with_snakemake()
        values, log = _from_rule(main, job)
    _log_to(log)
    try:
        _refuse_second_process()
        if job and job.rule in TRAINING:
            refuse_long_temporary_folder()
        take(int(job.resources.get("gpu") or 0) if job else 0)
        pydantic.validate_call(config={"arbitrary_types_allowed": True})(main)(**values)
    except VlmflowError as error:
        if isinstance(error, InterruptedTrainingError):
            _say({SAVED: error.saved})
        elif not isinstance(error, PassingError):
            _say(NOT_AGAIN)
        _fail(_named(str(error), job), log, job)
    except pydantic.ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['input']!r}: {fault['msg']}" for fault in error.errors())
        _say(NOT_AGAIN)
        _fail("\n".join(faults) + "\n  what to do: see --help for this script's arguments", log, job)
    except KeyboardInterrupt:
        _fail("interrupted", log, job)
    except Exception as error:
        logging.getLogger("vlmflow").debug(traceback.format_exc())
        outputs = ", ".join(map(str, job.output)) if job else "one of its files"
        if isinstance(error, OSError) and (known := of_system(error, outputs)):
            _fail(_named(str(known), job), log, job)
        if log is None:
            traceback.print_exc()
        where = f"the traceback is in {log}" if log else "the traceback is above"
        cause = f"{type(error).__name__}: {error}"
        _fail(f"{cause}\n  what to do: this is a bug; {where}; please report it", log, job)
    finally:
        gc.freeze()  # Python's end would look through all objects several times: half a second after torch's import


def let_stages_end_with_this_process() -> None:
    """Pass this Snakemake's process id to its stages."""
    os.environ[SNAKEMAKE] = str(os.getpid())


def _end_with_snakemake() -> None:
    """End this stage when its Snakemake is killed, so that no orphan writes beside the next run."""
    die_with_parent(os.getppid(), signal.SIGTERM)
    if SNAKEMAKE in os.environ and not descends_from(int(os.environ[SNAKEMAKE])):
        sys.exit("Snakemake ended while this stage started")


def _from_rule(main: Callable[..., None], job: Any) -> tuple[dict[str, Any], Path | None]:
    named = {**dict(job.input.items()), **dict(job.output.items()), **dict(job.params.items())}
    values = {name: _plain(value) for name, value in named.items() if name not in PARAMS_FOR_SNAKEMAKE}
    if "threads" in inspect.signature(main).parameters:
        values["threads"] = job.threads
    return values, Path(job.log[0]) if job.log else None


def _plain(value: Any) -> Any:
    """Convert Snakemake's lists and annotated strings to plain ones."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _named(text: str, job: Any) -> str:
    """Insert the rule's data set, run and model into the keys of a message: the library does not know their names."""
    names = dict(job.wildcards.items()) if job else {}
    inputs = {key: file for key, file in job.input.items() if isinstance(file, str)} if job else {}
    if "search" in names and "rows" in inputs:
        names["run"] = Path(inputs["rows"]).name  # a search's stages read fitted/RUN
    if folder := inputs.get("model") or inputs.get("model_files"):
        names.setdefault("model", Path(folder).name)
    if "run" in names and "stats" in inputs:
        names.setdefault("dataset", Path(inputs["stats"]).parent.name)  # data/DATASET/stats.json
    for block, wildcard in (("datasets", "dataset"), ("runs", "run"), ("models", "model")):
        if wildcard in names:
            text = text.replace(f"{block}.NAME", f"{block}.{names[wildcard]}")
    return complete_commands(text)


def _from_command_line(main: Callable[..., None]) -> tuple[dict[str, Any], Path | None]:
    module = sys.modules[main.__module__].__doc__ or ""
    parser = argparse.ArgumentParser(
        description=f"{module.strip()}\n\n{inspect.getdoc(main)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--log", type=Path, help="write a log to this file")
    for name, parameter in inspect.signature(main).parameters.items():
        required = parameter.default is inspect.Parameter.empty
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_reader(parameter.annotation),
            required=required,
            default=None if required else parameter.default,
            metavar=getattr(parameter.annotation, "__name__", "value").upper(),
            help=_keys_of(parameter.annotation),
        )
    values = vars(parser.parse_args())
    return values, values.pop("log")


def _keys_of(annotation: Any) -> str | None:
    """Return help for a block of settings: its keys."""
    if get_origin(annotation) is Annotated:
        return "a YAML block: the keys that the stage's rule names (rules/); docs/config.md has them"
    if not (isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)):
        return None
    return f"a YAML block: {{{', '.join(f'{key}: …' for key in annotation.model_fields)}}}"


def _reader(annotation: Any) -> Callable[[str], Any]:
    """Return the parser of an option: paths and texts stay, others are YAML; a list may be a single value."""
    if annotation in (str, Path):
        return str
    import yaml  # rules do not need it

    if get_origin(annotation) is not list:
        read_yaml: Callable[[str], Any] = yaml.safe_load
        return read_yaml

    def read_list(text: str) -> Any:
        value = yaml.safe_load(text)
        return value if isinstance(value, list) else [value]

    return read_list


def _log_to(log: Path | None) -> None:
    """Send the library's messages to the console, and more detailed ones to the log."""
    logger = logging.getLogger("vlmflow")
    logger.setLevel(logging.DEBUG)
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.INFO)
    logger.addHandler(console)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(log, mode="w", encoding="utf-8", errors="backslashreplace")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(file)


def _say(verdict: dict[str, bool]) -> None:
    if VERDICT in os.environ:
        with suppress(OSError):  # it only saves attempts
            Path(os.environ[VERDICT]).write_text(json.dumps(verdict))


def _refuse_second_process() -> None:
    """Refuse to be the second process of one job of Slurm: both would make the same files."""
    if int(os.environ.get("SLURM_PROCID") or 0) > 0:
        raise VlmflowError(
            f"this is process {os.environ['SLURM_PROCID']} of job {os.environ.get('SLURM_JOB_ID')}: Slurm has started "
            "this stage more than once",
            "give the job one task: srun --ntasks=1",
        )


def _fail(text: str, log: Path | None, job: Any) -> None:
    """End with code 1 and the cause in the log.

    Snakemake prints the causes of its stages at its end (harness.screen). Others are printed here: of a script that
    was called alone, of a stage in a pod, and of one whose log could not be written (full disk).
    """
    kept, text = False, printable_lines(text)
    if log is not None:
        with suppress(OSError), log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{FAILURE}{text}\n")
            file.flush()
            kept = True
    if job is None or not kept or VERDICT in os.environ:
        print(f"{FAILURE}{text}", file=sys.stderr, flush=True)
    sys.exit(1)
