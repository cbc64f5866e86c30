"""One trainer process: ms-swift's `sft` with our callback. torchrun starts it once per process.

    torchrun … -m vlmflow.training.trainer PROGRESS_FILE PROCESSES EARLY_STOP_AFTER STRATEGY [swift arguments]

The callback
- refuses a training that is not really distributed: it compares the world size at the start, and the ranks' adapters
  before every checkpoint, if each rank has a complete one with STRATEGY;
- ends it after EARLY_STOP_AFTER evaluations without a lower loss (0: never);
- saves and ends on SIGTERM, also during an evaluation; a resumed training repeats that evaluation before its next step;
- writes lines of `events` to PROGRESS_FILE (rank 0).
"""

import dataclasses
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

from vlmflow.config.strategies import Strategy, strategy_of
from vlmflow.core.files import whole_file
from vlmflow.core.process import die_with_parent
from vlmflow.swift.no_remote_code import refuse_remote_code
from vlmflow.swift.quick_imports import quick_imports
from vlmflow.training.checkpoint import STATE, evaluated, stalled
from vlmflow.training.events import Begin, End, Event, Log, as_line

KEPT = ("loss", "eval_loss", "learning_rate", "grad_norm", "epoch")


def main() -> None:
    """Train with the arguments of the command line."""
    die_with_parent(os.getppid())
    progress, processes, early_stop_after, strategy, *arguments = sys.argv[1:]
    with quick_imports():
        refuse_remote_code()
        register_callback(Path(progress), int(processes), int(early_stop_after) or None, strategy_of(strategy))
        import torch.distributed as dist
        from swift import sft_main

    with suppress(EndsAtOnce):
        sft_main(arguments)
    if dist.is_initialized():
        with suppress(RuntimeError):  # a failed rank has its own exit code
            dist.barrier()  # a rank that leaves while another still draws its curves would close its connections
        # Everything is written. Python's own exit would end gloo's threads in any order, and sometimes one aborts.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class EvaluationCut(Exception):
    """SIGTERM came during an evaluation; raised on all ranks after the same batch."""


class EndsAtOnce(Exception):
    """The resumed training lacked only its last evaluation, or SIGTERM came during that evaluation."""


def register_callback(progress: Path, processes: int, early_stop_after: int | None, strategy: Strategy) -> None:
    """Register our callback with ms-swift under the name that `swift.arguments` passes."""
    import torch
    import torch.distributed as dist
    from swift.callbacks import callbacks_map
    from swift.callbacks.base import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self, args: Any, trainer: Any) -> None:
            super().__init__(args, trainer)
            args.include_num_input_tokens_seen = "non_padding"
            self.stop = False
            self.trainer = trainer
            self.log_save_evaluate = trainer._maybe_log_save_evaluate
            trainer._maybe_log_save_evaluate = self._log_save_evaluate
            self.evaluate = trainer._evaluate
            trainer._evaluate = self._evaluate
            signal.signal(signal.SIGTERM, self._on_sigterm)

        def _on_sigterm(self, number: int, frame: Any) -> None:
            self.stop = True

        def _write(self, event: Event) -> None:
            if self.args.process_index == 0:
                with progress.open("a") as file:
                    file.write(as_line(event))

        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Ours comes last, so that the others have started when it evaluates in on_train_begin.
            handler = self.trainer.callback_handler
            handler.callbacks = [*(other for other in handler.callbacks if other is not self), self]

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            mode = args.parallel_mode.name
            if args.world_size != processes or (processes > 1 and mode != "DISTRIBUTED"):
                raise RuntimeError(f"not really distributed: world size {args.world_size} of {processes}, mode {mode}")
            args.report_to = []  # TensorBoard's callback is at work; ms-swift would draw its curves as pictures too
            self.begun = time.monotonic()
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
            tokens = int(state.num_input_tokens_seen)
            self._write(Begin(state.global_step, state.max_steps, tokens, args.world_size, mode, device))
            if state.global_step and self._lacks_evaluation(args, state):
                self._evaluate_now(args, state, control)

        def _lacks_evaluation(self, args: Any, state: Any) -> bool:
            due = state.global_step % args.eval_steps == 0 or state.global_step >= state.max_steps
            return due and not evaluated(state.log_history, state.global_step)

        def _evaluate_now(self, args: Any, state: Any, control: Any) -> None:
            """Evaluate the resumed checkpoint, as transformers does before it saves."""
            with suppress(EvaluationCut):
                self.trainer._determine_best_metric(self.trainer._evaluate(None, None), None)
                folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
                if state.best_global_step == state.global_step:
                    state.best_model_checkpoint = str(folder)
                if args.process_index == 0:
                    with whole_file(folder / STATE) as file:
                        file.write((json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n").encode())
                if state.global_step < state.max_steps and not stalled(state.log_history, early_stop_after):
                    return
            self.on_train_end(args, state, control)
            raise EndsAtOnce

        def _log_save_evaluate(self, *arguments: Any, **values: Any) -> None:
            """Evaluate and save as transformers does; if SIGTERM interrupts the evaluation, only save."""
            try:
                self.log_save_evaluate(*arguments, **values)
            except EvaluationCut:
                control = self.trainer.control
                control.should_log = control.should_evaluate = False
                control.should_save = control.should_training_stop = True
                self.log_save_evaluate(*arguments, **values)

        def _evaluate(self, *arguments: Any, **values: Any) -> Any:
            """Evaluate as transformers does, but draw no random numbers from the training's.

            Each start of a loader draws one. A checkpoint that SIGTERM saved before its evaluation would otherwise be
            resumed with other dropout than an unbroken training has.
            """
            with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
                return self.evaluate(*arguments, **values)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if any(_gather(self.stop)):
                raise EvaluationCut

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if stalled(state.log_history, early_stop_after):
                control.should_training_stop = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if any(_gather(self.stop)):
                control.should_evaluate = False
                control.should_save = True
                control.should_training_stop = True
            if control.should_save and strategy.compares_ranks:
                _refuse_different_adapters(kwargs["model"])

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            values = {key: float(logs[key]) for key in KEPT if key in logs}
            now, tokens = time.monotonic() - self.begun, int(state.num_input_tokens_seen)
            self._write(Log(now, state.global_step, state.max_steps, tokens, **values))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._write(End(state.global_step, peak_memory=_gather(_peak_memory())))

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
            on_gpu: int = torch.cuda.max_memory_reserved()
            return on_gpu
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
