"""Verifies on real rows that the merged weights answer like the base with the unmerged adapter.

It shares no code with the merge or the comparison of tensors: plain transformers loads the folders, peft applies the
adapter unmerged, and ms-swift prepares the rows as for the training (`logit_inputs`). `logit_proof` has the rules.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers.utils.logging import disable_progress_bar

from vlmflow.config.run_settings import QuantisationSettings
from vlmflow.core.progress import lines_meanwhile
from vlmflow.merging.loaded_model import (
    allowed_deviation,
    free,
    has_experts,
    load,
    logits_of,
    rounds_finer,
    stored_type,
    too_large,
)
from vlmflow.merging.logit_proof import compare, judge
from vlmflow.merging.proof import LogitProof
from vlmflow.merging.quantisation import effect_of_quantisation
from vlmflow.swift.row_tensors import Inputs

POSITIONS = 128
"""The number of a row's last positions that are compared; they depend on everything before them."""


@lines_meanwhile("the comparison of logits")
def verify_logits(
    base: Path,
    adapter: Path,
    merged: Path,
    inputs: Sequence[Inputs],
    device: str,
    dtype: str,
    quantisation: QuantisationSettings | None = None,
) -> LogitProof:
    """Compare the logits of base + adapter, unmerged in peft, with those of the folder `merged`.

    inputs: those of rows, in the form of the training.
    device: cpu, or cuda; several GPUs share one model. dtype: the type in which the models compute.
    quantisation: how the base was quantised for the training, if it was; the proof then has its effect, too.

    One model is in memory at a time.

    Raises VlmflowError if a folder does not load offline, a model does not fit into memory, or the logits of the merged
    model violate a rule.
    """
    disable_progress_bar()
    stored, computed = stored_type(merged), getattr(torch, dtype)
    try:
        plain, expected, rounded = _logits_beside(base, adapter, inputs, device, dtype, stored)
        free(device)
        model = load(merged, device, dtype)
        found = torch.cat([logits_of(model, row, POSITIONS) for row in inputs])
        allowed, experts = allowed_deviation(model, stored, computed), has_experts(model)
        del model
        free(device)
        proof = compare(plain, expected, rounded, found, allowed, len(inputs), dtype, device, experts)
        if quantisation:
            effect = effect_of_quantisation(base, adapter, inputs, POSITIONS, expected, device, dtype, quantisation)
            proof = msgspec.structs.replace(proof, quantisation=effect)
    except torch.OutOfMemoryError:
        raise too_large(base, device) from None
    return msgspec.structs.replace(proof, verdict=judge(proof, merged, exact=not rounds_finer(stored, computed)))


def _logits_beside(
    base: Path, adapter: Path, inputs: Sequence[Inputs], device: str, dtype: str, stored: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits of the base, of base + adapter, and of peft's own merge rounded to the type `stored`."""
    model = PeftModel.from_pretrained(load(base, device, dtype), str(adapter)).eval()
    expected = [logits_of(model, row, POSITIONS) for row in inputs]
    with model.disable_adapter():
        plain = [logits_of(model, row, POSITIONS) for row in inputs]
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            weight = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
            weight.data = weight.data.float()  # otherwise peft rounds the update of experts before it adds it
            layer.merge()
            weight.data = weight.data.to(stored).to(getattr(torch, dtype))
    rounded = [logits_of(model, row, POSITIONS) for row in inputs]
    return torch.cat(plain), torch.cat(expected), torch.cat(rounded)
