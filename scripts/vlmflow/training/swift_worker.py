"""One trainer process: ms-swift's `sft` with a callback of ours. Started by torchrun, once per process.

    torchrun … -m vlmflow.training.swift_worker PROGRESS_FILE PROCESSES [swift arguments]

The callback refuses a training that is not really distributed (at its begin by the world size, before every
checkpoint by the adapters that the ranks hold), saves and ends on SIGTERM, and writes what happens as JSON
lines to PROGRESS_FILE (rank 0):
    {"event": "begin", "step", "target", "tokens", "world_size", "parallel_mode", "device"}
    {"event": "log", "time", "step", "target", "tokens", "loss" | "eval_loss", "learning_rate", "grad_norm"}
    {"event": "end", "step", "peak_memory": bytes per rank}
time: seconds since the training began. tokens: those trained on since step 0, padding not counted.
"""

import hashlib
import json
import logging
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from vlmflow.process import die_with_parent
from vlmflow.training.no_remote_code import refuse_remote_code

KEPT = ("loss", "eval_loss", "learning_rate", "grad_norm", "epoch")


def main() -> None:
    """Train with the arguments of the command line."""
    die_with_parent(os.getppid())
    progress, processes, *arguments = sys.argv[1:]
    refuse_remote_code()
    register_callback(Path(progress), int(processes))
    import torch.distributed as dist
    from swift import sft_main

    sft_main(arguments)
    if dist.is_initialized():
        with suppress(RuntimeError):  # a rank that failed says so by its own exit code
            dist.barrier()  # one that leaves while another still draws its curves takes that one's connections away
        # All is written. Past here Python would take gloo's threads down in any order, and now and then one aborts.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def register_callback(progress: Path, processes: int) -> None:
    """Put our callback among ms-swift's, by the name that `train_job` passes."""
    import torch
    import torch.distributed as dist
    from swift.callbacks import callbacks_map
    from swift.callbacks.base import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self, args: Any, trainer: Any) -> None:
            super().__init__(args, trainer)
            args.include_num_input_tokens_seen = "non_padding"
            self.stop = False
            signal.signal(signal.SIGTERM, self._on_sigterm)

        def _on_sigterm(self, number: int, frame: Any) -> None:
            self.stop = True

        def _write(self, event: str, **values: Any) -> None:
            if self.args.process_index == 0:
                with progress.open("a") as file:
                    file.write(json.dumps({"event": event, **values}) + "\n")

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            mode = args.parallel_mode.name
            if args.world_size != processes or (processes > 1 and mode != "DISTRIBUTED"):
                raise RuntimeError(f"not really distributed: world size {args.world_size} of {processes}, mode {mode}")
            self.begun = time.monotonic()
            self._write(
                "begin",
                step=state.global_step,
                target=state.max_steps,
                tokens=int(state.num_input_tokens_seen),
                world_size=args.world_size,
                parallel_mode=mode,
                device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            )

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if any(_gather(self.stop)):
                control.should_save = True
                control.should_training_stop = True
            if control.should_save and not args.deepspeed:  # sharded weights lie on no rank whole
                _refuse_different_adapters(kwargs["model"])

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            values = {key: logs[key] for key in KEPT if key in logs}
            self._write(
                "log",
                time=time.monotonic() - self.begun,
                step=state.global_step,
                target=state.max_steps,
                tokens=int(state.num_input_tokens_seen),
                **values,
            )

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._write("end", step=state.global_step, peak_memory=_gather(_peak_memory()))

    def _gather(value: Any) -> list[Any]:
        if not dist.is_initialized():
            return [value]
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def _refuse_different_adapters(model: Any) -> None:
        digests = set(_gather(_adapter_digest(model)))
        if len(digests) > 1:
            raise RuntimeError(f"not really distributed: {len(digests)} different adapters at one step")

    def _peak_memory() -> int:
        if torch.cuda.is_available():
            return torch.cuda.max_memory_reserved()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _adapter_digest(model: Any) -> str:
        digest = hashlib.sha256()
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                digest.update(name.encode())
                digest.update(weight.detach().contiguous().cpu().view(torch.uint8).numpy())
        return digest.hexdigest()

    callbacks_map["vlmflow"] = Watch


if __name__ == "__main__":
    main()
