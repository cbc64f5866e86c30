"""The proof on real rows: the merged weights answer as the base with the adapter beside it does.

It shares nothing with the merge or the tensor proof: plain transformers load the folders, peft applies the
adapter unmerged, and the rows go through the merged folder's own processor. Three things must hold.

Deviation. Storing and computing in a type cost a relative error of u = eps / 2 per layer. These errors are
independent, so they add up as a walk at random: the logits stray by u · √layers of their own spread, times
what one layer does. Measured on Qwen3 shapes of 2 to 24 layers, 128 to 512 wide, that factor is 0.3 to 2.5 in
16 bit, and 3 to 17 in float32, where the sums within a layer are no more exact than the type.

Effect. The merged model must differ from the base as the adapter makes it: the share of the adapter's effect
that is found again, <merged - base, adapter - base> / |adapter - base|², is 1, it is 0 where nothing was
merged and 2 where it was merged twice. Rounding hardly moves it (0.95 to 1.02 measured as long as the adapter
moves the logits by 3 % of their spread), since it has no direction.

First choice. Where the best token leads by more than that same share of its own logit, both choose the same.
"""

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from vlmflow.errors import VlmflowError
from vlmflow.merging.safetensors_file import FLOAT_TYPES, read_header
from vlmflow.merging.verify_files import MERGE_AGAIN

POSITIONS = 128
"""How many of a row's last positions are compared; they see all that stands before."""

ROUNDING_FACTOR = {torch.float32: 64.0, torch.float16: 8.0, torch.bfloat16: 8.0}
"""What one layer does to rounding errors: what was measured, with a factor of 3 to 4 above it."""

EFFECT_RANGE = (0.75, 1.25)
"""Share of the adapter's effect that must be found in the merged model."""

CLEAR_DISAGREEMENT = 0.01
"""Share of the clear positions at which another token may be the best."""

ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
IMAGE_TAG = "<image>"


@dataclass(frozen=True)
class LogitProof:
    """What was compared, and what came out.

    rows, positions: compared rows, and token positions in them.
    dtype, device: of the computation.
    spread: root mean square of the logits, which are counted from their mean at a position, since a shift of
    all changes no probability. The next three are shares of it.
    deviation: root mean square of merged - (base + adapter). allowed_deviation: what rounding explains.
    effect: root mean square of (base + adapter) - base.
    effect_found: share of the effect that the merged model shows; 1 is all of it.
    top1_agreement: share of the positions at which the best token is the same.
    clear_positions: positions with a clear best token. clear_disagreements: those where it is another.
    """

    rows: int
    positions: int
    dtype: str
    device: str
    spread: float
    deviation: float
    allowed_deviation: float
    effect: float
    effect_found: float
    top1_agreement: float
    clear_positions: int
    clear_disagreements: int


def verify_logits(
    base: Path,
    adapter: Path,
    merged: Path,
    rows: Sequence[Mapping[str, Any]],
    picture_root: Path,
    device: str,
    dtype: str,
    image_max_tokens: int,
) -> LogitProof:
    """Compare the logits of base + adapter, unmerged in peft, with those of the folder `merged`.

    rows: training rows: "conversations" with "from" and "value", "images" relative to picture_root.
    device: cpu, or cuda; several GPUs share one model. dtype: in which the models compute.
    image_max_tokens: tokens that one picture may take; larger pictures are scaled down, as in training.

    One model is in memory at a time.

    Raises VlmflowError where a folder does not load offline, a model does not fit into memory, or the merged
    model answers otherwise than it must.
    """
    disable_progress_bar()
    inputs = list(_inputs(merged, rows, picture_root, image_max_tokens))
    try:
        plain, expected = _logits_beside(base, adapter, inputs, device, dtype)
        _free(device)
        model = _load(merged, device, dtype)
        found = torch.cat([_logits(model, row) for row in inputs])
    except torch.OutOfMemoryError:
        raise VlmflowError(
            f"{base}: the model and a row do not fit into the memory of {device}",
            "give the run more GPUs, or prove by tensors alone (runs: verify.logits: false)",
        ) from None
    layers = model.config.get_text_config().num_hidden_layers
    coarsest = max({*_stored_types(merged), getattr(torch, dtype)}, key=lambda kind: torch.finfo(kind).eps)
    allowed = ROUNDING_FACTOR[coarsest] * torch.finfo(coarsest).eps / 2 * math.sqrt(layers)
    proof = _compare(plain, expected, found, allowed, len(rows), dtype, device)
    _judge(proof, merged)
    return proof


def _inputs(
    folder: Path, rows: Sequence[Mapping[str, Any]], picture_root: Path, image_max_tokens: int
) -> Iterator[dict[str, Any]]:
    """Turn rows into a model's inputs, with the processor that lies in `folder`."""
    try:
        sees = hasattr(AutoConfig.from_pretrained(folder, local_files_only=True), "vision_config")
        processor = (AutoProcessor if sees else AutoTokenizer).from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise _does_not_load(folder, error) from None
    for row in rows:
        images = row.get("images", [])
        pictures = [_picture(picture_root / name, processor, image_max_tokens) for name in images]
        messages = list(_messages(row["conversations"], iter(pictures), sees))
        yield processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")


def _picture(file: Path, processor: Any, image_max_tokens: int) -> Image.Image:
    """Open a picture as RGB, of no more pixels than `image_max_tokens` squares that become a token each."""
    picture = Image.open(file).convert("RGB")
    side = processor.image_processor.patch_size * processor.image_processor.merge_size
    shrink = math.sqrt(image_max_tokens * side**2 / (picture.width * picture.height))
    if shrink >= 1:
        return picture
    return picture.resize((max(side, round(picture.width * shrink)), max(side, round(picture.height * shrink))))


def _messages(
    turns: Sequence[Mapping[str, str]], pictures: Iterator[Image.Image], sees: bool
) -> Iterator[dict[str, Any]]:
    for turn in turns:
        content: str | list[dict[str, Any]] = turn["value"]
        if sees:
            first, *others = turn["value"].split(IMAGE_TAG)
            content = [{"type": "text", "text": first}]
            for text in others:
                content += [{"type": "image", "image": next(pictures)}, {"type": "text", "text": text}]
        yield {"role": ROLES[turn["from"]], "content": content}


def _logits_beside(
    base: Path, adapter: Path, inputs: Sequence[dict[str, Any]], device: str, dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the base's logits, and those of base + adapter, the adapter beside the weights."""
    model = PeftModel.from_pretrained(_load(base, device, dtype), str(adapter)).eval()
    expected = [_logits(model, row) for row in inputs]
    with model.disable_adapter():
        plain = [_logits(model, row) for row in inputs]
    return torch.cat(plain), torch.cat(expected)


def _load(folder: Path, device: str, dtype: str) -> PreTrainedModel:
    """Load a model without network, every weight from the folder."""
    several = device == "cuda" and torch.cuda.device_count() > 1
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        model, report = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            device_map="auto" if several else device,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise _does_not_load(folder, error) from None
    if missing := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise _does_not_load(folder, f"no fitting weights for {missing[0]}")
    return model.eval()


def _logits(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Give the logits of a row's last positions in float32: positions by vocabulary."""
    with torch.inference_mode():
        return model(**inputs.to(model.device), logits_to_keep=POSITIONS).logits[0].float().cpu()


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _stored_types(folder: Path) -> set[torch.dtype]:
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    stored = {entry.dtype for header in headers for entry in header.tensors.values()}
    return {FLOAT_TYPES[dtype] for dtype in stored.intersection(FLOAT_TYPES)}


def _compare(
    plain: torch.Tensor,
    expected: torch.Tensor,
    found: torch.Tensor,
    allowed: float,
    rows: int,
    dtype: str,
    device: str,
) -> LogitProof:
    # A shift of all logits of a position changes no probability, so it is no difference.
    plain, expected, found = (logits - logits.mean(dim=1, keepdim=True) for logits in (plain, expected, found))
    spread = _root_mean_square(expected)
    effect = expected - plain
    squared_effect = effect.double().square().sum().item()
    shared = ((found - plain).double() * effect).sum().item()
    best, second = expected.topk(2, dim=1).values.T
    clear = best - second > allowed * best
    same = expected.argmax(dim=1) == found.argmax(dim=1)
    return LogitProof(
        rows=rows,
        positions=len(expected),
        dtype=dtype,
        device=device,
        spread=spread,
        deviation=_root_mean_square(found - expected) / spread,
        allowed_deviation=allowed,
        effect=_root_mean_square(effect) / spread,
        effect_found=shared / squared_effect if squared_effect else 0.0,
        top1_agreement=same.float().mean().item(),
        clear_positions=int(clear.sum()),
        clear_disagreements=int((clear & ~same).sum()),
    )


def _root_mean_square(values: torch.Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def _judge(proof: LogitProof, merged: Path) -> None:
    """Raise VlmflowError for the first of the three rules that does not hold; NaN holds none."""
    if not proof.deviation <= proof.allowed_deviation:
        fault = f"stray by {proof.deviation:.3g} of their spread; rounding explains {proof.allowed_deviation:.3g}"
    elif not EFFECT_RANGE[0] <= proof.effect_found <= EFFECT_RANGE[1]:
        fault = (
            f"show {proof.effect_found:.2f} times the adapter's effect, which is {proof.effect:.3g} of their "
            "spread: the merge lost or doubled it, or it is too small for the type"
        )
    elif proof.clear_disagreements > CLEAR_DISAGREEMENT * proof.clear_positions:
        fault = f"choose another token at {proof.clear_disagreements} of {proof.clear_positions} clear positions"
    else:
        return
    raise VlmflowError(
        f"{merged}: the logits of the merged weights, against base + adapter in {proof.dtype} on {proof.device}, "
        + fault,
        "check that base and adapter belong together and that training changed something; to rely on the proof "
        "tensor by tensor alone, set verify.logits: false for the run",
    )


def _does_not_load(folder: Path, why: object) -> VlmflowError:
    return VlmflowError(f"{folder}: does not load offline with transformers: {why}", MERGE_AGAIN)
