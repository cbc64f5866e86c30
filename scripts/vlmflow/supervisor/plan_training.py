"""Builds a training from a run's settings and the outputs of earlier stages."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vlmflow.config.run_blocks import TrainBlock
from vlmflow.config.strategies import strategy_of
from vlmflow.config.tuners import tuner_of
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import count_lines
from vlmflow.core.printable import counted
from vlmflow.lengths.fitted import fitted_data, fitted_rows
from vlmflow.lengths.text_files import refuse_other_texts
from vlmflow.supervisor.compiler import refuse_missing_compiler
from vlmflow.supervisor.machine_needs import refuse_missing
from vlmflow.supervisor.steps import Steps, scheduled
from vlmflow.swift.adapter_targets import adapter_targets
from vlmflow.swift.arguments import BaseModel, Training
from vlmflow.swift.template_texts import named


def plan_training(
    settings: TrainBlock, rows: Path, model: Path, picture_store: Path, manifests: Sequence[Path]
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
