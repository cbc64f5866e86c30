"""Lets models whose class has no sdpa attend eagerly: sdpa is the default of `train.attention`, not a condition."""

from typing import Any

from transformers import PreTrainedModel

from vlmflow.in_trainer.row_attention import SDPA


def attend_as_the_model_can() -> None:
    """Let models that are loaded from now on and in this process take sdpa as transformers' own default.

    Without an argument transformers takes sdpa, or else eager; ms-swift always gives one, and transformers refuses it.
    """
    plain = PreTrainedModel.get_correct_attn_implementation

    def choose(model: PreTrainedModel, requested: str | None, *values: Any, **named: Any) -> str:
        chosen: str = plain(model, None if requested == SDPA else requested, *values, **named)
        return chosen

    PreTrainedModel.get_correct_attn_implementation = choose
