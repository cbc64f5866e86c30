"""The proof by logits: the merged weights answer as the model did that was trained.

After a training of an adapter, peft applies it unmerged to the base, on real rows in ms-swift's form. After one of the
model's own weights, the trainer has stored some rows as it fed them to the model, with the logits. Plain transformers
loads the merged folder and answers the same rows. Nothing here shares code with the merge or the proof by tensors.

Three rules must hold.

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

import math
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import lines_meanwhile
from vlmflow.fetch.model_weights import read_header
from vlmflow.in_trainer.messages import LOGITS, POSITIONS
from vlmflow.merging.logits import free, load, logits_of
from vlmflow.merging.proof import LogitProof, QuantisationEffect
from vlmflow.merging.tensors import FLOAT_TYPES
from vlmflow.supervisor.report import released_files
from vlmflow.swift.row_attention import Inputs, rows_in

COMPARED_POSITIONS = 128
"""The number of a row's last positions that are compared after a training of an adapter; they depend on everything
before them. Those that a trainer stored have POSITIONS."""

NOT_QUANTISED: tuple[ModelPart, ...] = ("vision_tower", "aligner")
"""The parts that ms-swift leaves as they are, and the output head (arguments/base_args/quant_args.py,
`get_modules_to_not_convert`)."""

ROUNDING_FACTOR = {torch.float32: 64.0, torch.float16: 8.0, torch.bfloat16: 8.0}
"""The factor of one layer on rounding errors: 3 to 4 times the measured one."""

EFFECT_RANGE = (0.75, 1.25)
"""The share of the adapter's effect that the merged model must show, and that rounding must keep for a verdict."""

SAME_EFFECT = 0.25
"""The largest difference between the shares of two merges with the same rounding."""

CLEAR_DISAGREEMENT = 0.01
"""The largest share of the clear positions at which another token may be the best."""

BLOCK = 8
"""Positions that are compared at a time: with Qwen's vocabulary each of the four blocks takes 10 MB in float64."""

AGREE, INCONCLUSIVE, OPEN = "agree", "inconclusive", "open"


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
    stored = stored_type(merged)
    try:
        plain, expected, rounded = _of_adapter(base, adapter, inputs, device, dtype, stored)
        free(device)
        proof = _of_merged(merged, inputs, COMPARED_POSITIONS, (plain, expected, rounded), device, dtype)
        if quantisation:
            free(device)
            effect = _effect_of_quantisation(base, adapter, inputs, expected, device, dtype, quantisation)
            proof = msgspec.structs.replace(proof, quantisation=effect)
    except torch.OutOfMemoryError:
        raise _too_large(base, device) from None
    return _judged(proof, merged, stored)


@lines_meanwhile("the comparison of logits")
def verify_stored_logits(base: Path, released: Path, merged: Path, device: str, dtype: str) -> LogitProof:
    """Compare the logits that the trainer stored with those of the folder `merged`.

    base: the base model's folder, whose answers show what the training changed. released: the folder with the files
    that the training released. device, dtype: as in `verify_logits`; the trainer's type was the same.

    One model is in memory at a time. Raises VlmflowError as `verify_logits` does.
    """
    disable_progress_bar()
    stored = stored_type(merged)
    inputs = rows_in(load_file(released / LOGITS))
    expected = torch.cat([row.pop("logits") for row in inputs])
    try:
        model = load(base, device, dtype)
        plain = _answers(model, inputs, POSITIONS)
        if not _take_weights(model, released, stored):
            del model
            free(device)
            model = load(base, device, dtype, state_dict=dict(ChainMap(*_weights(released, stored))))
        rounded = _answers(model, inputs, POSITIONS)
        del model
        free(device)
        proof = _of_merged(merged, inputs, POSITIONS, (plain, expected, rounded), device, dtype)
    except torch.OutOfMemoryError:
        raise _too_large(base, device) from None
    return _judged(proof, merged, stored)


def stored_type(folder: Path) -> torch.dtype:
    """Return the coarsest type in which a folder stores weights."""
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    names = {entry.dtype for header in headers for entry in header.tensors.values()}
    return _coarsest(*(FLOAT_TYPES[name] for name in names.intersection(FLOAT_TYPES)))


def _coarsest(*types: torch.dtype) -> torch.dtype:
    """Return the type with the largest step between two numbers."""
    return max(types, key=lambda dtype: torch.finfo(dtype).eps)


def _too_large(folder: Path, device: str) -> VlmflowError:
    return VlmflowError(
        f"{folder}: the model and a row do not fit in the memory of {device}",
        "give the run more GPUs, or prove by tensors alone (runs.NAME.verify.logits: false)",
    )


def _answers(model: torch.nn.Module, inputs: Sequence[Mapping[str, torch.Tensor]], positions: int) -> torch.Tensor:
    """Return the logits of the last positions of all rows, one after the other: positions by vocabulary."""
    return torch.cat([logits_of(model, row, positions) for row in inputs])


def _of_adapter(
    base: Path, adapter: Path, inputs: Sequence[Inputs], device: str, dtype: str, stored: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits of the base, of base + adapter, and of peft's own merge rounded to the type `stored`."""
    model = PeftModel.from_pretrained(load(base, device, dtype), str(adapter)).eval()
    expected = _answers(model, inputs, COMPARED_POSITIONS)
    with model.disable_adapter():
        plain = _answers(model, inputs, COMPARED_POSITIONS)
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            weight = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
            weight.data = weight.data.float()  # otherwise peft rounds the update of experts before it adds it
            layer.merge()
            weight.data = weight.data.to(stored).to(getattr(torch, dtype))
    return plain, expected, _answers(model, inputs, COMPARED_POSITIONS)


def _effect_of_quantisation(
    base: Path,
    adapter: Path,
    inputs: Sequence[Inputs],
    expected: torch.Tensor,
    device: str,
    dtype: str,
    settings: QuantisationSettings,
) -> QuantisationEffect:
    """Compare the logits of the quantised base + adapter with those of the unquantised base + adapter (`expected`)."""
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
    answers = _answers(model, inputs, COMPARED_POSITIONS)
    difference, spread = _centred(answers) - _centred(expected), _centred(expected)
    return QuantisationEffect(
        layers=layers,
        type=settings.type,
        double=settings.double,
        deviation=(difference.square().mean() / spread.square().mean()).sqrt().item(),
        top1_agreement=(answers.argmax(dim=1) == expected.argmax(dim=1)).double().mean().item(),
    )


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


def _of_merged(
    merged: Path,
    inputs: Sequence[Inputs],
    positions: int,
    others: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    device: str,
    dtype: str,
) -> LogitProof:
    """Compare the logits of the merged folder with those of base, of base + adapter and of peft's merge (`others`)."""
    model = load(merged, device, dtype)
    answers = _answers(model, inputs, positions)
    allowed = allowed_deviation(model, stored_type(merged), getattr(torch, dtype))
    experts = bool(getattr(model.config.get_text_config(), "num_experts_per_tok", None))
    return compare(Logits(*others, answers), allowed, len(inputs), dtype, device, experts)


def allowed_deviation(model: PreTrainedModel, stored: torch.dtype, computed: torch.dtype) -> float:
    """Return the share of their spread by which rounding may change logits ("Deviation", above)."""
    layers = model.config.get_text_config().num_hidden_layers
    coarsest = _coarsest(stored, computed)
    return float(ROUNDING_FACTOR[coarsest] * torch.finfo(coarsest).eps / 2 * math.sqrt(layers))


class Logits(NamedTuple):
    """Logits, positions by vocabulary: of base, base + adapter, peft's merge, and the merged folder."""

    plain: torch.Tensor
    expected: torch.Tensor
    rounded: torch.Tensor
    merged: torch.Tensor


def compare(logits: Logits, allowed: float, rows: int, dtype: str, device: str, experts: bool = False) -> LogitProof:
    """Compare logits.

    experts: whether the model sends tokens to experts. The other parameters are fields of the result, whose verdict is
    still open.

    Raises VlmflowError if their shapes differ, or if there are no positions.
    """
    expected = logits.expected
    if len({each.shape for each in logits}) > 1 or not len(expected):
        shapes = ", ".join(str(tuple(each.shape)) for each in (logits.plain, expected, logits.merged))
        raise VlmflowError(
            f"the logits have the shapes {shapes} (base, base + adapter, merged)",
            "check that base and adapter belong together",
        )
    sums: defaultdict[str, float] = defaultdict(float)
    for blocks in zip(*(each.split(BLOCK) for each in logits), strict=True):
        for name, value in _sums(Logits(*blocks), allowed, experts).items():
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
        effect_found=share("merged · effect"),
        effect_rounded=share("rounded · effect"),
        top1_agreement=sums["same"] / len(expected),
        clear_positions=int(sums["clear"]),
        clear_disagreements=int(sums["clear disagreements"]),
        unrounded=root_mean_square("unrounded²") / spread if experts else None,
    )


def _sums(logits: Logits, allowed: float, experts: bool) -> dict[str, float]:
    """Return, for some positions, the sums that the proof is made of."""
    # A shift of all logits of a position changes no probability, so it does not count as a difference.
    plain, expected, rounded, merged = map(_centred, logits)
    reference = rounded if experts else expected
    (best, second), (choice, _) = (of_two.T for of_two in reference.topk(2, dim=1))
    clear = best - second > allowed * best
    same = choice == merged.argmax(dim=1)
    effect = expected - plain
    sums = {
        "expected²": expected.square().sum(),
        "deviation²": (merged - reference).square().sum(),
        "unrounded²": (merged - expected).square().sum(),
        "effect²": effect.square().sum(),
        "merged · effect": (merged - plain).mul_(effect).sum(),
        "rounded · effect": (rounded - plain).mul_(effect).sum(),
        "same": same.sum(),
        "clear": clear.sum(),
        "clear disagreements": (clear & ~same).sum(),
    }
    return {name: value.item() for name, value in sums.items()}


def _centred(logits: torch.Tensor) -> torch.Tensor:
    """Return logits (positions by vocabulary) in float64, less their mean at each position."""
    return logits.double() - logits.mean(dim=1, keepdim=True, dtype=torch.double)


def _judged(proof: LogitProof, merged: Path, stored: torch.dtype) -> LogitProof:
    """Return the proof with its verdict; raises VlmflowError as `judge` does."""
    exact = torch.finfo(stored).eps >= torch.finfo(getattr(torch, proof.dtype)).eps
    return msgspec.structs.replace(proof, verdict=judge(proof, merged, exact))


def judge(proof: LogitProof, merged: Path, exact: bool) -> str:
    """Return the verdict, "agree" or "inconclusive".

    exact: whether peft's merge is rounded like the merged folder; this is impossible if the weights are stored in a
    finer type than they are computed with.

    Raises VlmflowError for the first of the three rules that does not hold; with NaN none holds.
    """
    low, high = EFFECT_RANGE
    reference = "base + adapter" if proof.unrounded is None else "peft's merge with rounded weights"
    visible = low <= proof.effect_rounded <= high
    shown = proof.effect_found
    right = low <= shown <= high if visible else not exact or abs(shown - proof.effect_rounded) <= SAME_EFFECT
    strays = not proof.deviation <= proof.allowed_deviation
    if strays and not exact and proof.unrounded is not None and math.isfinite(proof.deviation):
        return INCONCLUSIVE
    if strays:
        fault = f"differ by {proof.deviation:.3g} of their spread; rounding explains only {proof.allowed_deviation:.3g}"
    elif not (right and proof.effect > 0):
        fault = (
            f"show {shown:.2f} times the adapter's effect, which is {proof.effect:.3g} of their spread; rounding "
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
