"""A run's weights, served on this machine alone by an OpenAI-compatible API, until Ctrl-C.

transformers serves a run that was trained on the CPU; vLLM, if this environment has it, one that was trained on GPUs.
Pictures are scaled as in the training.
"""

import shlex
import signal
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from vlmflow.core.child_programs import ANSWER_KEY, key_of
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.budget import PictureBudget
from vlmflow.serving.finished_run import FinishedRun, finished_run, link_served
from vlmflow.serving.server import Server, environment, free_port, running, serve_with_transformers, vllm_words

What = Literal["merged", "adapter", "base"]
"""Which weights of a run are served; adapter: the base with the adapter upon it."""


def main(name: str, folder: Path, port: int, gpus: int, weights: What = "merged") -> None:
    """Serve until Ctrl-C.

    name: the run. folder: the working directory. port: on the loopback address; 0: a free one. gpus: those that share
    the model; 0: as many as trained it. weights: merged, the base with the adapter upon it, or the base alone.

    Prints the key that requests need, unless VLMFLOW_ANSWER_KEY has it.

    Raises VlmflowError if the run has no weights yet, the server does not start, or vLLM is needed and not installed.
    """
    run, key = finished_run(folder, name), key_of(ANSWER_KEY)
    model = run.merged if weights == "merged" else run.base()
    adapter = run.adapter() if weights == "adapter" else None
    with tempfile.TemporaryDirectory(prefix="vlmflow-serve-") as made:
        scratch, log = Path(made), (folder / "logs" / "serve" / f"{name}.log").absolute()
        if run.device != "cpu":
            serving = _with_vllm(run, model, adapter, scratch, log, port, key, gpus or run.ranks)
        else:
            link_served(model, scratch / name, run.settings.image_max_tokens, adapter)
            at, cache, dtype = scratch / name, scratch / "cache", run.settings.dtype
            serving = serve_with_transformers(at, cache, log, dtype=dtype, port=port, key=key)
        with serving as server:
            print(f"serving {name} at {server.url} (Ctrl-C ends it); its output: {log}")
            print(f"  the model's name in requests: {server.model}")
            print(f"  the key in requests: {f'that of {ANSWER_KEY}' if key else server.key}", flush=True)
            while server.process.poll() is None:
                time.sleep(0.5)
        raise VlmflowError(f"the server ended with code {server.process.returncode}", f"read its output: {log}")


def _with_vllm(
    run: FinishedRun, model: Path, adapter: Path | None, scratch: Path, log: Path, port: int, key: str | None, gpus: int
) -> AbstractContextManager[Server]:
    """Print vLLM's command, and run it if vLLM is installed.

    vLLM takes the picture limits from the command, so that it needs no folder of ours and can be copied elsewhere.
    """
    budget = PictureBudget.of(model, run.settings.image_max_tokens)
    at, length = port or free_port(), run.settings.max_length
    words = vllm_words(model, run.name, gpus, length, budget.processor is not None, budget.limits, at, adapter)
    print(f'VLLM_API_KEY="${{VLLM_API_KEY:?choose a key}}" HF_HUB_OFFLINE=1 {shlex.join(words)}', flush=True)
    if find_spec("vllm") is None:
        raise VlmflowError(
            f"not run here: vllm is not installed in {sys.prefix}",
            "install vLLM 0.11 or later into an environment of its own on a machine with GPUs, and copy the command "
            "above there, where VLLM_API_KEY has a key of your choice",
        )
    own = [str(Path(sys.executable).with_name("vllm")), *words[1:]]
    # SIGTERM, because its workers outlive it after SIGKILL.
    return running(own, run.name, at, scratch, log, environment(scratch), at_our_death=signal.SIGTERM, key=key)
