"""The common entry of every script: its rule calls it, or a shell, with the same names.

A script has a keyword-only function `main`. Its parameters have the names of the rule's inputs, outputs and params;
`threads` is optional:

    if __name__ == "__main__":
        run_stage(main, globals().get("snakemake"))

From a shell each parameter is an option: `PYTHONPATH=scripts python -m stages.convert_rows --raw FILE …`.

Many settings are one parameter, a block: a rule passes it as a dict (`params.dataset("kind", "seed")`), a shell as
YAML (`--settings '{kind: fire, seed: 42}'`), and `main` gets it checked, as the model in the parameter's annotation.
"""

import argparse
import errno
import gc
import inspect
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_origin

import pydantic

from vlmflow.core.errors import InterruptedTrainingError, PassingError, VlmflowError
from vlmflow.core.printable import printable_lines
from vlmflow.core.process import descends_from, die_with_parent
from vlmflow.core.stage_end import FAILURE, NOT_AGAIN, SAVED, VERDICT
from vlmflow.harness import gpu_share
from vlmflow.harness.messages import complete_commands
from vlmflow.harness.temporary_folder import TRAINING, refuse_long_temporary_folder

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
        gpu_share.take(int(job.resources.get("gpu") or 0) if job else 0)
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
        if getattr(error, "errno", None) == errno.ENOSPC:
            _fail(f"{error}\n  what to do: free disk space there, then run the same command again", log, job)
        logging.getLogger("vlmflow").debug(traceback.format_exc())
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

    Snakemake prints the causes of its stages at its end (harness.failures). Others are printed here: of a script that
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
