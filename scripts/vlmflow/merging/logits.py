"""Loads model folders with plain transformers, without network, and asks the models for logits.

The inputs of the proof by logits: rows in ms-swift's template and collator, as the trainers make them.

Judges a merge by the logits of base, of base + adapter and of the merged weights. Three rules must hold.

Deviation. Storing and computing in a type causes a relative error of u = eps / 2 per layer. These errors are
independent, so they add up like a random walk: the logits deviate by u · √layers of their own spread, times a factor
of one layer. Measured on Qwen3 shapes of 2 to 24 layers, 128 to 512 wide, that factor is 0.3 to 2.5 in 16 bit, and 3
to 17 in float32, where the sums within a layer are only as exact as the type.

Effect. The merged model must differ from the base as the adapter does: the share of the adapter's effect in the merged
model, <merged - base, adapter - base> / |adapter - base|², is 1; it is 0 if nothing was merged, and 2 if it was merged
twice. Rounding hardly changes it (0.95 to 1.02 measured) as long as the update is large compared with the step between
two numbers of the stored type. After a short training it is not: W + s·BA is then partly rounded back to W, and a
correct merge shows less (0.71 measured: 4 steps at 1e-4 in bfloat16). So rounding is measured: peft merges in memory,
its weights are rounded to the stored type, and this merge shows the share that rounding keeps. If that share is not
near 1, and the merged folder shows the same, the comparison is inconclusive: rounding explains the difference, and only
the comparison of tensors decides.

First choice. If the best token leads by more than that same share of its own logit, both models choose the same token.

Experts. A router is not continuous: weights that are rounded send some tokens to other experts, and move the logits of
a right merge by 0.05 to 0.25 of their spread (tests/stages/test_expert_models.py, in bfloat16). So deviation and first
choice are then compared with peft's merge with rounded weights, which routes as the merged folder does. It is rounded
alike unless the weights are stored in a finer type than they are computed with; a deviation is inconclusive then.
"""

import gc
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_weights import read_header
from vlmflow.merging import row_inputs
from vlmflow.merging.proof import MERGE_AGAIN, LogitProof
from vlmflow.merging.tensors import FLOAT_TYPES
from vlmflow.rows.sharegpt import ShareGptRow, as_line
from vlmflow.swift.arguments import as_words
from vlmflow.swift.child_process import environment, run_module
from vlmflow.swift.row_attention import Inputs, rows_in

ROUNDING_FACTOR = {torch.float32: 64.0, torch.float16: 8.0, torch.bfloat16: 8.0}
"""The factor of one layer on rounding errors: 3 to 4 times the measured one."""

OFFLINE = {"local_files_only": True, "trust_remote_code": False}
"""Options for loading folders: fetch nothing, and run no Python in them."""


def load(folder: Path, device: str, dtype: str, **values: Any) -> PreTrainedModel:
    """Load a model without network, every weight from the folder.

    device: cpu, or cuda; several GPUs share one model. dtype: the type in which it computes. values: further arguments
    of `from_pretrained`; with state_dict, weights by their names in files, the folder gives its configuration alone.

    Raises VlmflowError if the folder does not load, or lacks weights.
    """
    several = device == "cuda" and torch.cuda.device_count() > 1
    try:
        config = AutoConfig.from_pretrained(folder, **OFFLINE)
        config._attn_implementation = None  # transformers' default for this machine, whatever the owner's had
        sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        if "state_dict" in values:
            kind = kind._model_mapping[type(config)]  # an automatic class would look into the folder
        model, report = kind.from_pretrained(
            None if "state_dict" in values else folder,
            config=config,
            dtype=getattr(torch, dtype),
            device_map="auto" if several else device,
            **OFFLINE,
            **values,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise does_not_load(folder, error) from None
    if missing := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise does_not_load(folder, f"no fitting weights for {missing[0]}")
    return model.eval()


def logits_of(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], positions: int) -> torch.Tensor:
    """Return the logits of a row's last positions in float32: positions by vocabulary.

    Pictures take the type in which the model computes.
    """
    kind = model.dtype
    with torch.inference_mode():
        placed = {
            name: value.to(model.device, kind if value.is_floating_point() else None) for name, value in inputs.items()
        }
        return model(**placed, logits_to_keep=positions).logits[0].float().cpu()


def free(device: str) -> None:
    """Give the memory of models that nobody refers to back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def too_large(folder: Path, device: str) -> VlmflowError:
    """Return the error for a model that does not fit into the device's memory."""
    return VlmflowError(
        f"{folder}: the model and a row do not fit in the memory of {device}",
        "give the run more GPUs, or prove by tensors alone (runs.NAME.verify.logits: false)",
    )


def allowed_deviation(model: PreTrainedModel, stored: torch.dtype, computed: torch.dtype) -> float:
    """Return the share of their spread by which rounding may change logits (`logit_proof`, "Deviation")."""
    layers = model.config.get_text_config().num_hidden_layers
    coarsest = coarsest_of({stored, computed})
    return float(ROUNDING_FACTOR[coarsest] * torch.finfo(coarsest).eps / 2 * math.sqrt(layers))


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether a model sends each token to some of its experts (transformers' common key)."""
    return bool(getattr(model.config.get_text_config(), "num_experts_per_tok", None))


def rounds_finer(stored: torch.dtype, computed: torch.dtype) -> bool:
    """Return whether weights of the type `stored` change when they are loaded for computing in `computed`."""
    return bool(torch.finfo(stored).eps < torch.finfo(computed).eps)


def stored_type(folder: Path) -> torch.dtype:
    """Return the coarsest type in which a folder stores weights."""
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    stored = {entry.dtype for header in headers for entry in header.tensors.values()}
    return coarsest_of(FLOAT_TYPES[dtype] for dtype in stored.intersection(FLOAT_TYPES))


def coarsest_of(types: Iterable[torch.dtype]) -> torch.dtype:
    """Return the type with the largest step between two numbers."""
    return max(types, key=lambda kind: torch.finfo(kind).eps)


def does_not_load(folder: Path, why: object) -> VlmflowError:
    """Return the error for a folder that transformers cannot load."""
    return VlmflowError(f"{folder}: does not load offline with transformers: {why}", MERGE_AGAIN)


def inputs_of(
    rows: Sequence[ShareGptRow], arguments: dict[str, object], pictures: Path, image_max_tokens: int, threads: int = 1
) -> list[Inputs]:
    """Return the inputs of each row.

    arguments: ms-swift's, of a model's folder and its template (`template_arguments`). pictures: the store of the rows'
    pictures. image_max_tokens: see TrainSettings. threads: the number of cores to use.

    Raises VlmflowError if ms-swift does not load the folder's processor offline, or refuses a row.
    """
    with tempfile.TemporaryDirectory(prefix="vlmflow-logits-") as scratch:
        folder = Path(scratch)
        lines, made = folder / "rows.jsonl", folder / "inputs.safetensors"
        lines.write_bytes(b"".join(as_line(row, row.images) + b"\n" for row in rows))
        words = [str(lines), str(made), *as_words(arguments)]
        env = environment(pictures, image_max_tokens, folder / "cache", threads)
        run_module(
            row_inputs.__name__, words, folder, env, folder / "log", f"{arguments['model']}: rows for the logits"
        )
        return rows_in(load_file(made))


EFFECT_RANGE = (0.75, 1.25)
"""The share of the adapter's effect that the merged model must show, and that rounding must keep for a verdict."""

SAME_EFFECT = 0.25
"""The largest difference between the shares of two merges with the same rounding."""

CLEAR_DISAGREEMENT = 0.01
"""The largest share of the clear positions at which another token may be the best."""

BLOCK = 8
"""Positions that are compared at a time: with Qwen's vocabulary each of the four blocks takes 10 MB in float64."""

AGREE, INCONCLUSIVE, OPEN = "agree", "inconclusive", "open"


def compare(
    plain: torch.Tensor,
    expected: torch.Tensor,
    rounded: torch.Tensor,
    found: torch.Tensor,
    allowed: float,
    rows: int,
    dtype: str,
    device: str,
    experts: bool = False,
) -> LogitProof:
    """Compare logits (positions by vocabulary) of base, base + adapter, peft's merge and the merged folder.

    experts: whether the model sends tokens to experts. The other parameters are fields of the result, whose verdict is
    still open.

    Raises VlmflowError if their shapes differ, or if there are no positions.
    """
    if len({logits.shape for logits in (plain, expected, rounded, found)}) > 1 or not len(expected):
        raise VlmflowError(
            f"the logits have the shapes {', '.join(str(tuple(each.shape)) for each in (plain, expected, found))} "
            "(base, base + adapter, merged)",
            "check that base and adapter belong together",
        )
    sums: defaultdict[str, float] = defaultdict(float)
    blocks = (logits.split(BLOCK) for logits in (plain, expected, rounded, found))
    for plain_block, expected_block, rounded_block, found_block in zip(*blocks, strict=True):
        for name, value in _sums(plain_block, expected_block, rounded_block, found_block, allowed, experts).items():
            sums[name] += value

    def root_mean_square(name: str) -> float:
        return math.sqrt(sums[name] / expected.numel())

    def share(name: str) -> float:
        return sums[name] / sums["effect²"] if sums["effect²"] else 0.0

    spread = root_mean_square("expected²") or math.nan
    return LogitProof(
        verdict=OPEN,
        rows=rows,
        positions=len(expected),
        dtype=dtype,
        device=device,
        spread=spread,
        deviation=root_mean_square("deviation²") / spread,
        allowed_deviation=allowed,
        effect=root_mean_square("effect²") / spread,
        effect_found=share("found · effect"),
        effect_rounded=share("rounded · effect"),
        top1_agreement=sums["same"] / len(expected),
        clear_positions=int(sums["clear"]),
        clear_disagreements=int(sums["clear disagreements"]),
        unrounded=root_mean_square("unrounded²") / spread if experts else None,
    )


def _sums(
    plain: torch.Tensor,
    expected: torch.Tensor,
    rounded: torch.Tensor,
    found: torch.Tensor,
    allowed: float,
    experts: bool,
) -> dict[str, float]:
    """Return, for some positions, the sums that the proof is made of."""
    # A shift of all logits of a position changes no probability, so it does not count as a difference.
    plain, expected, rounded, found = map(centred, (plain, expected, rounded, found))
    reference = rounded if experts else expected
    (best, second), (choice, _) = (of_two.T for of_two in reference.topk(2, dim=1))
    clear = best - second > allowed * best
    same = choice == found.argmax(dim=1)
    effect = expected - plain
    sums = {
        "expected²": expected.square().sum(),
        "deviation²": (found - reference).square().sum(),
        "unrounded²": (found - expected).square().sum(),
        "effect²": effect.square().sum(),
        "found · effect": (found - plain).mul_(effect).sum(),
        "rounded · effect": (rounded - plain).mul_(effect).sum(),
        "same": same.sum(),
        "clear": clear.sum(),
        "clear disagreements": (clear & ~same).sum(),
    }
    return {name: value.item() for name, value in sums.items()}


def centred(logits: torch.Tensor) -> torch.Tensor:
    """Return logits (positions by vocabulary) in float64, less their mean at each position."""
    return logits.double() - logits.mean(dim=1, keepdim=True, dtype=torch.double)


def judge(proof: LogitProof, merged: Path, exact: bool) -> str:
    """Return the verdict, "agree" or "inconclusive".

    exact: whether peft's merge is rounded like the merged folder; this is impossible if the weights are stored in a
    finer type than they are computed with.

    Raises VlmflowError for the first of the three rules that does not hold; with NaN none holds.
    """
    low, high = EFFECT_RANGE
    reference = "base + adapter" if proof.unrounded is None else "peft's merge with rounded weights"
    visible = low <= proof.effect_rounded <= high
    found = proof.effect_found
    right = low <= found <= high if visible else not exact or abs(found - proof.effect_rounded) <= SAME_EFFECT
    strays = not proof.deviation <= proof.allowed_deviation
    if strays and not exact and proof.unrounded is not None and math.isfinite(proof.deviation):
        return INCONCLUSIVE
    if strays:
        fault = f"differ by {proof.deviation:.3g} of their spread; rounding explains only {proof.allowed_deviation:.3g}"
    elif not (right and proof.effect > 0):
        fault = (
            f"show {found:.2f} times the adapter's effect, which is {proof.effect:.3g} of their spread; rounding "
            f"keeps {proof.effect_rounded:.2f} of it: the merge lost or doubled it"
        )
    elif proof.clear_disagreements > CLEAR_DISAGREEMENT * proof.clear_positions:
        fault = f"choose another token at {proof.clear_disagreements} of {proof.clear_positions} clear positions"
    else:
        return AGREE if visible else INCONCLUSIVE
    raise VlmflowError(
        f"{merged}: the logits of the merged weights, compared with {reference} in {proof.dtype} on {proof.device}, "
        + fault,
        "check that base and adapter belong together and that training changed the adapter; to rely on the proof "
        "by tensors alone, set verify.logits: false for the run",
    )
