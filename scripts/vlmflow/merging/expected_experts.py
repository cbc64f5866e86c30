"""Which numbers of an adapter each tensor of a model with experts must have, for the proof by tensors.

It shares no rule with the merge: peft itself wraps the model, which shows whose factors are whose, and transformers
saves numbers that name their own places, which shows where they go.
"""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from transformers.core_model_loading import revert_weight_conversion

from vlmflow.core.errors import VlmflowError
from vlmflow.swift.limited_child import limited
from vlmflow.swift.meta_model import meta_model


class OfExperts(msgspec.Struct, frozen=True):
    """What a tensor of the files has of an adapted parameter of experts, W (experts by rows by columns) in memory.

    layer: the name of its factors in the adapter, without `.lora_A.weight`. scale: of the update. out_by_in: whether
    each matrix of W is out by in. shape: W's. expert: the matrix; None for all of them. first: its first row in W.
    rows: how many.
    """

    layer: str
    scale: float
    out_by_in: bool
    shape: tuple[int, int, int]
    expert: int | None
    first: int
    rows: int


def expected_experts(base: Path, adapter: Path) -> dict[str, OfExperts]:
    """Return what the tensors of a base's files have of adapted experts, by name.

    base, adapter: their folders. Raises VlmflowError if the model cannot be built, or its saved form is unknown.
    """
    found = limited(partial(_expected_experts, base, adapter))
    if "failed" in found:
        raise VlmflowError(
            f"{base}: the places of its adapted experts cannot be computed: {found['failed']}",
            "report this, with the model's config.json and the adapter's adapter_config.json",
        )
    return msgspec.convert(found, dict[str, OfExperts])


def _expected_experts(base: Path, adapter: Path) -> dict[str, Any]:
    plain, adapted = meta_model(base), meta_model(base)
    if plain is None or adapted is None:
        raise ValueError("transformers does not know the class of its config.json, or it is quantised")
    with torch.device("meta"):
        wrapped = get_peft_model(adapted, LoraConfig.from_pretrained(str(adapter)))
    found = {}
    for name, module in wrapped.named_modules():
        if isinstance(module, ParamWrapper) and module.get_param().ndim == 3:
            layer = name.removeprefix("base_model.model.")
            parameter = f"{layer.replace('.base_layer', '')}.{module.parameter_name}"
            experts, rows, columns = module.get_param().shape
            places = torch.arange(experts * rows).reshape(experts, rows, 1)
            for tensor, saved in revert_weight_conversion(plain, {parameter: places}).items():
                numbers = saved.flatten()
                first = int(numbers[0])
                if not torch.equal(numbers, torch.arange(first, first + len(numbers))):
                    raise ValueError(f"{tensor} has rows of {parameter} in another order")
                expert, row = (None, 0) if saved.ndim == 3 else divmod(first, rows)
                found[tensor] = OfExperts(
                    layer=layer,
                    scale=module.scaling["default"],
                    out_by_in=module._did_swap_in_out_features,
                    shape=(experts, rows, columns),
                    expert=expert,
                    first=row,
                    rows=rows if expert is None else len(numbers),
                )
    return {tensor: msgspec.to_builtins(of) for tensor, of in found.items()}
