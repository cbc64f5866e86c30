"""What a training leaves to later stages: its account, the gate's, and the files that it releases.

The accounts are `report.json`, and `gate.json` of the gate between the smoke run and the full run. Released are the
adapter of a checkpoint, or the model's own weights with what proves them.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vlmflow.config.run_settings import LoraSettings
from vlmflow.config.strategies import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LORA, MODEL_INDEX, MODEL_WEIGHTS, Tuner
from vlmflow.core.account import read_account, refuse_changed
from vlmflow.core.errors import VlmflowError, counted
from vlmflow.core.files import link_or_copy, sha256_of
from vlmflow.in_trainer.messages import LOGITS, TRAINED, StepLoss
from vlmflow.lengths.summary import FittedSplit, SplitLengths
from vlmflow.swift.arguments import Passes
from vlmflow.swift.model_layers import Layers

EVALUATION_COST = 0.5
"""The time of an evaluated batch relative to a trained one, where none was measured: the forward pass alone."""


SHARD = re.compile(r"model-[0-9]{1,9}-of-[0-9]{1,9}\.safetensors")


class Best(msgspec.Struct, frozen=True):
    """The checkpoint with the lowest validation loss: its optimizer step, and that loss in nats per token."""

    step: int
    eval_loss: float


class EndedEarly(msgspec.Struct, frozen=True):
    """Why a training ended before its last step: an evaluation after the other had no new lowest validation loss.

    evaluations: how many in a row (`train.early_stop_after`). step, eval_loss: the evaluation with the lowest loss, in
    nats per token.
    """

    evaluations: int
    step: int
    eval_loss: float


class TrainingDigests(msgspec.Struct, frozen=True):
    """The digests of a training's inputs and outputs.

    job: `Training.digest`, the name of its run folder. data, model: `TrainingData.digest`, `BaseModel.digest`.
    released: SHA-256 of the released files of the best checkpoint, by name. progress: that of the trainer's events.
    """

    job: str
    data: str
    model: str
    released: dict[str, str]
    progress: str


class EpochPlan(msgspec.Struct, frozen=True):
    """The micro-batches of an epoch.

    micro_batches: of each process. padding: tokens of it, over all processes. full_rate: the share of the speed that
    full micro-batches on all processes would have. one_row_each: so many times as long one row per pass would take.
    """

    micro_batches: int
    padding: int
    full_rate: float
    one_row_each: float


class StepPlan(msgspec.Struct, frozen=True):
    """How a training cuts its steps (`plan.json` in its run folder); each of its processes makes the same plan.

    passes: the number of tokens, and whether activations are computed again; a resume keeps both. padded: whether rows
    are filled up to the longest of their micro-batch. digest: SHA-256 over what the plan is a function of. epochs: by
    number, the first `plan.DESCRIBED`. picture_tokens: the most in a micro-batch, also of an evaluation.
    """

    passes: Passes
    padded: bool
    digest: str
    epochs: list[EpochPlan]
    picture_tokens: int

    def in_words(self) -> str:
        """Return what the plan is, and what it saves on a GPU, for people."""
        first = self.epochs[0]
        padding = f", {first.padding:,} tokens of padding" if self.padded else ", no padding"
        return (
            f"{counted(first.micro_batches, 'micro-batch')} of at most {self.passes.micro_batch_tokens:,} tokens in "
            f"an epoch on each process{padding}; on a GPU {first.full_rate:.0%} of the full rate, and one row per pass "
            f"would take {first.one_row_each:.1f} times as long"
        )


class TrainingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a finished training (`checkpoints/RUN/{smoke,full}/report.json`).

    steps, target: optimizer steps made, and those of the whole run; fewer only if it ended early (null: it did not).
    sessions: how often trainers were started. world_size: parallel trainers.
    seconds: spent in training steps and evaluations over all sessions, without start-up. tokens: those trained on,
    without padding. tokens_per_second: null if no time was measured.
    peak_memory: bytes per process of the last session; none if that did not end by itself.
    layers: of the model, by kind. losses: of every step; left out in `provenance.json`. eval_losses: of every
    evaluation, the mean over all trained tokens of the val split. eval_rows, eval_tokens: how many rows and trained
    tokens an evaluation has.
    tuner, strategy: their names. experimental: what no test proves, for people. settings: the run's `train` block.
    deepspeed: DeepSpeed's settings, if the strategy takes them. plan: of its micro-batches; null without them.
    versions: of packages, by name.
    """

    steps: int
    target: int
    ended_early: EndedEarly | None
    sessions: int
    world_size: int
    parallel_mode: str
    device: str
    seconds: float
    tokens: int
    tokens_per_second: float | None
    peak_memory: list[int]
    layers: list[Layers]
    losses: list[StepLoss] | UnsetType = UNSET
    eval_losses: list[StepLoss]
    eval_rows: int
    eval_tokens: int
    best: Best
    settings: dict[str, Any]
    tuner: str
    strategy: str
    deepspeed: dict[str, Any] | None = None
    plan: StepPlan | None = None
    experimental: list[str]
    digests: TrainingDigests
    versions: dict[str, str]
    run_folder: str


class Check(msgspec.Struct, frozen=True):
    """One check of the gate, its result, and the figures behind it."""

    check: str
    passed: bool
    detail: str


class Pace(msgspec.Struct, frozen=True):
    """The time of a step of n tokens, over all processes: step_seconds + n · token_seconds. steps: those it comes from.

    evaluation_cost: the time of an evaluated batch relative to a trained one.
    """

    step_seconds: float
    token_seconds: float
    steps: int
    evaluation_cost: float = EVALUATION_COST


class FullRun(msgspec.Struct, frozen=True):
    """The estimate of the full run from the steps of the smoke run.

    left_over: the ids of the first rows that the run does not train on. tokens: those trained on. evaluated_tokens:
    those of all evaluations. readable: the estimate for people. pace: of the smoke run's steps. rows_left_over: how
    many rows it does not train on. evaluations: how often it is evaluated. An account of before has 0 for both.
    """

    steps: int
    left_over: list[str]
    tokens: int
    evaluated_tokens: int
    seconds: int
    readable: str
    pace: Pace | None = None
    rows_left_over: int = 0
    evaluations: int = 0


class PlannedMerge(msgspec.Struct, frozen=True):
    """The plan of a merge of the smoke run's adapter.

    tensors, touched: the number of the base's tensors, and of those that the adapter changes. layers: the number of
    touched ones of each kind. rounding_leaves: see `MergePlan.rounding_leaves`. logits_may_be_inconclusive: whether
    rounding keeps too little.
    """

    tensors: int
    touched: int
    layers: dict[str, int]
    rounding_leaves: float | None
    logits_may_be_inconclusive: bool


class Gate(msgspec.Struct, frozen=True):
    """The verdict on a smoke run (`checkpoints/RUN/smoke/gate.json`).

    peak_memory, tokens_per_second: as in the smoke run's report. lengths: of all rows of the train split that fit.
    fitted: what became of the rows, by split ("train", "val"). passes: what the smoke run found for the word `auto`;
    null if the settings have numbers. plan: of the full run's micro-batches; null without them. without_adapter: the
    share of the model's weights in layers that get no adapter; null with tuner full.
    """

    passed: bool
    checks: list[Check]
    peak_memory: list[int]
    tokens_per_second: float | None
    lengths: SplitLengths
    full_run: FullRun
    fitted: dict[str, FittedSplit]
    merge: PlannedMerge
    passes: Passes | None = None
    plan: StepPlan | None = None
    without_adapter: float | None = None

    @property
    def left_out(self) -> int:
        """How many rows of train and val were left out, because they are too long."""
        return sum(split.left_out for split in self.fitted.values())

    @property
    def shortened(self) -> int:
        """How many rows of train and val were shortened by their oldest attempts."""
        return sum(split.shortened for split in self.fitted.values())


def kinds_of(tuner: Tuner) -> list[str]:
    """Return the files that each checkpoint has, as patterns of which each matches at least one file."""
    if tuner.trains_adapter:
        return [ADAPTER_WEIGHTS, ADAPTER_CONFIG]
    return ["model*.safetensors", TRAINED, LOGITS]


def released_files(folder: Path, tuner: Tuner) -> list[str]:
    """Return the names of the files that a checkpoint releases, sorted; its weights can be opened.

    Raises OSError, ValueError or SafetensorError if one is missing or damaged.
    """
    if tuner.trains_adapter:
        weights, described = [ADAPTER_WEIGHTS], [ADAPTER_CONFIG]
    elif (folder / MODEL_INDEX).exists():
        weights, described = [*_shards(folder / MODEL_INDEX), LOGITS], [MODEL_INDEX, TRAINED]
    else:
        weights, described = [MODEL_WEIGHTS, LOGITS], [TRAINED]
    for name in described:
        json.loads((folder / name).read_bytes())
    for name in weights:
        _open_every_tensor(folder / name)
    return sorted([*weights, *described])


class _AdapterConfig(msgspec.Struct):
    """The used fields of `adapter_config.json` (peft's `LoraConfig`)."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False


def refuse_other_adapter(checkpoint: Path, lora: LoraSettings) -> None:
    """Raise VlmflowError with file, key and values if a checkpoint's adapter is not of the settings.

    The merge scales the adapter by this file.
    """
    file = checkpoint / ADAPTER_CONFIG
    config = read_account(file, _AdapterConfig)
    settings = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "use_dora": lora.dora}
    for key, expected in settings.items():
        if (value := getattr(config, key)) != expected:
            raise VlmflowError(
                f"{file}: {key} is {value}, but the run trained with {expected}",
                "something changed the file after the training: restore it, or remove the folder "
                f"{checkpoint.parent.parent} and run the same command again, which trains from the first step",
            )


def release(folder: Path, target: Path, tuner: Tuner = LORA) -> None:
    """Put a checkpoint's released files into the folder `target`.

    An adapter is copied, readable by others (transformers writes weights with mode 0600). A model's weights are linked:
    they may have a hundred GB, and nothing changes a checkpoint's files. On another disk they are copied.
    """
    for name in released_files(folder, tuner):
        if tuner.trains_adapter:
            shutil.copyfile(folder / name, target / name)
        else:
            (folder / name).chmod(0o644)
            link_or_copy(folder / name, target / name)


def digests_of(folder: Path, tuner: Tuner = LORA) -> dict[str, str]:
    """Return the SHA-256 of a checkpoint's released files, by name."""
    return {name: sha256_of(folder / name) for name in released_files(folder, tuner)}


def read_release(full: Path) -> TrainingReport:
    """Return the report in `checkpoints/RUN/full`, after checking that the released files are still the same.

    Raises VlmflowError with the names of files that have changed since the training.
    """
    report = read_account(full / "report.json", TrainingReport)
    refuse_changed(
        "released files",
        full,
        report.digests.released,
        f"adapters/{full.parent.name}",
        f"remove {full} and run the same command again: it is copied from its run folder",
    )
    return report


class _Index(msgspec.Struct):
    """The used field of transformers' index of shards."""

    weight_map: dict[str, str]


def _shards(index: Path) -> list[str]:
    names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    if other := [name for name in names if not SHARD.fullmatch(name)]:
        raise ValueError(f"{index}: {other[0]!r} is not the name of a shard")
    return sorted(names)


def _open_every_tensor(file: Path) -> None:
    """Raise an error if the file lacks a part of a tensor in its header."""
    from safetensors import safe_open  # the environment `data` lacks it, and asks for runs alone

    with safe_open(file, framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (no mapping)
            tensors.get_slice(name)
