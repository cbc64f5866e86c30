"""The settings of a search for a run's settings: which are searched, how often, and within which limits.

The steps of a search: its rounds, each in rungs, and how many trials each has.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

from vlmflow.config.run_settings import ROWS_OF_A_STEP, RunSettings, TrainSettings
from vlmflow.config.settings import EXPONENT_FORM, Name, Number, Positive, Seed, Settings
from vlmflow.config.strategies import tuner_of
from vlmflow.config.yaml_file import shown

DATA = "trials would not train on the same rows"
SCHEDULE = "rungs stop trials at the same share of one schedule; set it in the run"
MEASURE = "trials' losses would not measure the same"
SPEED = "it changes speed or memory, not the loss; set it in the run"

SEARCHED: dict[str, str | None] = {
    "learning_rate": None,
    "lr_scheduler": None,
    "warmup_ratio": None,
    "weight_decay": None,
    "per_device_batch_size": None,
    "gradient_accumulation_steps": None,
    "rows_per_step": "search per_device_batch_size and gradient_accumulation_steps",
    "lora.rank": None,
    "lora.alpha": None,
    "lora.dropout": None,
    "lora.rslora": None,
    "lora.dora": None,
    "quantisation.type": None,
    "quantisation.double": None,
    "lora.target_modules": "its values are lists; make a run for each",
    "lora.experts": "it decides what is trained, and the memory that it takes; make a run for each",
    "freeze": "its values are lists; make a run for each",
    "epochs": SCHEDULE,
    "max_steps": SCHEDULE,
    "max_length": DATA,
    "group_by_length": DATA,
    "image_max_tokens": "trials would not see the same pictures",
    "dtype": MEASURE,
    "seed": "the search would find a lucky draw, not a setting",
    "checkpoint_steps": SCHEDULE,
    "evaluation_steps": SCHEDULE,
    "early_stop_after": SCHEDULE,
    "keep_checkpoints": SCHEDULE,
    "swift_args": "they may change rows, lengths and losses; make a run for each",
    **dict.fromkeys(
        (
            *(
                "micro_batch_tokens",
                "hang_minutes",
                "gradient_checkpointing",
                "attention",
                "liger",
                "sequence_parallel",
            ),
            "dataloader_workers",
        ),
        SPEED,
    ),
}
"""Every key of `train`: null if a search may choose it, otherwise why not."""

MOST_STEPS = 200
"""Each step needs the one before: Snakemake's plan calls itself for each, and a dry run of so many takes 20 s."""

Choice = bool | int | float | str


class RangeSettings(Settings):
    """The values of a number from `low` to `high`, both included; whole ones if the key is a whole number."""

    low: Number
    """The lowest value."""

    high: Number
    """The highest value."""

    log: bool = False
    """Whether factors count rather than differences, as for a learning rate; `low` must be above 0."""


class SearchLimits(Settings):
    """What a trial, and the whole search, may need; null for no limit."""

    mem_mb: Positive | None = None
    """A trial's peak memory in MB (10⁶ bytes): of a GPU, on the CPU of a trainer's process. One above it is no result:
    it does not go on to the next rung, is never the best, and the study learns to avoid it."""

    hours: Annotated[Number, Field(gt=0, le=10**6)] | None = None
    """Hours that one trial may take over all its rungs, loading and evaluation included; then its training is stopped.
    A trial that took more is never the best."""

    gpu_hours: Annotated[Number, Field(gt=0, le=10**8)] | None = None
    """GPU-hours of all trials together (on the CPU: hours of trainers). A search that is estimated to need more does
    not start; one that has spent them asks nothing more."""


Objective = Literal["eval_loss", "uses_feedback"]
"""By what trials are compared (`search.NAME.objective`)."""


class SearchSettings(Settings):
    """One search: the name becomes `search/NAME` (docs/search.md)."""

    run: Name
    """A name under `runs`; its settings are those of every trial, but for the ones that are searched."""

    space: Annotated[dict[str, RangeSettings | list[Choice]], Field(min_length=1)]
    """What is searched: keys of `train`, with a dot for those of its blocks (`lora.rank`), each with a list of values
    (`[8, 16]`) or a range of numbers: `{low: 1e-5, high: 1e-3}`, both included. With `log: true` in it, factors count
    rather than differences, as for a learning rate."""

    @pydantic.field_validator("objective", mode="before")
    @classmethod
    def _refuse_the_former_objective(cls, value: Any) -> Any:
        if value == "learned":
            raise ValueError(
                "learned was a loss compared with the base's; now trials are compared by the share of rows in which "
                "feedback helps, for which the base does not count: set uses_feedback"
            )
        return value

    @pydantic.field_validator("space", mode="before")
    @classmethod
    def _names_keys_with_their_values(cls, space: Any) -> Any:
        """Say how to write a block, or a single value, which would be read as a broken range."""
        for key, values in space.items() if isinstance(space, dict) else ():
            if isinstance(values, dict) and len({"low", "high"} & values.keys()) == 1:
                raise ValueError(f"{key}: a range has low and high: {shown(values)}")
            if isinstance(values, dict) and not {"low", "high"} & values.keys():
                inner = next(iter(values), "key")
                raise ValueError(f"{key} is a block; name each of its keys with a dot, as in {key}.{inner}: [4, 8]")
            if not isinstance(values, dict | list | RangeSettings):
                raise ValueError(f"{key}: {shown(values)} leaves nothing to choose; list values, or give a range")
        return space

    rounds: Annotated[int, Field(ge=1, le=200), EXPONENT_FORM] = 4
    """How often new trials are chosen, each time knowing all results so far; the first five are drawn at random."""

    together: Annotated[int, Field(ge=1, le=100), EXPONENT_FORM] = 3
    """New trials of a round, and in the first round trial 0 with the run's own settings besides. They train at the same
    time if there are as many GPUs, and know nothing of each other's results."""

    rungs: Annotated[int, Field(ge=1, le=5), EXPONENT_FORM] = 1
    """In how many steps a round's trials train. With more than one, only the best third goes on to the next, which
    trains three times as long, and trial 0; 1 trains every trial to its end."""

    objective: Objective = "eval_loss"
    """What is best. eval_loss: the lowest validation loss. uses_feedback: the highest share of rows of val whose own
    feedback makes the right answer likelier than another row's does (docs/evaluation.md), for data sets with feedback.
    Neither sees the test split."""

    limits: SearchLimits = SearchLimits()

    seed: Seed = 42
    """Decides the trials: the same seed and the same results give the same trials."""

    @pydantic.model_validator(mode="after")
    def _steps_can_be_planned(self) -> Self:
        if self.rounds * self.rungs > MOST_STEPS:
            raise ValueError(
                f"rounds, rungs: {self.rounds} times {self.rungs} steps, each after the other, are more than Snakemake "
                f"plans; set at most {MOST_STEPS} together"
            )
        return self


@dataclass(frozen=True)
class Dimension:
    """A searched key. low, high, log: those of a range of numbers, whole ones if `whole`; choices: otherwise."""

    key: str
    whole: bool = False
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Choice, ...] = ()

    @property
    def first(self) -> Choice:
        """The first of its values."""
        return self.choices[0] if self.low is None else self.low


def dimensions(space: Mapping[str, RangeSettings | Sequence[Choice]]) -> list[Dimension]:
    """Return a checked space, sorted by key, with values of the keys' own types ("1e-4" of YAML is a text)."""
    checked = []
    for key, values in sorted(space.items()):
        if isinstance(values, RangeSettings):
            low, high = _typed(key, values.low), _typed(key, values.high)
            checked.append(Dimension(key, isinstance(low, int), low, high, values.log))
        else:
            checked.append(Dimension(key, choices=tuple(_typed(key, value) for value in values)))
    return checked


def trained_with(train: TrainSettings, values: Mapping[str, Any]) -> TrainSettings:
    """Return settings of a training with other values of some keys (`lora.rank`).

    Raises pydantic.ValidationError for a value that is not allowed.
    """
    return TrainSettings.model_validate(merged(train.model_dump(exclude_unset=True), nested(values)))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by key as blocks: {lora.rank: 8} becomes {lora: {rank: 8}}."""
    blocks: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        block = blocks
        for name in path:
            block = block.setdefault(name, {})
        block[last] = value
    return blocks


def merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return blocks with those of `above` laid over them, key by key."""
    both = {key: merged(below[key], above[key]) for key in below.keys() & above.keys() if isinstance(above[key], dict)}
    return {**below, **above, **both}


def check_search(name: str, search: SearchSettings, run: RunSettings, *, feedback: bool) -> None:
    """Raise ValueError with key and value for a search that its run does not allow.

    feedback: whether the run's evaluation takes the human's later turns as feedback.
    """
    if search.objective != "eval_loss" and not feedback:
        raise ValueError(
            f"search.{name}.objective: {search.objective} compares use of feedback, but the data set of run "
            f"{search.run} has none; set eval_loss"
        )
    for key, values in search.space.items():
        where = f"search.{name}.space.{key}"
        _check_key(where, key)
        if key in ROWS_OF_A_STEP and "rows_per_step" in run.train.model_fields_set:
            raise ValueError(
                f"{where}: run {search.run} has rows_per_step, which best.yaml would contradict; give the run "
                f"{' and '.join(ROWS_OF_A_STEP)} in place of it"
            )
        if isinstance(values, RangeSettings):
            _check_range(where, key, values)
        tried = [values.low, values.high] if isinstance(values, RangeSettings) else values
        typed = [_tried(where, key, value, run) for value in tried]
        if len(typed) < 2:
            raise ValueError(
                f"{where}: {shown(list(tried))} leaves nothing to choose; list several values, or remove it"
            )
        if len(set(map(repr, typed))) < len(typed):
            raise ValueError(f"{where}: {shown(list(tried))} has a value twice; name each once")


def _check_key(where: str, key: str) -> None:
    if key not in SEARCHED:
        allowed = ", ".join(name for name, reason in SEARCHED.items() if reason is None)
        raise ValueError(f"{where}: no single setting of `train`; a search chooses from: {allowed}")
    if reason := SEARCHED[key]:
        raise ValueError(f"{where}: no search chooses it, because {reason}")


def _check_range(where: str, key: str, values: RangeSettings) -> None:
    default = _value_of(TrainSettings(), key)
    if isinstance(default, bool) or not isinstance(default, int | float):
        raise ValueError(f"{where}: is no number, so it has no range; list its values")
    if not values.low < values.high:
        raise ValueError(f"{where}: low {values.low:g} must be below high {values.high:g}")
    if values.log and values.low <= 0:
        raise ValueError(f"{where}: low {values.low:g} must be above 0 with log: true")


def _tried(where: str, key: str, value: Any, run: RunSettings) -> Any:
    """Return a value in its key's type; raises ValueError if the run could not have it."""
    fields = run.model_dump(exclude_unset=True) | {"chosen_by": None}  # which names one value of each key
    try:
        typed = _typed(key, value)
        RunSettings.model_validate(merged(fields, {"train": nested({key: typed})}))
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        cause = str(fault["ctx"]["error"]) if fault["type"] == "value_error" else fault["msg"]
        raise ValueError(f"{where}: {shown(value)} is not allowed; {cause}") from None
    if key.startswith("lora.") and not tuner_of(run.tuner).trains_adapter:
        raise ValueError(
            f"{where}: tuner {run.tuner} of its run trains no adapter; remove it, or set tuner: lora there"
        )
    return typed


def _typed(key: str, value: Any) -> Any:
    return _value_of(TrainSettings.model_validate(nested({key: value})), key)


def _value_of(train: TrainSettings, key: str) -> Any:
    return attrgetter(key)(train)


def trials_of_rung(together: int, rung: int) -> int:
    """Return how many trials of a round a rung has: a third, rounded up, of those of the rung before."""
    return together if rung == 0 else math.ceil(trials_of_rung(together, rung - 1) / 3)


def slots_of(together: int, number: int, rung: int) -> int:
    """Return how many trials a step has: those of its rung, and in the first round the run's own settings."""
    return trials_of_rung(together, rung) + (number == 0)


def share_of_rung(rungs: int, rung: int) -> float:
    """Return the share of the whole training after which a rung stops its trials."""
    return float(1 / 3 ** (rungs - 1 - rung))


def steps_of(search: SearchSettings) -> Iterator[tuple[int, int]]:
    """Yield all steps of a search, in their order: round and rung."""
    for number in range(search.rounds):
        for rung in range(search.rungs):
            yield number, rung


def step_before(rungs: int, number: int, rung: int) -> tuple[int, int] | None:
    """Return the step before one; None before the first."""
    if rung:
        return number, rung - 1
    return (number - 1, rungs - 1) if number else None
