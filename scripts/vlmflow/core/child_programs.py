"""The programs that stages start: which of this process's variables they get, and how one of them is asked.

A program gets an allow-list of variables. The libraries of a training read hundreds of them. Some change what is
trained (SPATIAL_MERGE_SIZE, MAX_PIXELS), and no digest covers them; others are left over from another program (RANK,
MASTER_ADDR). Keys of servers are among them: no message may repeat one.

A program may have an environment of its own, for packages that must not be resolved together with those that train.
`vlmflow env NAME` installs `envs/NAME.lock` into the user's cache, `make env-NAME` into a clone's `.venv-NAME`; the
image of that name has it elsewhere, and says where (`VLMFLOW_VENV_NAME`). `ask` starts such a program with a JSON value
as its input, and gets its answer (`answer_with`).
There, only the standard library is installed besides its packages: so nothing else is imported here.
"""

import base64
import html
import json
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import quote, unquote

from vlmflow import CHECKOUT
from vlmflow.core.errors import PassingError, VlmflowError, printable
from vlmflow.core.files import sha256_of, user_cache
from vlmflow.core.processes import bound_to_this_process, import_path

MLFLOW_KEYS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
OTLP_KEYS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
ANSWER_KEY = "VLMFLOW_ANSWER_KEY"

SECRETS = (
    *("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", *OTLP_KEYS, ANSWER_KEY),
    *("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)
"""The variables whose values no message may contain."""

ENCODED = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
"""They travel in base64, so that any letter may be in them."""

ENTRY = re.compile(r"[ \t]*[!#-'*+\-.0-9A-Z^-z|~]+[ \t]*=[ \t]*[ !#-+\--:<-\[\]-~]+")
"""An entry of headers as OpenTelemetry takes it (opentelemetry/util/re.py); it drops any other with a warning."""

SHORTEST = 8
"""Characters of a header's value that may be a key: shorter ones are numbers, and occur in any text."""

NAMED = "VLMFLOW_ENVIRONMENT"
"""The variable with the names of the configuration's key `environment`."""

THREADS_OF_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

KEPT = (
    # Who this is, where programs, libraries and free space are, and how texts are shown.
    *("HOME", "USER", "LOGNAME", "PATH", "LD_LIBRARY_PATH", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME"),
    *("LANG", "LC_*", "PYTHONUTF8", "TZ"),
    # Which GPUs there are, and how they reach each other.
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_*"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NCCL_*", "TORCH_NCCL_*", "GLOO_*", "UCX_*"),
    *("FI_*", "OFI_*", "RDMAV_*", "MLX5_*", "OMPI_MCA_*"),
    # Compilers of kernels, and where these are kept.
    *("CC", "CXX", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "DS_SKIP_CUDA_CHECK"),
    *("TRITON_LIBCUDA_PATH", "TRITON_PTXAS_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH"),
    *("TORCH_CUDA_ARCH_LIST", "MAX_JOBS"),
    *("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    # Memory and cores.
    *("MALLOC_*", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_WAIT_POLICY", *THREADS_OF_LIBRARIES),
    "VLMFLOW_*",
)
"""The variables that every program gets: names, or beginnings of names before a `*`."""

ATTEMPT, NODE_0 = "VLMFLOW_ATTEMPT", "VLMFLOW_NODE_0"
"""The variables with the attempt's name, and with the host name of node 0. Without them all nodes are this machine."""

OTHER_NODE = "vlmflow.supervisor.other_node"
"""The module that runs on every node but node 0."""

PORT = 29500
"""Where the nodes of a cluster meet: torchrun's own default."""

PORT_OF = "VLMFLOW_PORT"
"""The variable with another port, where nodes may be shared with other trainings."""


def child_environment(*also: str) -> dict[str, str]:
    """Return the environment of a program: this process's variables of KEPT, of the configuration, and those of `also`.

    A key of a server passes only by its own name. Python imports nothing from the working directory, where other pods
    may write.
    """
    patterns = (*KEPT, *os.environ.get(NAMED, "").split(), *also)
    return {
        name: value
        for name, value in os.environ.items()
        if name in patterns or (name not in SECRETS and any(fnmatchcase(name, pattern) for pattern in patterns))
    } | {"PYTHONSAFEPATH": "1"}


def key_of(name: str) -> str | None:
    """Return the value of a variable without white space at its ends (a Secret made with `echo` has a line break).

    Returns None if it is not set or empty. Raises VlmflowError, without the value, if no header can carry it: an HTTP
    library would quote it.
    """
    value = os.environ.get(name, "").strip()
    if not _fits(value, any_letter=name in ENCODED):
        raise VlmflowError(
            f"{name}: its value has a line break, another control character, or a letter that is not ASCII",
            "set it again, on one line, as the server's owner gave it to you",
        )
    if name in OTLP_KEYS:
        entries = [entry for entry in value.split(",") if entry.strip()]
        for number, entry in enumerate(entries, 1):
            if not ENTRY.fullmatch(entry.strip()) or not _fits(unquote(entry).strip()):
                raise VlmflowError(
                    f"{name}: its entry {number} of {len(entries)} is not NAME=VALUE in printable ASCII characters",
                    "write NAME=VALUE, with commas between entries, and %2C, %3B, %22 and %5C for comma, semicolon, "
                    "quotation mark and backslash in a value",
                )
    return value or None


def keys_of(names: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of a program, each as `key_of` gives it, "" if it is not set; raises as that does."""
    return {name: key_of(name) or "" for name in names}


def without_keys(text: str) -> str:
    """Return a text with *** in the place of every key that this process knows."""
    forms = {form for secret in _secrets() for form in _forms(secret)}
    for form in sorted(forms, key=len, reverse=True):  # one may contain another
        text = text.replace(form, "***")
    return text


def _fits(value: str, any_letter: bool = False) -> bool:
    return value.isprintable() and (any_letter or value.isascii())


def _forms(secret: str) -> tuple[str, ...]:
    """Return a key as a message may have it: a library quotes it, a server repeats it in JSON, a page or an address."""
    in_address = (quote(secret, safe=safe, errors="replace") for safe in ("/", ""))
    return secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], html.escape(secret), *in_address


def _secrets() -> Iterator[str]:
    for name in SECRETS:
        if value := os.environ.get(name, "").strip():
            yield value
            for entry in value.split(",") if name in OTLP_KEYS else ():
                sent = entry.partition("=")[2].strip()
                # A scheme such as Basic stands before the key.
                forms = (sent, unquote(sent), *unquote(sent).split(" ")[-1:])
                yield from (form for form in forms if len(form) >= SHORTEST)
    user, password = (os.environ.get(name, "").strip() for name in ENCODED)
    if user and password:
        yield base64.b64encode(f"{user}:{password}".encode(errors="replace")).decode()


SAID_WHY = 3
"""The exit code of a program whose answer is a failure: {"cause": …, "next_step": …, "passing": …}."""


def answer_with(main: Callable[[Any], Any]) -> None:
    """Call `main` with the value on the standard input, and write what it returns to the standard output.

    A VlmflowError of `main` becomes the answer, and `ask` raises it again. Whatever else the process prints, also a
    library below Python, goes to the standard error, where people see it.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        try:
            json.dump(main(json.load(sys.stdin)), answer)
        except VlmflowError as error:
            passing = isinstance(error, PassingError)
            json.dump({"cause": error.cause, "next_step": error.next_step, "passing": passing}, answer)
            sys.exit(SAID_WHY)


EnvironmentName = Literal["track", "search"]


def python_of(name: EnvironmentName) -> Path:
    """Return the interpreter of an environment.

    Raises VlmflowError with the command that installs it if it is missing.
    """
    own, installed = CHECKOUT / f".venv-{name}", installed_environment(name)
    folder = Path(os.environ.get(f"VLMFLOW_VENV_{name.upper()}") or (own if own.is_dir() else installed))
    python = folder / "bin" / "python"
    if not python.is_file():
        raise VlmflowError(f"{folder}: the environment `{name}` is not installed", f"vlmflow env {name}")
    return python


def installed_environment(name: EnvironmentName) -> Path:
    """Return the folder of an environment in this user's cache: another lock gives another one."""
    lock = CHECKOUT / "envs" / f"{name}.lock"
    return user_cache() / "environments" / f"{name}-{sha256_of(lock)[:16]}"


def ask(
    name: EnvironmentName,
    module: str,
    question: Any,
    env: dict[str, str] | None = None,
    also: Sequence[str] = (),
    limit: float | None = None,
) -> Any:
    """Run a module in an environment with a JSON value as its input, and return its answer.

    env: variables that it gets besides those of every program; also: names of this process's own that it gets, too
    (`child_environment`). What it writes to its standard error passes through, without keys. It ends with this process.
    limit: seconds after which it is killed.
    Raises VlmflowError if the environment is missing, or if the program fails: the error that it raised, or else its
    last line as the cause. Raises PassingError if a signal ended it, or the limit.
    """
    python = python_of(name)
    log_tail: deque[str] = deque(maxlen=20)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as messages:
        relay = threading.Thread(target=_relay, args=(messages, log_tail))
        relay.start()
        try:
            with os.fdopen(writing, "wb") as its_messages:
                done = subprocess.run(
                    [str(python), "-m", module],
                    input=json.dumps(question).encode(),
                    stdout=subprocess.PIPE,
                    stderr=its_messages,
                    env=child_environment(*also) | {"PYTHONPATH": import_path()} | (env or {}),
                    preexec_fn=bound_to_this_process(),
                    timeout=limit,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            done = None
        relay.join()
    output = "\n".join(log_tail) or "nothing"
    if done is None:
        raise PassingError(
            f"{module}: it did not end within {limit:g} seconds, so it was killed",
            f"see that the server it talks to answers; it said:\n{output}",
        )
    code, answer = done.returncode, done.stdout
    if code == SAID_WHY and answer:
        error = json.loads(answer)
        raise (PassingError if error["passing"] else VlmflowError)(_shown(error["cause"]), _shown(error["next_step"]))
    if code:
        cause = f"signal {-code} ended it" if code < 0 else log_tail[-1] if log_tail else f"it ended with code {code}"
        raise (PassingError if code < 0 else VlmflowError)(f"{module}: {cause}", f"see what it said:\n{output}")
    return json.loads(answer)


def _relay(source: IO[bytes], last: deque[str]) -> None:
    """Show a program's messages as they come, and keep the last ones."""
    for line in source:
        for part in line.decode(errors="replace").splitlines():
            last.append(_shown(part.rstrip().expandtabs()))
            print(last[-1], file=sys.stderr, flush=True)


def _shown(text: str) -> str:
    """Return a text of a program for terminals and logs: it may repeat what a server said, or quote a key."""
    return printable(without_keys(text))
