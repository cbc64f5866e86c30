"""A training as JSON, in which node 0 tells the other nodes of it."""

from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec

from vlmflow.config.deepspeed_json import check_deepspeed
from vlmflow.config.model_types import check_model_type
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import strategy_of
from vlmflow.config.tuners import tuner_of
from vlmflow.swift.arguments import Training


class _Strategy(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    deepspeed: dict[str, Any] | None


BY_NAME = {"device": Literal["cuda", "cpu"], "strategy": _Strategy, "tuner": str}
"""The fields of a `Training` that are other types in a launch file."""

Fields = msgspec.defstruct(
    "Fields", [*(get_type_hints(Training, include_extras=True) | BY_NAME).items()], forbid_unknown_fields=True
)
"""The fields of a `Training` in a launch file."""


def as_data(training: Training) -> dict[str, Any]:
    """Return a training as JSON's own types, for the other nodes: with absolute places, and names in place of code."""
    strategy = _Strategy(training.strategy.name, training.strategy.deepspeed)
    named = vars(training) | {"strategy": strategy, "tuner": training.tuner.name}
    data: dict[str, Any] = msgspec.to_builtins(named, enc_hook=_encode)
    return data


def from_data(data: dict[str, Any]) -> Training:
    """Return the training of `as_data`. Raises ValueError if a value is not one that a configuration may have."""
    fields = msgspec.structs.asdict(msgspec.convert(data, Fields, dec_hook=_decode))
    check_model_type(fields["model"].model_type)
    name, deepspeed = msgspec.structs.astuple(fields["strategy"])
    strategy = strategy_of(name, deepspeed and check_deepspeed(deepspeed))
    return Training(**fields | {"strategy": strategy, "tuner": tuner_of(fields["tuner"])})


def _encode(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, TrainSettings) else str(value.absolute())


def _decode(kind: type, value: Any) -> Any:
    if kind is TrainSettings:
        return TrainSettings.model_validate(value)
    if not isinstance(value, str) or not Path(value).is_absolute():
        raise ValueError(f"{value!r:.200}: not an absolute path")
    return Path(value)
