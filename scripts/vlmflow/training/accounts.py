"""The accounts of a training (`report.json`), and of the gate between the smoke run and the full run (`gate.json`)."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vlmflow.lengths.accounts import FittedSplit, SplitLengths

StepLoss = tuple[int, float]
"""An optimizer step, and the loss there in nats per token."""


class Best(msgspec.Struct, frozen=True):
    """The checkpoint with the lowest validation loss: its optimizer step, and that loss in nats per token."""

    step: int
    eval_loss: float


class TrainingDigests(msgspec.Struct, frozen=True):
    """What a training was made of, and what it made.

    job: `Training.digest`, the name of its run folder. data, model: `TrainingData.digest`, `BaseModel.digest`.
    adapter, adapter_config: SHA-256 of the best checkpoint's files.
    """

    job: str
    data: str
    model: str
    adapter: str
    adapter_config: str


class TrainingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished training was (`checkpoints/RUN/{smoke,full}/report.json`).

    steps, target: optimizer steps made, and those of the whole run; fewer only where it ended early.
    sessions: how often trainers were started. world_size: trainers side by side.
    seconds: spent in training steps and evaluations over all sessions, without start-up. tokens: those trained on,
    padding not counted. tokens_per_second: null where no time was measured.
    peak_memory: bytes per process of the last session; none where it did not end by itself.
    losses: of every step; left out in `provenance.json`. eval_losses: of every evaluation, on the val split.
    settings: the run's `train` block. versions: of packages, by name.
    """

    steps: int
    target: int
    ended_early: bool
    sessions: int
    world_size: int
    parallel_mode: str
    device: str
    seconds: float
    tokens: int
    tokens_per_second: float | None
    peak_memory: list[int]
    losses: list[StepLoss] | UnsetType = UNSET
    eval_losses: list[StepLoss]
    best: Best
    settings: dict[str, Any]
    strategy: str
    digests: TrainingDigests
    versions: dict[str, str]
    run_folder: str


class Check(msgspec.Struct, frozen=True):
    """One question that the gate asks, the answer, and what it rests on."""

    check: str
    passed: bool
    detail: str


class FullRun(msgspec.Struct, frozen=True):
    """What the full run will take, by the speed of the smoke run.

    left_over: the rows that no pass trains on, by id. tokens: trained on. evaluated_tokens: of all evaluations.
    readable: all of it for people.
    """

    steps: int
    left_over: list[str]
    tokens: int
    evaluated_tokens: int
    seconds: int
    readable: str


class PlannedMerge(msgspec.Struct, frozen=True):
    """What a merge of the smoke run's adapter would do.

    tensors, touched: of the base, and those that the adapter changes. layers: how many of each kind are touched.
    rounding_leaves: see `MergePlan.rounding_leaves`. logits_may_be_inconclusive: rounding leaves too little.
    """

    tensors: int
    touched: int
    layers: dict[str, int]
    rounding_leaves: float | None
    logits_may_be_inconclusive: bool


class Gate(msgspec.Struct, frozen=True):
    """The verdict over a smoke run (`checkpoints/RUN/smoke/gate.json`).

    peak_memory, tokens_per_second: as in the smoke run's report. lengths: of all rows of the train split that fit.
    fitted: what became of the rows, by split ("train", "val").
    """

    passed: bool
    checks: list[Check]
    peak_memory: list[int]
    tokens_per_second: float | None
    lengths: SplitLengths
    full_run: FullRun
    fitted: dict[str, FittedSplit]
    merge: PlannedMerge

    @property
    def left_out(self) -> int:
        """How many rows of train and val were left out, because they are too long."""
        return sum(split.left_out for split in self.fitted.values())

    @property
    def shortened(self) -> int:
        """How many rows of train and val were shortened by their oldest attempts."""
        return sum(split.shortened for split in self.fitted.values())
