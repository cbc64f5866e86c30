"""Calls of Snakemake that need not import it: a process that has imported it forks for each call.

Importing Snakemake and its plugins takes as long as most dry runs, and the tests call it some hundred times. Only
Snakemake and its plugins are imported in advance: each call reads the current Snakefile and modules of the project. A
test that kills Snakemake, inspects its process, or changes Python's settings must start a process instead.
"""

import atexit
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

IMPORTED = (
    "snakemake.cli",
    "snakemake.report.html_reporter",
    "snakemake_executor_plugin_kubernetes",
    "snakemake_storage_plugin_fs",
    "snakemake_storage_plugin_s3",
    "jinja2.environment",
    "jsonschema",
    "msgspec",
    "nbformat.v4",
    "numpy",
    "packaging",
    "platformdirs",
    "pydantic",
    "smart_open",
    "yte",
)


def called(
    command: Sequence[Any], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `[sys.executable, "-m", "snakemake", …]` like `subprocess.run`, and return the result with its output.

    cwd, env: as there; by default those of this process.
    """
    python, option, module, *words = map(str, command)
    assert (python, option, module) == (sys.executable, "-m", "snakemake"), command
    with tempfile.TemporaryDirectory(prefix="vlmflow-call-") as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        call = {"words": words, "cwd": str(cwd or Path.cwd()), "environment": dict(os.environ if env is None else env)}
        server = _server()
        server.stdin.write(json.dumps(call | {"said": list(map(str, said))}) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the process that forks for each call of Snakemake has ended"
        stdout, stderr = (file.read_text(errors="replace") for file in said)
    return subprocess.CompletedProcess(list(map(str, command)), int(answer), stdout, stderr)


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    server.stdin.close()
    server.wait()


def _serve() -> list[str]:
    """Fork for each call on a line of standard input; return its words in the fork, [] at the end."""
    for name in IMPORTED:
        importlib.import_module(name)
    ours = {"harness", "vlmflow", "huggingface_hub"} & sys.modules.keys()
    assert not ours, f"each call must import these itself, with its variables: {ours}"
    gc.freeze()
    for line in sys.stdin:
        call = json.loads(line)
        child = os.fork()
        if not child:
            _become(call)
            return call["words"]
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return []


def _become(call: dict[str, Any]) -> None:
    """Turn this process into the one that a shell would start for the call."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, file in enumerate(call["said"], start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.chdir(call["cwd"])
    os.environ.clear()
    os.environ.update(call["environment"])
    tempfile.tempdir = None  # read from TMPDIR again
    sys.path[0] = call["cwd"]


if __name__ == "__main__":
    words = _serve()
    if words:
        cli = sys.modules["snakemake.cli"]
        sys.argv = [cli.__file__, *words]
        try:
            cli.main(words)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
