"""Measures how the quantised base, with which an adapter was trained, differs from the base into which it is merged.

Verifies on real rows that the merged weights answer like the base with the unmerged adapter.

It shares no code with the merge or the comparison of tensors: plain transformers loads the folders, peft applies the
adapter unmerged, and ms-swift prepares the rows as for the training (`logit_inputs`). `logit_proof` has the rules.

Verifies that a folder answers as the model did in the trainer, after a training of the model's own weights.

The trainer stored some rows as it fed them to the model, with the logits (`trainer/stored_logits`). Here plain
transformers loads the folder and answers the same rows. `logit_proof` has the rules.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from vlmflow.config.model_types import ModelPart, kinds_of
from vlmflow.config.run_settings import QuantisationSettings
from vlmflow.config.strategies import FULL
from vlmflow.core.progress import lines_meanwhile
from vlmflow.in_trainer.messages import LOGITS, POSITIONS
from vlmflow.merging.logits import (
    allowed_deviation,
    centred,
    compare,
    free,
    has_experts,
    judge,
    load,
    logits_of,
    rounds_finer,
    stored_type,
    too_large,
)
from vlmflow.merging.proof import LogitProof, QuantisationEffect
from vlmflow.supervisor.report import released_files
from vlmflow.swift.row_attention import Inputs, rows_in

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


COMPARED_POSITIONS = 128
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
        found = torch.cat([logits_of(model, row, COMPARED_POSITIONS) for row in inputs])
        allowed, experts = allowed_deviation(model, stored, computed), has_experts(model)
        del model
        free(device)
        proof = compare(plain, expected, rounded, found, allowed, len(inputs), dtype, device, experts)
        if quantisation:
            effect = effect_of_quantisation(
                base, adapter, inputs, COMPARED_POSITIONS, expected, device, dtype, quantisation
            )
            proof = msgspec.structs.replace(proof, quantisation=effect)
    except torch.OutOfMemoryError:
        raise too_large(base, device) from None
    return msgspec.structs.replace(proof, verdict=judge(proof, merged, exact=not rounds_finer(stored, computed)))


def _logits_beside(
    base: Path, adapter: Path, inputs: Sequence[Inputs], device: str, dtype: str, stored: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits of the base, of base + adapter, and of peft's own merge rounded to the type `stored`."""
    model = PeftModel.from_pretrained(load(base, device, dtype), str(adapter)).eval()
    expected = [logits_of(model, row, COMPARED_POSITIONS) for row in inputs]
    with model.disable_adapter():
        plain = [logits_of(model, row, COMPARED_POSITIONS) for row in inputs]
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            weight = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
            weight.data = weight.data.float()  # otherwise peft rounds the update of experts before it adds it
            layer.merge()
            weight.data = weight.data.to(stored).to(getattr(torch, dtype))
    rounded = [logits_of(model, row, COMPARED_POSITIONS) for row in inputs]
    return torch.cat(plain), torch.cat(expected), torch.cat(rounded)


@lines_meanwhile("the comparison of logits")
def verify_stored_logits(base: Path, released: Path, merged: Path, device: str, dtype: str) -> LogitProof:
    """Compare the logits that the trainer stored with those of the folder `merged`.

    base: the base model's folder, whose answers show what the training changed. released: the folder with the files
    that the training released. device: cpu, or cuda; several GPUs share one model. dtype: the type in which the models
    compute; the trainer's was the same.

    One model is in memory at a time.

    Raises VlmflowError if a folder does not load offline, a model does not fit into memory, or the logits of the merged
    model violate a rule.
    """
    disable_progress_bar()
    inputs, expected = _stored(load_file(released / LOGITS))
    stored, computed = stored_type(merged), getattr(torch, dtype)
    try:
        model = load(base, device, dtype)
        plain = _logits(model, inputs)
        if not _take_weights(model, released, stored):
            del model
            free(device)
            model = load(base, device, dtype, state_dict=dict(ChainMap(*_weights(released, stored))))
        rounded = _logits(model, inputs)
        del model
        free(device)
        model = load(merged, device, dtype)
        found = _logits(model, inputs)
    except torch.OutOfMemoryError:
        raise too_large(base, device) from None
    allowed = allowed_deviation(model, stored, computed)
    proof = compare(plain, expected, rounded, found, allowed, len(inputs), dtype, device, has_experts(model))
    return msgspec.structs.replace(proof, verdict=judge(proof, merged, exact=not rounds_finer(stored, computed)))


def _stored(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Inputs], torch.Tensor]:
    """Return the rows' inputs, and their logits one after the other."""
    rows = rows_in(tensors)
    return rows, torch.cat([row.pop("logits") for row in rows])


def _logits(model: PreTrainedModel, inputs: list[Inputs]) -> torch.Tensor:
    return torch.cat([logits_of(model, row, POSITIONS) for row in inputs])


def _take_weights(model: torch.nn.Module, released: Path, stored: torch.dtype) -> bool:
    """Give a model the checkpoint's weights, rounded to the type `stored`, file by file.

    Returns False if transformers has other names for them in memory: it must load them itself.
    """
    own = model.state_dict().keys()
    for weights in _weights(released, stored):
        if not weights.keys() <= own:
            return False
        model.load_state_dict(weights, strict=False)
    return True


def _weights(released: Path, stored: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each of the checkpoint's files by name, rounded."""
    for name in released_files(released, FULL):
        if name.endswith(".safetensors") and name != LOGITS:
            yield {key: tensor.to(stored) for key, tensor in load_file(released / name).items()}
