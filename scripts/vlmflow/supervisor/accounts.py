"""The accounts of a training (`report.json`), and of the gate between the smoke run and the full run (`gate.json`)."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vlmflow.core.printable import counted
from vlmflow.in_trainer.messages import StepLoss
from vlmflow.lengths.accounts import FittedSplit, SplitLengths
from vlmflow.swift.arguments import Passes
from vlmflow.swift.model_layers import Layers

EVALUATION_COST = 0.5
"""The time of an evaluated batch relative to a trained one, where none was measured: the forward pass alone."""


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
