"""One trainer process. torchrun starts it once per process:

    torchrun … -m vlmflow.in_trainer.process ORDERS [swift arguments]

ORDERS are `messages.Orders` as JSON. The process trains with ms-swift's `sft` and our callbacks (`register`).
`supervisor.watch` needs only the name of this module, so what needs torch is imported in functions.
"""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from vlmflow.core.processes import descends_from, die_with_parent
from vlmflow.in_trainer.messages import Heart, Orders, read_orders
from vlmflow.swift.child_process import quick_imports
from vlmflow.swift.own_template import encode_as_in_training


def main() -> None:
    """Train with the arguments of the command line."""
    die_with_parent(os.getppid())
    orders = read_orders(sys.argv[1])
    if not descends_from(orders.starter):  # torchrun was killed between our start and this line
        sys.exit(f"process {orders.starter}, which starts the trainers, has no torchrun any more")
    heart = Heart(Path(orders.folder), int(os.environ["RANK"]), orders.seconds)
    with quick_imports():
        encode_as_in_training()
        import torch.distributed as dist
        from swift import sft_main
        from swift.template import Template

        from vlmflow.config.strategies import strategy_of
        from vlmflow.in_trainer import engine
        from vlmflow.in_trainer.evaluation import EndsAtOnce
        from vlmflow.in_trainer.events import BadStepError

        # It prints a row. Its words may be private, or look like the cause of a failure (supervisor/failures.py).
        Template.print_inputs = lambda *_: None
        engine.attend_as_the_model_can()
        engine.spare_deepspeed(strategy_of(orders.strategy))
        register(orders, heart)
    with suppress(EndsAtOnce, BadStepError):
        sft_main(sys.argv[2:])
    if dist.is_initialized():
        with suppress(RuntimeError):  # a failed rank has its own exit code
            dist.barrier()  # a rank that leaves while another still draws its curves would close its connections
        # Everything is written. Python's own exit would end gloo's threads in any order, and sometimes one aborts.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def register(orders: Orders, heart: Heart) -> None:
    """Register our callbacks with ms-swift under the one name that `swift.arguments` passes."""
    from swift.callbacks import callbacks_map
    from swift.callbacks.base import TrainerCallback

    from vlmflow.in_trainer.batches import Batches
    from vlmflow.in_trainer.checkpoints import Checkpoints, Stop
    from vlmflow.in_trainer.engine import Ranks
    from vlmflow.in_trainer.evaluation import Evaluation
    from vlmflow.in_trainer.events import Events, Faults
    from vlmflow.swift.arguments import CALLBACK

    class Ours(TrainerCallback):
        """Adds our callbacks to a trainer that has its model."""

        def on_init_end(self, *_: Any, **__: Any) -> None:
            """Put them behind all others, which have begun when ours evaluate in on_train_begin."""
            ranks = Ranks(orders, self.trainer)
            batches = Batches(orders, heart, self.trainer, ranks)
            faults = Faults(orders, self.trainer, ranks, batches)
            stop = Stop(orders, heart, self.trainer, ranks)
            checkpoints = Checkpoints(orders, heart, self.trainer)
            events = Events(orders, heart, self.trainer, batches)
            evaluation = Evaluation(orders, heart, self.trainer, stop, events)
            # `ranks` before all: it refuses ranks that do not train together, and lets them hear of each other.
            # `checkpoints` after `stop`, which may ask for one: it compares the ranks before it. `evaluation` after
            # `events`, which begin: it evaluates a resumed checkpoint, and may end the session.
            ours = [ranks, batches, faults, stop, checkpoints, events, evaluation]
            handler = self.trainer.callback_handler
            handler.callbacks = [*(each for each in handler.callbacks if each is not self), *ours]

    callbacks_map[CALLBACK] = Ours


if __name__ == "__main__":
    main()
