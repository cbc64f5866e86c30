"""Verifies on real rows that the merged weights answer like the base with the unmerged adapter.

It shares no code with the merge or the comparison of tensors: plain transformers loads the folders, peft applies the
adapter unmerged, and the merged folder's own processor prepares the rows. `logit_proof` has the rules.
"""

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from PIL import Image
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    BatchFeature,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from vlmflow.core.errors import VlmflowError
from vlmflow.merging.logit_proof import compare, judge
from vlmflow.merging.proof import LogitProof
from vlmflow.merging.safetensors_file import FLOAT_TYPES, read_header
from vlmflow.merging.verify_files import MERGE_AGAIN
from vlmflow.rows.chat import IMAGE_TAG, ROLES, Turn
from vlmflow.rows.data_rows import Row

POSITIONS = 128
"""The number of a row's last positions that are compared; they depend on everything before them."""

ROUNDING_FACTOR = {torch.float32: 64.0, torch.float16: 8.0, torch.bfloat16: 8.0}
"""The factor of one layer on rounding errors: 3 to 4 times the measured one."""

OFFLINE = {"local_files_only": True, "trust_remote_code": False}
"""Options for loading folders: fetch nothing, and run no Python in them."""


def verify_logits(
    base: Path,
    adapter: Path,
    merged: Path,
    rows: Sequence[Row],
    picture_root: Path,
    device: str,
    dtype: str,
    image_max_tokens: int,
) -> LogitProof:
    """Compare the logits of base + adapter, unmerged in peft, with those of the folder `merged`.

    rows: training rows; their images are relative to picture_root.
    device: cpu, or cuda; several GPUs share one model. dtype: the type in which the models compute.
    image_max_tokens: the tokens of the largest picture; larger ones are scaled down, as in training.

    One model is in memory at a time.

    Raises VlmflowError if a folder does not load offline, a model does not fit into memory, or the logits of the merged
    model violate a rule.
    """
    disable_progress_bar()
    inputs = list(_inputs(merged, rows, picture_root, image_max_tokens))
    stored = _coarsest(_stored_types(merged))
    try:
        plain, expected, rounded = _logits_beside(base, adapter, inputs, device, dtype, stored)
        _free(device)
        model = _load(merged, device, dtype)
        found = torch.cat([_logits(model, row) for row in inputs])
    except torch.OutOfMemoryError:
        raise VlmflowError(
            f"{base}: the model and a row do not fit in the memory of {device}",
            "give the run more GPUs, or prove by tensors alone (runs.NAME.verify.logits: false)",
        ) from None
    layers = model.config.get_text_config().num_hidden_layers
    computed = getattr(torch, dtype)
    coarsest = _coarsest({stored, computed})
    allowed = ROUNDING_FACTOR[coarsest] * torch.finfo(coarsest).eps / 2 * math.sqrt(layers)
    proof = compare(plain, expected, rounded, found, allowed, len(rows), dtype, device)
    exact = torch.finfo(stored).eps >= torch.finfo(computed).eps
    return msgspec.structs.replace(proof, verdict=judge(proof, merged, exact))


def _inputs(folder: Path, rows: Sequence[Row], picture_root: Path, image_max_tokens: int) -> Iterator[BatchFeature]:
    """Turn rows into a model's inputs, with the processor in `folder`."""
    try:
        sees = hasattr(AutoConfig.from_pretrained(folder, **OFFLINE), "vision_config")
        processor = (AutoProcessor if sees else AutoTokenizer).from_pretrained(folder, **OFFLINE)
    except (OSError, ValueError) as error:
        raise _does_not_load(folder, error) from None
    for row in rows:
        pictures = [_picture(picture_root / name, processor, image_max_tokens) for name in row.images]
        messages = list(_messages(row.conversations, iter(pictures), sees))
        yield processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")


def _picture(file: Path, processor: Any, image_max_tokens: int) -> Image.Image:
    """Open a picture as RGB, scaled down to at most `image_max_tokens` squares of one token each."""
    picture = Image.open(file).convert("RGB")
    side = processor.image_processor.patch_size * processor.image_processor.merge_size
    shrink = math.sqrt(image_max_tokens * side**2 / (picture.width * picture.height))
    if shrink >= 1:
        return picture
    return picture.resize((max(side, round(picture.width * shrink)), max(side, round(picture.height * shrink))))


def _messages(turns: Sequence[Turn], pictures: Iterator[Image.Image], sees: bool) -> Iterator[dict[str, Any]]:
    """Return the turns as messages of transformers' chat templates."""
    for turn in turns:
        content: str | list[dict[str, Any]] = turn.value
        if sees:
            first, *others = turn.value.split(IMAGE_TAG)
            content = [{"type": "text", "text": first}]
            for text in others:
                content += [{"type": "image", "image": next(pictures)}, {"type": "text", "text": text}]
        yield {"role": ROLES[turn.speaker], "content": content}


def _logits_beside(
    base: Path, adapter: Path, inputs: Sequence[BatchFeature], device: str, dtype: str, stored: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits of the base, of base + adapter, and of peft's own merge rounded to the type `stored`."""
    model = PeftModel.from_pretrained(_load(base, device, dtype), str(adapter)).eval()
    expected = [_logits(model, row) for row in inputs]
    with model.disable_adapter():
        plain = [_logits(model, row) for row in inputs]
    model.merge_adapter()
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            weight = layer.get_base_layer().weight
            weight.data.copy_(weight.data.to(stored))
    rounded = [_logits(model, row) for row in inputs]
    return torch.cat(plain), torch.cat(expected), torch.cat(rounded)


def _load(folder: Path, device: str, dtype: str) -> PreTrainedModel:
    """Load a model without network, every weight from the folder."""
    several = device == "cuda" and torch.cuda.device_count() > 1
    try:
        config = AutoConfig.from_pretrained(folder, **OFFLINE)
        sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        model, report = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            device_map="auto" if several else device,
            **OFFLINE,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise _does_not_load(folder, error) from None
    if missing := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise _does_not_load(folder, f"no fitting weights for {missing[0]}")
    return model.eval()


def _logits(model: torch.nn.Module, inputs: BatchFeature) -> torch.Tensor:
    """Return the logits of a row's last positions in float32: positions by vocabulary."""
    with torch.inference_mode():
        return model(**inputs.to(model.device), logits_to_keep=POSITIONS).logits[0].float().cpu()


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _coarsest(types: Iterable[torch.dtype]) -> torch.dtype:
    return max(types, key=lambda kind: torch.finfo(kind).eps)


def _stored_types(folder: Path) -> set[torch.dtype]:
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    stored = {entry.dtype for header in headers for entry in header.tensors.values()}
    return {FLOAT_TYPES[dtype] for dtype in stored.intersection(FLOAT_TYPES)}


def _does_not_load(folder: Path, why: object) -> VlmflowError:
    return VlmflowError(f"{folder}: does not load offline with transformers: {why}", MERGE_AGAIN)
