"""Measures how the quantised base, with which an adapter was trained, differs from the base into which it is merged."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import BitsAndBytesConfig

from vlmflow.config.model_types import ModelPart, kinds_of
from vlmflow.config.run_settings import QuantisationSettings
from vlmflow.merging.loaded_model import load, logits_of
from vlmflow.merging.logit_proof import centred
from vlmflow.merging.proof import QuantisationEffect

NOT_QUANTISED: tuple[ModelPart, ...] = ("vision_tower", "aligner")
"""The parts that ms-swift leaves as they are, and the output head (arguments/base_args/quant_args.py,
`get_modules_to_not_convert`)."""


def effect_of_quantisation(
    base: Path,
    adapter: Path,
    inputs: Sequence[Mapping[str, torch.Tensor]],
    positions: int,
    expected: torch.Tensor,
    device: str,
    dtype: str,
    settings: QuantisationSettings,
) -> QuantisationEffect:
    """Compare the logits of the quantised base + adapter with those of the unquantised base + adapter (`expected`).

    inputs, positions: as for `expected`. Raises torch.OutOfMemoryError if the model does not fit.
    """
    skipped = {module for kind in kinds_of(base) for part in NOT_QUANTISED for module in kind.parts.get(part, [])}
    configuration = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=settings.type,
        bnb_4bit_use_double_quant=settings.double,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
        llm_int8_skip_modules=[*sorted(skipped), "lm_head"],
    )
    quantised = load(base, device, dtype, quantization_config=configuration)
    layers = sum(type(layer).__name__ == "Linear4bit" for layer in quantised.modules())
    model = PeftModel.from_pretrained(quantised, str(adapter)).eval()
    found = torch.cat([logits_of(model, row, positions) for row in inputs])
    difference, spread = centred(found) - centred(expected), centred(expected)
    return QuantisationEffect(
        layers=layers,
        type=settings.type,
        double=settings.double,
        deviation=(difference.square().mean() / spread.square().mean()).sqrt().item(),
        top1_agreement=(found.argmax(dim=1) == expected.argmax(dim=1)).double().mean().item(),
    )
