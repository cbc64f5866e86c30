"""Verifies on real rows that the merged weights answer like the base with the unmerged adapter.

It shares no code with the merge or the comparison of tensors: plain transformers loads the folders, peft applies the
adapter unmerged, and the merged folder's own processor prepares the rows. `logit_proof` has the rules.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from PIL import Image
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, BatchFeature
from transformers.utils.logging import disable_progress_bar

from vlmflow.config.run_settings import QuantisationSettings
from vlmflow.core.progress import lines_meanwhile
from vlmflow.merging.loaded_model import (
    OFFLINE,
    allowed_deviation,
    does_not_load,
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
from vlmflow.pictures.formats import open_picture
from vlmflow.rows.messages import messages_of
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.tools import declarations_of

POSITIONS = 128
"""The number of a row's last positions that are compared; they depend on everything before them."""


@lines_meanwhile("the comparison of logits")
def verify_logits(
    base: Path,
    adapter: Path,
    merged: Path,
    rows: Sequence[ShareGptRow],
    picture_root: Path,
    device: str,
    dtype: str,
    image_max_tokens: int,
    quantisation: QuantisationSettings | None = None,
) -> LogitProof:
    """Compare the logits of base + adapter, unmerged in peft, with those of the folder `merged`.

    rows: training rows; their images are relative to picture_root.
    device: cpu, or cuda; several GPUs share one model. dtype: the type in which the models compute.
    image_max_tokens: the tokens of the largest picture; larger ones are scaled down, as in training.
    quantisation: how the base was quantised for the training, if it was; the proof then has its effect, too.

    One model is in memory at a time.

    Raises VlmflowError if a folder does not load offline, a model does not fit into memory, or the logits of the merged
    model violate a rule.
    """
    disable_progress_bar()
    inputs = list(_inputs(merged, rows, picture_root, image_max_tokens))
    stored, computed = stored_type(merged), getattr(torch, dtype)
    try:
        plain, expected, rounded = _logits_beside(base, adapter, inputs, device, dtype, stored)
        free(device)
        model = load(merged, device, dtype)
        found = torch.cat([logits_of(model, row, POSITIONS) for row in inputs])
        allowed, experts = allowed_deviation(model, stored, computed), has_experts(model)
        del model
        free(device)
        proof = compare(plain, expected, rounded, found, allowed, len(rows), dtype, device, experts)
        if quantisation:
            effect = effect_of_quantisation(base, adapter, inputs, POSITIONS, expected, device, dtype, quantisation)
            proof = msgspec.structs.replace(proof, quantisation=effect)
    except torch.OutOfMemoryError:
        raise too_large(base, device) from None
    return msgspec.structs.replace(proof, verdict=judge(proof, merged, exact=not rounds_finer(stored, computed)))


def _inputs(
    folder: Path, rows: Sequence[ShareGptRow], picture_root: Path, image_max_tokens: int
) -> Iterator[BatchFeature]:
    """Turn rows into a model's inputs, with the processor in `folder`."""
    try:
        sees = hasattr(AutoConfig.from_pretrained(folder, **OFFLINE), "vision_config")
        processor = (AutoProcessor if sees else AutoTokenizer).from_pretrained(folder, **OFFLINE)
    except (OSError, ValueError) as error:
        raise does_not_load(folder, error) from None
    for row in rows:
        pictures = [_picture(picture_root / name, processor, image_max_tokens) for name in row.images]
        messages = messages_of(row.conversations, [{"type": "image", "image": picture} for picture in pictures])
        given = {"tools": declarations_of(row.tools), "return_dict": True, "return_tensors": "pt"}
        yield processor.apply_chat_template(messages, tokenize=True, **given)


def _picture(file: Path, processor: Any, image_max_tokens: int) -> Image.Image:
    """Open a picture as RGB, scaled down to at most `image_max_tokens` squares of one token each, if there are such."""
    picture = open_picture(file).convert("RGB")
    if not hasattr(processor.image_processor, "merge_size"):
        return picture
    side = processor.image_processor.patch_size * processor.image_processor.merge_size
    shrink = math.sqrt(image_max_tokens * side**2 / (picture.width * picture.height))
    if shrink >= 1:
        return picture
    return picture.resize((max(side, round(picture.width * shrink)), max(side, round(picture.height * shrink))))


def _logits_beside(
    base: Path, adapter: Path, inputs: Sequence[BatchFeature], device: str, dtype: str, stored: torch.dtype
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
