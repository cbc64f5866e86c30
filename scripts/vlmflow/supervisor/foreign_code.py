"""Keeps a checkpoint from running somebody's code when a training resumes.

DeepSpeed loads its files as pickles without limits, and a pickle may call any function. The other files of a checkpoint
are loaded with `weights_only=True` (transformers, `in_trainer.fsdp2`).
"""

import re
import stat
from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import printable

SAFE = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""What DeepSpeed's own checkpoints name besides tensors, texts and numbers; they hold values alone.

`tests/stages/test_strategies_train.py` gathers these names from real ones.
"""

TAG = re.compile(r"global_step[0-9]{1,18}")
"""The names of the folder that a checkpoint's file `latest` names."""


class ForeignCodeError(VlmflowError):
    """A checkpoint is not what DeepSpeed writes: to load it could run somebody's code."""


class _Inert:
    """Stands for a safe global while a file is read: nothing of DeepSpeed is imported or called."""

    def __new__(cls, *values: Any) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *values: Any) -> None:
        """Take any values, and keep none."""

    def __setstate__(self, state: Any) -> None:
        """Keep nothing."""


def refuse_foreign_code(checkpoint: Path) -> None:
    """Refuse a checkpoint unless DeepSpeed's files in it name only what its own ones name (`SAFE`).

    Each is read with `weights_only=True`, without the bytes of its tensors. It imports torch, which takes seconds.

    Raises ForeignCodeError with the file and what it names, or how its form differs.
    """
    import torch

    latest = (checkpoint / "latest").read_text(errors="replace").strip()
    if not TAG.fullmatch(latest):
        raise ForeignCodeError(
            f"{checkpoint / 'latest'}: {latest[:100]!r} is no name of DeepSpeed's", _next(checkpoint)
        )
    stand_ins: list[Any] = [(type(name, (_Inert,), {}), name) for name in SAFE]
    with torch.serialization.safe_globals(stand_ins):
        for file in sorted((checkpoint / latest).iterdir()):
            try:
                if not stat.S_ISREG(file.lstat().st_mode):
                    raise ValueError("it is no regular file")
                names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
                if not names:
                    torch.load(file, map_location="meta", weights_only=True)
            except Exception as error:  # a file made on purpose can raise anything
                said = printable(str(error))[:300]
                raise ForeignCodeError(
                    f"{file}: has another form than DeepSpeed's files: {said}", _next(checkpoint)
                ) from None
            if names:
                said = printable(", ".join(names))[:300]
                raise ForeignCodeError(f"{file}: would call {said} when it is loaded", _next(checkpoint))


def _next(checkpoint: Path) -> str:
    return (
        f"find out who wrote {checkpoint}, and load it nowhere; if it was this training, report it with its name; "
        f"after `rm -r {checkpoint}` the same command resumes from the checkpoint before, or begins again"
    )
