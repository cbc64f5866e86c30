"""Runs a server of a model folder: starts it, waits until it answers, and ends all of its processes.

Makes vLLM's command line; vLLM is not in the locked environment, and this project has not run it.

Names and limits are those of vLLM 0.11 to 0.27 (docs.vllm.ai; vllm/config/lora.py, vllm/lora/peft_helper.py).
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from safetensors import SafetensorError, safe_open

from vlmflow.config.model_types import ModelType, kinds_of
from vlmflow.config.settings import RowLimits
from vlmflow.config.strategies import ADAPTER_WEIGHTS
from vlmflow.core.child_programs import ANSWER_KEY, THREADS_OF_LIBRARIES, child_environment
from vlmflow.core.errors import PassingError, VlmflowError, printable_lines
from vlmflow.core.patience import Waiting
from vlmflow.core.processes import bound_to_this_process, import_path
from vlmflow.core.progress import LOG_INTERVAL, clock
from vlmflow.merging.trained import read_adapter_config
from vlmflow.pictures.budget import ScaleLimits
from vlmflow.serving import guarded

LOOPBACK = "127.0.0.1"

START_SECONDS = 1800.0
"""How long a server may take to load: 66 GB from a slow network volume."""

GRACE = 10.0
"""Seconds for a server to end, between SIGTERM and SIGKILL."""

PORT_TAKEN = "address already in use"

KEYS = (ANSWER_KEY, "VLLM_API_KEY")
"""The variables in which servers, ours and vLLM, find the key that they ask for: any user sees a process's words."""


@dataclass(frozen=True)
class Server:
    """A server that answers.

    url: of its OpenAI-compatible API, with /v1. model: the name that requests must give. process: its first process,
    whose process group is the server's. log: its output. key: what requests must have as their bearer token.
    """

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path
    key: str = field(repr=False)


@contextmanager
def serve_with_transformers(
    folder: Path,
    scratch: Path,
    log: Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    threads: int | None = None,
    port: int = 0,
    key: str | None = None,
) -> Iterator[Server]:
    """Serve the folder of a model (`served_folder`) on the loopback address as long as the block runs (`guarded`).

    Requests name the model by the folder's name. scratch: an empty folder for its caches. log: the file for its output.
    device: cpu, or auto for the GPUs. dtype: the type in which it computes; auto is that of the weights. threads: cores
    that it may use; None for all. port: 0 for a free one. key: as for `running`.

    The thread that calls this must live as long as the block: the server ends with it, however it ends.
    Raises VlmflowError with the end of its output if it ends before it answers, PassingError if it takes too long.
    """
    model, parent = folder.name, folder.absolute().parent
    if "@" in model:
        raise VlmflowError(f"{model}: transformers takes what follows '@' for a revision", "use a name without '@'")
    how = ["--device", device, "--dtype", dtype, "--host", LOOPBACK]
    env = environment(scratch, threads) | {"PYTHONPATH": import_path()}
    for last in (False, False, True):
        at = port or free_port()
        words = [sys.executable, str(guarded.__file__), model, *how, "--port", str(at)]
        try:
            with running(words, model, at, parent, log, env, key=key) as server:
                yield server
                return
        except PortTakenError:  # somebody took the port between our look and the server's
            if port or last:
                raise


@contextmanager
def running(
    words: Sequence[str],
    model: str,
    port: int,
    folder: Path,
    log: Path,
    env: Mapping[str, str],
    limit: float = START_SECONDS,
    at_our_death: int = signal.SIGKILL,
    key: str | None = None,
) -> Iterator[Server]:
    """Run a server's command until the block ends; yields once it answers GET /health.

    words: the command. model: the name that its requests must give. port: where it listens on the loopback address.
    folder: its working directory. at_our_death: the signal that its first process gets if this process dies; one
    whose children would outlive it needs SIGTERM. key: what its requests must have, for a server that asks for one;
    None for one made at random.
    """
    key = key or secrets.token_urlsafe(24)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**env, **dict.fromkeys(KEYS, key)},
            start_new_session=True,  # a process group of its own, which Ctrl-C does not reach
            preexec_fn=bound_to_this_process(at_our_death),
        )
    try:
        _wait_until_healthy(process, port, limit, log, model)
        yield Server(f"http://{LOOPBACK}:{port}/v1", model, process, log, key)
    finally:
        end_group(process)


class PortTakenError(PassingError):
    """Another process listens on the server's port."""


def environment(scratch: Path, threads: int | None = None) -> dict[str, str]:
    """Return a server's environment: offline, with caches in `scratch`, and without anybody's token."""
    ours = {
        "HF_HOME": str(scratch.absolute()),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return child_environment() | ours | (dict.fromkeys(THREADS_OF_LIBRARIES, str(threads)) if threads else {})


def free_port() -> int:
    """Return a port of the loopback address on which nobody listens now."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all others of its process group: SIGTERM, and SIGKILL for those that remain."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, limit: float, log: Path, model: str) -> None:
    begun, shown = Waiting(), time.monotonic()
    while not _is_healthy(process, port):
        now = time.monotonic()
        if process.poll() is not None:
            end = end_of(log)
            if PORT_TAKEN in end.lower():
                raise PortTakenError(f"port {port} is in use", "choose another --port, or none for a free one")
            raise VlmflowError(
                f"the server of {model} ended with code {process.returncode} before it answered",
                f"read the end of its output, {log}:\n{end}",
            )
        if (waited := begun.seconds()) > limit:
            raise PassingError(
                f"the server of {model} does not answer after {clock(limit)}",
                f"see whether it still loads; its output is {log}:\n{end_of(log)}",
            )
        if now - shown >= LOG_INTERVAL:
            shown = now
            print(f"starting the server of {model}: {clock(waited)}", file=sys.stderr, flush=True)
        time.sleep(0.1)


def _is_healthy(process: subprocess.Popen[bytes], port: int) -> bool:
    """Return whether it is this server that listens on the port, and it answers."""
    if not _listens(process.pid, port):
        return False
    address = f"http://{LOOPBACK}:{port}/health"
    # A proxy of the environment is not for this machine.
    with suppress(httpx.HTTPError), httpx.stream("GET", address, timeout=5, trust_env=False) as answer:
        return answer.status_code == 200
    return False


def _listens(pid: int, port: int) -> bool:
    with suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in [first, *first.children(recursive=True)]:
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
                    return True
    return False


def end_of(log: Path, characters: int = 2000) -> str:
    """Return the last characters of a server's output, without what could steer a terminal."""
    return printable_lines(log.read_text(errors="replace")[-characters:])


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that --max-lora-rank takes."""

NO_DOMAIN = "none.invalid"
"""A name that no host has (RFC 2606): vLLM fetches pictures from any host unless its list of domains has an entry."""

MERGE = "serve the merged weights: vlmflow serve without --what adapter"


def vllm_words(
    model: Path,
    name: str,
    gpus: int,
    max_length: int,
    sees: bool,
    limits: ScaleLimits | None,
    port: int,
    adapter: Path | None = None,
) -> list[str]:
    """Return the command that serves a model on GPUs with vLLM, on the loopback address, with pictures as data only.

    Its key is in VLLM_API_KEY: as an argument (--api-key) every user of the machine would see it.

    model: the folder of the model, or of the adapter's base. name: what requests ask for. gpus: how many share the
    model. max_length: tokens of prompt and answer together. sees: whether it takes pictures. limits: of pictures; None
    if no rule of the model has such. adapter: the folder of an adapter; requests for `name` then get base + adapter,
    those for `base` the base alone.

    Raises VlmflowError if vLLM would refuse the adapter, or serve only a part of it.
    """
    words = ["vllm", "serve", str(model), "--host", LOOPBACK, "--port", str(port)]
    words += ["--tensor-parallel-size", str(gpus), "--max-model-len", str(max_length)]
    words += ["--served-model-name", "base" if adapter else name]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]  # else it refuses requests with tools
    # Older versions let each web page ask, and /invocations needs no key.
    words += ["--allowed-origins", "[]"]
    if sees:
        # Without "video": 0 it reserves memory for a whole video at its start.
        words += ["--limit-mm-per-prompt", json.dumps({"image": RowLimits().max_pictures, "video": 0})]
        words += ["--allowed-media-domains", NO_DOMAIN]
    if limits:
        words += ["--mm-processor-kwargs", json.dumps(limits.by_key())]
    if adapter:
        rank = str(_rank_of(adapter, model))
        words += ["--enable-lora", "--lora-modules", f"{name}={adapter}", "--max-lora-rank", rank]
    return words


def _rank_of(folder: Path, model: Path) -> int:
    """Return vLLM's smallest limit that an adapter's ranks are within, after a check that vLLM serves all of it.

    folder: the adapter's. model: its base's.
    """
    config = read_adapter_config(folder)
    if config.use_dora:
        raise VlmflowError(f"{folder}: vLLM does not serve DoRA (use_dora)", MERGE)
    if config.modules_to_save:
        saved = ", ".join(config.modules_to_save)
        raise VlmflowError(f"{folder}: vLLM does not serve layers that an adapter replaces ({saved})", MERGE)
    if config.bias != "none":
        raise VlmflowError(f"{folder}: vLLM does not serve an adapter's biases (bias: {config.bias})", MERGE)
    file = folder / ADAPTER_WEIGHTS
    try:
        with safe_open(file, framework="numpy") as tensors:
            names = sorted(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise VlmflowError(f"{file}: {error}", "train the run again, or restore the file") from None
    if of_tower := [name for name in names if _sees(name, kinds_of(model))]:
        raise VlmflowError(
            f"{file}: changes {len(of_tower)} tensors of the vision tower, such as {of_tower[0]}; vLLM leaves these "
            "out with only a warning, so it would answer as another model",
            MERGE,
        )
    rank = max([config.r, *config.rank_pattern.values()])
    if rank > RANKS[-1]:
        raise VlmflowError(f"{folder}: rank {rank} is above vLLM's largest, {RANKS[-1]}", MERGE)
    return next(limit for limit in RANKS if limit >= rank)


def _sees(tensor: str, kinds: list[ModelType]) -> bool:
    """Return whether an adapter's tensor belongs to a part before the language model."""
    name = tensor.removeprefix("base_model.model.")  # peft's
    return any(kind.part_of(name) != "language_model" for kind in kinds)
