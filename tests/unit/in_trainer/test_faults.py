"""Which gradients end a training; what follows is in the stages' tests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlmflow.in_trainer.events import Faults


@pytest.mark.parametrize(
    ("norm", "fp16", "finite"),
    [
        (1.0, False, True),
        (float("inf"), False, False),
        (float("nan"), False, False),
        (float("inf"), True, True),  # the scaler tries a lower scale
        (None, False, True),
    ],
)
def test_a_skipped_update_is_excused_with_float16_alone(
    tmp_path: Path, norm: float | None, fp16: bool, finite: bool
) -> None:
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(fp16=fp16),
        _get_grad_norm=lambda: norm,
    )
    orders: Any = SimpleNamespace(folder=tmp_path)
    ranks: Any = SimpleNamespace(tell={})
    batches: Any = SimpleNamespace(losses=[torch.tensor(2.0), torch.tensor(0.5)])
    Faults(orders, trainer, ranks, batches)
    trainer._get_grad_norm()
    assert ranks.tell["loss"]() == (2.5, finite)
