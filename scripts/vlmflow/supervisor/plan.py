"""Builds a training from a run's settings and the outputs of earlier stages, and plans its micro-batches.

The plan is kept in the run folder, with what it was made of, and what it saves.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from math import ceil
from pathlib import Path

from vlmflow.config.machine_needs import refuse_missing, refuse_missing_compiler
from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.settings import PartOf
from vlmflow.config.strategies import strategy_of, tuner_of
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError, counted, log
from vlmflow.core.files import count_lines
from vlmflow.lengths.count import read_lengths
from vlmflow.lengths.steps import FEWEST_TOKENS, Plan, Planner, Steps, read_sizes, scheduled, size_of
from vlmflow.lengths.summary import fitted_data, fitted_rows, refuse_other_texts
from vlmflow.supervisor.report import EpochPlan, StepPlan
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.swift.adapter_targets import adapter_targets
from vlmflow.swift.arguments import BaseModel, Passes, Training
from vlmflow.swift.template_texts import named

PLAN = "plan.json"
"""The file of a run folder with a `StepPlan`."""

COUNTED = 100
"""So many steps stand for all of them."""

DESCRIBED = 10
"""So many epochs are described; the others are alike."""


def plan_of(training: Training) -> Plan:
    """Return the plan of a training's steps; it has micro-batches."""
    sizes, most = read_sizes(training.data.lengths("train")), training.micro_batch_tokens or 0
    planner = Planner(sizes, training.ranks, most, training.pads_rows)
    return Plan(planner, training.rows_per_step, training.settings.seed)


def describe(training: Training) -> StepPlan:
    """Return the account of a training's plan; it has micro-batches."""
    plan = plan_of(training)
    pictures = [row.picture_tokens for row in read_lengths(training.data.lengths("train"))]
    val = list(read_lengths(training.data.lengths("val")))
    evaluated = replace(plan.planner, sizes=[size_of(row) for row in val]).step(range(len(val)))
    most = max(sum(val[row].picture_tokens for row in batch) for batches in evaluated for batch in batches)
    described = []
    for epoch in described_epochs(training, plan):
        account, largest = _describe_epoch(plan, epoch, pictures)
        described.append(account)
        most = max(most, largest)
    return StepPlan(_passes(training), plan.planner.padded, _digest(plan), described, most)


def described_epochs(training: Training, plan: Plan) -> range:
    """Return the epochs of a training that stand for all of them."""
    steps = Steps.of(len(plan.planner.sizes), training.settings, training.ranks)
    return range(min(DESCRIBED, ceil(steps.total / steps.per_epoch)))


def kept_plan(training: Training, folder: RunFolder, label: str) -> StepPlan | None:
    """Return the plan of a training, with the passes that it began with; None without micro-batches.

    label: the stage and run, for messages.
    """
    if training.micro_batch_tokens is None:
        return None
    plan = read_plan(folder)
    if plan is not None:
        training = replace(training, passes=plan.passes)
    # Rows measured again may share a sequence now; and what a run sets itself counts, not what the file says of it.
    if plan is None or (plan.digest, plan.passes) != (_digest(plan_of(training)), _passes(training)):
        plan = describe(training)
        write_account(folder.path / PLAN, plan)
    log.info(f"{label}: {plan.in_words()}")
    return plan


def passes_per_step(plan: Plan) -> float:
    """Return the micro-batches that each process has in a step, on average over the first steps."""
    counts = [len(step[0]) for step in islice(plan.steps(0), COUNTED)]
    return sum(counts) / len(counts)


def read_plan(folder: RunFolder) -> StepPlan | None:
    """Return the plan in a run folder; None if its training has none."""
    file = folder.path / PLAN
    return read_account(file, StepPlan) if file.is_file() else None


def _describe_epoch(plan: Plan, epoch: int, pictures: list[int]) -> tuple[EpochPlan, int]:
    """Return the account of an epoch, and the most picture tokens in one of its micro-batches."""
    planner, sizes = plan.planner, plan.planner.sizes
    processes = planner.processes
    cost = count = size = with_padding = one_each = most = 0
    for rows in plan.rows(epoch):
        step = planner.step(rows)
        count += len(step[0])
        size += sum(sizes[row] for row in rows)
        for together in zip(*step, strict=True):
            cost += planner.cost(together)
            with_padding += sum(map(planner.tokens, together))
            most = max(most, *(sum(pictures[row] for row in batch) for batch in together))
        one_each += sum(
            max(FEWEST_TOKENS, *(sizes[row] for row in rows[at : at + processes]))
            for at in range(0, len(rows), processes)
        )
    cost = cost or 1  # fewer rows than processes
    return EpochPlan(count, with_padding - size, round(size / processes / cost, 3), round(one_each / cost, 2)), most


def _passes(training: Training) -> Passes:
    return Passes(training.micro_batch_tokens or 0, training.gradient_checkpointing)


def _digest(plan: Plan) -> str:
    planner = plan.planner
    made_of = [planner.processes, planner.most, planner.padded, plan.rows_per_step, plan.seed]
    return hashlib.sha256(repr(made_of).encode() + array("I", planner.sizes).tobytes()).hexdigest()


def plan_training(
    settings: PartOf[FlatRun], rows: Path, model: Path, picture_store: Path, manifests: Sequence[Path]
) -> Training:
    """Build the training of a run.

    rows: those that fit (fitted/RUN). model: folder with the base model's manifest.
    picture_store: the folder with all picture stores. manifests: the image manifests of the rows' pictures; none if
    rows have no pictures.

    Raises VlmflowError if rows, pictures or model have changed, rows were fitted to more tokens, there are fewer rows
    than processes, the adapter and the model's experts do not go together, or this machine lacks something that the
    settings need.
    """
    refuse_missing(settings.train)
    data = fitted_data(rows, settings.train.max_length, picture_store, manifests)
    base = BaseModel.read(model, settings.model_type)
    refuse_other_texts(base.folder, fitted_rows(rows).model, rows)
    settings = named(settings, base.folder)
    base = replace(base, model_type=settings.model_type)
    strategy, tuner = strategy_of(settings.strategy, settings.deepspeed), tuner_of(settings.tuner)
    refuse_missing_compiler(strategy)
    processes, nodes = settings.processes, settings.nodes
    train = settings.train.on_device(settings.device, nodes * processes)  # a stage may be called with other settings
    count = count_lines(data.train)
    if not Steps.of(count, train, nodes * processes).rows:
        raise VlmflowError(
            f"{data.train}: {counted(count, 'row')} for {nodes * processes} processes; each must train one at least",
            "lower runs.NAME.processes or nodes, or train on more rows",
        )
    train = scheduled(train, count, nodes * processes)
    targets = adapter_targets(base.folder, train, tuner)
    return Training(data, base, train, settings.device, processes, strategy, tuner, nodes, targets=targets)
