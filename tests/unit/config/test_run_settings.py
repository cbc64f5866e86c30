"""The settings of a search, those of a training beside the defaults, and what the configuration refuses in them."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from vlmflow.config.model import check_config
from vlmflow.config.run_blocks import differing, flattened, own_settings
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.search_settings import SEARCHED, Dimension, dimensions, trained_with
from vlmflow.core.errors import VlmflowError

RATE = {"low": "1e-5", "high": 1e-3, "log": True}


def checked(**search: Any) -> Any:
    block = {"run": "r", "space": {"learning_rate": RATE}} | search
    return check_config(
        {
            "models": {"m": {"source": "tiny", "model_type": "qwen3_vl"}},
            "datasets": {
                "fire": {"kind": "fire", "train": "rows.json"},
                "alpaca": {"kind": "alpaca", "modality": "text", "train": "text.json"},
            },
            "runs": {
                "r": {"model": "m", "dataset": "fire"},
                "full": {"model": "m", "dataset": "alpaca", "tuner": "full"},
                "q": {"model": "m", "dataset": "alpaca", "tuner": "qlora"},
                "rows": {"model": "m", "dataset": "fire", "train": {"rows_per_step": 8}},
            },
            "search": {"s": block},
        },
        [],
    ).search["s"]


def leaves(block: type[BaseModel], before: str = "") -> Iterator[str]:
    for key, field in block.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{before}{key}.")
        else:
            yield f"{before}{key}"


def test_every_key_of_train_is_searched_or_has_a_reason() -> None:
    assert set(SEARCHED) == set(leaves(TrainSettings))


def test_values_have_the_types_of_their_keys() -> None:
    space = {
        "learning_rate": RATE,
        "lora.rank": [8, "16"],
        "lora.alpha": {"low": 8, "high": 64},
        "warmup_ratio": [0, 1],
    }
    space |= {"per_device_batch_size": {"low": 1, "high": "4e0"}}
    found = dimensions(checked(space=space).space)
    assert found == [
        Dimension("learning_rate", False, 1e-5, 1e-3, True),
        Dimension("lora.alpha", False, 8.0, 64.0),
        Dimension("lora.rank", choices=(8, 16)),
        Dimension("per_device_batch_size", True, 1, 4),
        Dimension("warmup_ratio", choices=(0.0, 1.0)),
    ]
    assert [type(one.first) for one in found] == [float, float, int, int, float]


def test_other_settings_of_a_training_stay() -> None:
    train = TrainSettings.model_validate({"max_steps": 9, "lora": {"alpha": 7}})
    found = trained_with(train, {"lora.rank": 64, "learning_rate": 0.5})
    assert (found.max_steps, found.lora.alpha, found.lora.rank, found.learning_rate) == (9, 7.0, 64, 0.5)


RATES = {"low": 0, "high": 1}


@pytest.mark.parametrize(
    ("key", "values"),
    [
        *(("learning_rat", RATE), ("lora", [8, 16]), ("max_length", [512, 1024]), ("image_max_tokens", [512, 1024])),
        *(("swift_args", [1, 2]), ("learning_rate", {"low": 1, "high": 1}), ("weight_decay", RATES | {"log": True})),
        *(("learning_rate", RATES), ("learning_rate", [1e-4, -1]), ("lora.rank", {"low": 8, "high": 16.5})),
        *(("lr_scheduler", ["cosine", "cosin"]), ("lr_scheduler", {"low": 1, "high": 2}), ("lora.dora", RATES)),
        *(("lora.rank", [8]), ("lora.rank", [8, "8"]), ("quantisation.type", ["nf4", "fp4"])),
    ],
)
def test_a_space_that_cannot_be_is_refused_with_its_key(key: str, values: Any) -> None:
    assert refusal(space={key: values}).startswith(f"--config: search.s.space.{key}: ")


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"run": "none"}, "run: unknown run 'none'; runs has: r, full, q"),
        ({"run": "full", "space": {"lora.rank": [8, 16]}}, "space.lora.rank: tuner full "),
        ({"run": "q", "objective": "uses_feedback"}, "objective: uses_feedback "),
        ({"objective": "learned"}, "objective: learned was a loss "),
        ({"objective": "test"}, "objective: 'test' is not allowed; "),
        ({"limits": {"gpu_hours": 0}}, "limits.gpu_hours: 0 is not allowed; "),
        ({"rounds": 0}, "rounds: 0 is not allowed; "),
        ({"space": {}}, "space: {} is not allowed; "),
    ],
)
def test_a_search_that_cannot_be_is_refused_with_key_and_value(block: dict[str, Any], said: str) -> None:
    assert refusal(**block).startswith(f"--config: search.s.{said}")


def refusal(**search: Any) -> str:
    with pytest.raises(VlmflowError) as error:
        checked(**search)
    assert "\n" not in error.value.cause
    return error.value.cause


def test_rows_of_a_step_are_searched_only_where_best_yaml_can_say_them() -> None:
    space = {"gradient_accumulation_steps": [2, 4]}
    assert checked(space=space)
    with pytest.raises(VlmflowError, match=r"space\.gradient_accumulation_steps: run rows has rows_per"):
        checked(run="rows", space=space)
    assert checked(run="rows")


def test_a_quantising_run_may_search_its_quantisation() -> None:
    assert checked(run="q", space={"quantisation.type": ["nf4", "fp4"]}).run == "q"
    assert checked(objective="uses_feedback").objective == "uses_feedback"


OF_RUN = {"device": "cuda", "tuner": "lora", "strategy": "ddp", "deepspeed": None, "processes": 1}


def own(steps: int = 8, of_run: dict[str, Any] | None = None, **train: Any) -> dict[str, str]:
    """Return what a training of so many steps reports as its own settings."""
    of_run = OF_RUN | (of_run or {})
    settings = TrainSettings(**train).on_device(of_run["device"], of_run["processes"]).scheduled(steps)
    return dict(own_settings(flattened(settings.model_dump(mode="json"), of_run, steps)))


@pytest.mark.parametrize("steps", [1, 8, 777, 100_000])
def test_a_run_without_settings_has_none_of_its_own(steps: int) -> None:
    """The steps between two evaluations follow from the rows: nobody set them."""
    assert own(steps) == {}


def test_each_setting_has_the_key_of_the_configuration() -> None:
    found = own(of_run={"tuner": "full", "processes": 8, "deepspeed": {"a": {"b": 1}}}, freeze=["aligner"])
    assert found == {"tuner": "full", "processes": "8", "deepspeed.a.b": "1", "train.freeze": '["aligner"]'}
    train = {"learning_rate": 2e-4, "max_steps": 9, "lora": {"rank": 8}, "swift_args": {"template": "qwen3"}}
    assert own(**train) == {
        "train.max_steps": "9",
        "train.learning_rate": "0.0002",
        "train.lora.rank": "8",
        "train.swift_args.template": "qwen3",
    }
    assert own(evaluation_steps=4) == {"train.checkpoint_steps": "4", "train.evaluation_steps": "4"}


def test_what_auto_stands_for_is_no_setting_of_ones_own() -> None:
    assert own(of_run={"device": "cpu"}) == {"device": "cpu"}
    assert own(group_by_length=True) == {"train.group_by_length": "true"}
    assert own(micro_batch_tokens=4096) == {"train.micro_batch_tokens": "4096"}
    assert own(micro_batch_tokens=None) == {"train.micro_batch_tokens": "null"}
    assert own(gradient_checkpointing=False) == {"train.gradient_checkpointing": "false"}
    assert own(gradient_checkpointing=True) == {"train.gradient_checkpointing": "true"}


def test_what_only_the_other_training_has_differs_too() -> None:
    one, other = ({"train.a": 1}, {"train.a": 1, "train.swift_args.x": True})
    assert differing(one, other) == {"train.swift_args.x": ("null", "true")}
    assert differing(other, other) == {}
