"""The settings of a run as its stages take them.

What a training's settings are, beside the defaults or those of another training.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vlmflow.config.after_training import EvaluateSettings
from vlmflow.config.run_settings import RunSettings, TrainSettings


class FlatRun(RunSettings, TrainSettings, EvaluateSettings, defer_build=True):
    """A run's own settings beside those of its blocks `train` and `evaluate`; rules pass parts."""

    model_type: str
    """The kind of its model."""


OF_RUN = ("device", "tuner", "strategy", "deepspeed", "processes")
"""A run's keys, besides `train`, that say how it trains; `processes` are those of all nodes."""

SCHEDULE = ("checkpoint_steps", "evaluation_steps")

Differences = dict[str, tuple[str, str]]
"""Two values for people by dotted key: those of a training, and of what it is compared with."""


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings with dotted keys; lists as JSON."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{above}{key}.")
        else:
            values[f"{above}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return values


def flattened(train: Mapping[str, Any], of_run: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return a training's settings by dotted key.

    train: its `train` block, as a training records it: with numbers of steps also where the run set
    none. of_run: the values of OF_RUN. steps: the training's, from which these numbers follow.
    """
    train = {"micro_batch_tokens": None, **train}  # trainings of before there were micro-batches do not name them
    derived = TrainSettings().scheduled(steps)
    if all(train.get(key) == getattr(derived, key) for key in SCHEDULE):
        train = {**train, **dict.fromkeys(SCHEDULE)}
    return DEFAULTS | flat({**of_run, "train": train})


def differing(settings: Mapping[str, Any], others: Mapping[str, Any]) -> Differences:
    """Return in which settings two trainings differ, as `flattened` gives them."""
    keys = dict.fromkeys([*settings, *others])
    return {
        key: (_text(settings.get(key)), _text(others.get(key))) for key in keys if settings.get(key) != others.get(key)
    }


def own_settings(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings that differ from the defaults: key and value for people.

    A training records what the default word `auto` stands for where nothing is to be found (`TrainSettings.on_device`).
    """
    own = {key: settings[f"train.{key}"] for key in ("group_by_length", "sequence_parallel", "micro_batch_tokens")}
    machine = settings["device"], settings["processes"]
    tokens = TrainSettings().model_copy(update=own | {"micro_batch_tokens": "auto"}).on_device(*machine)
    again = TrainSettings().model_copy(update=own).on_device(*machine)
    words = {
        "train.micro_batch_tokens": tokens.micro_batch_tokens,
        "train.gradient_checkpointing": again.gradient_checkpointing,
    }
    return [(key, value) for key, (value, _) in differing(settings, DEFAULTS | words).items()]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _defaults() -> Iterator[tuple[str, Any]]:
    for key in OF_RUN:
        yield key, RunSettings.model_fields[key].default
    yield from flat({"train": TrainSettings().model_dump(mode="json")}).items()


DEFAULTS = dict(_defaults())
"""The defaults of all these settings."""
