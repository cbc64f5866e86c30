"""One trainer process. torchrun starts it once per process:

    torchrun … -m vlmflow.in_trainer.process ORDERS [swift arguments]

ORDERS are `messages.Orders` as JSON. The process trains with ms-swift's `sft` and our callback (`callback.Watch`).
`supervisor.watch` needs only the name of this module, so what needs torch is imported in `main`.
"""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from vlmflow.core.process import descends_from, die_with_parent
from vlmflow.in_trainer.heartbeat import Heart
from vlmflow.in_trainer.messages import read_orders
from vlmflow.swift.own_template import encode_as_in_training
from vlmflow.swift.quick_imports import quick_imports


def main() -> None:
    """Train with the arguments of the command line."""
    die_with_parent(os.getppid())
    orders = read_orders(sys.argv[1])
    if not descends_from(orders.starter):  # torchrun was killed between our start and the line above
        sys.exit(f"process {orders.starter}, which starts the trainers, has no torchrun any more")
    heart = Heart(Path(orders.folder), int(os.environ["RANK"]))
    with quick_imports():
        encode_as_in_training()
        import torch.distributed as dist
        from swift import sft_main
        from swift.template import Template

        from vlmflow.config.strategies import strategy_of
        from vlmflow.in_trainer import engine
        from vlmflow.in_trainer.callback import EndsAtOnce, register
        from vlmflow.in_trainer.engine import attend_as_the_model_can
        from vlmflow.in_trainer.faults import BadStepError

        # It prints a row. Its words may be private, or look like the cause of a failure (supervisor/failures.py).
        Template.print_inputs = _print_nothing
        attend_as_the_model_can()
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


def _print_nothing(template: Any, inputs: dict[str, Any]) -> None:
    """Take the place of ms-swift's `Template.print_inputs`."""


if __name__ == "__main__":
    main()
