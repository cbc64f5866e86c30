"""One entry for every script: called by its rule, or alone from a shell, with the same names.

A script has a keyword-only function `main`; its parameters are the names of the rule's inputs, outputs
and params, and `threads` where it asks for it:

    if __name__ == "__main__":
        run_stage(main, globals().get("snakemake"))

From a shell each parameter is an option: `python scripts/convert_fire.py --raw FILE --form trajectory …`.

What belongs together is one parameter, a block of settings: a rule hands it over as a dict (`params.dataset("kind",
"seed")`), a shell as YAML (`--settings '{kind: fire, seed: 42}'`), and `main` gets it as the model that the parameter
is annotated with, checked.
"""

import argparse
import errno
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

from harness.messages import whole_commands
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.process import descends_from, die_with_parent

FAILURE = "the stage failed: "
"""Begins the last lines of a log whose stage failed; they are shown again at the very end."""

SNAKEMAKE = "VLMFLOW_SNAKEMAKE"
"""The environment variable with the process id of the Snakemake that started a stage."""

VERDICT = "VLMFLOW_VERDICT"
"""The environment variable with the file that a pod's stage writes NOT_AGAIN into: the container's termination message,
which the API server shows in the pod's status. Snakemake, which runs the stage, hands on nothing but exit code 1."""

NOT_AGAIN = {"again": False}
"""The verdict of a stage whose failure would come again: a closed gate, a refused row or setting."""

PARAMS_FOR_SNAKEMAKE = {"modules", "reads", "revision", "state"}
"""Params that only tell Snakemake what is stale."""


def run_stage(main: Callable[..., None], job: Any = None) -> None:
    """Call `main` with what the rule (`job`, Snakemake's script object) or the command line gives.

    Ends the process with code 1 when the stage fails, with the cause and a next step in the last lines of its log.
    """
    if job is None:
        values, log = _from_command_line(main)
    else:
        _end_with_snakemake()
        values, log = _from_rule(main, job)
    _log_to(log)
    try:
        pydantic.validate_call(config={"arbitrary_types_allowed": True})(main)(**values)
    except VlmflowError as error:
        if not isinstance(error, PassingError):
            _say_not_again()
        _fail(_named(str(error), job), log, job)
    except pydantic.ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['input']!r}: {fault['msg']}" for fault in error.errors())
        _say_not_again()
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


def let_stages_end_with_this_process() -> None:
    """Tell the stages that this Snakemake starts whose they are."""
    os.environ[SNAKEMAKE] = str(os.getpid())


def _end_with_snakemake() -> None:
    """A Snakemake that is killed takes its stages with it: no orphan writes beside the next run."""
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
    """Make Snakemake's lists and annotated strings what they look like."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _named(text: str, job: Any) -> str:
    """Put the names that a rule works for into the keys of a message: the library does not know them."""
    names = dict(job.wildcards.items()) if job else {}
    for block, wildcard in (("datasets", "dataset"), ("runs", "run")):
        if wildcard in names:
            text = text.replace(f"{block}.NAME", f"{block}.{names[wildcard]}")
    return whole_commands(text)


def _from_command_line(main: Callable[..., None]) -> tuple[dict[str, Any], Path | None]:
    module = sys.modules[main.__module__].__doc__ or ""
    parser = argparse.ArgumentParser(
        description=f"{module.strip()}\n\n{inspect.getdoc(main)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--log", type=Path, help="a file for the log")
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
    """Say what a block of settings holds."""
    if not (isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)):
        return None
    return f"a YAML block: {{{', '.join(f'{key}: …' for key in annotation.model_fields)}}}"


def _reader(annotation: Any) -> Callable[[str], Any]:
    """Give what reads an option: paths and texts as they are, all else as YAML; one value alone is a list of one."""
    if annotation in (str, Path):
        return str
    import yaml  # a rule needs none

    if get_origin(annotation) is not list:
        read_yaml: Callable[[str], Any] = yaml.safe_load
        return read_yaml

    def read_list(text: str) -> Any:
        value = yaml.safe_load(text)
        return value if isinstance(value, list) else [value]

    return read_list


def _log_to(log: Path | None) -> None:
    """Send the library's messages to the console, and with more detail to the log."""
    logger = logging.getLogger("vlmflow")
    logger.setLevel(logging.DEBUG)
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.INFO)
    logger.addHandler(console)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(log, mode="w", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(file)


def _say_not_again() -> None:
    if VERDICT in os.environ:
        with suppress(OSError):  # it spares attempts, and decides nothing else
            Path(os.environ[VERDICT]).write_text(json.dumps(NOT_AGAIN))


def _fail(text: str, log: Path | None, job: Any) -> None:
    """End with code 1 and the cause in the log.

    Snakemake prints the causes of its stages at its end (harness.failures). All others are printed here: those of a
    script that was called alone, of a pod, and one that the log did not take, since the disk was full.
    """
    kept = False
    if log is not None:
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(f"{FAILURE}{text}\n")
            file.flush()
            kept = True
    if job is None or not kept or VERDICT in os.environ:
        print(f"{FAILURE}{text}", file=sys.stderr, flush=True)
    sys.exit(1)
