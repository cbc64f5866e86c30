"""What the configuration refuses in a search, and what becomes of a space's values."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from vlmflow.config.model import check_config
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


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"run": "none"}, "search.s.run: unknown run 'none'; runs has: r, full, q"),
        (
            {"space": {"learning_rat": RATE}},
            "search.s.space.learning_rat: no single setting of `train`; a search chooses",
        ),
        ({"space": {"lora": [8, 16]}}, "search.s.space.lora: no single setting of `train`"),
        (
            {"space": {"max_length": [512, 1024]}},
            "search.s.space.max_length: no search chooses it, because trials would",
        ),
        ({"space": {"image_max_tokens": [512, 1024]}}, "because trials would not see the same pictures"),
        ({"space": {"swift_args": [1, 2]}}, "search.s.space.swift_args: no search chooses it"),
        ({"space": {"learning_rate": {"low": 1, "high": 1}}}, "learning_rate: low 1 must be below high 1"),
        (
            {"space": {"weight_decay": {"low": 0, "high": 1, "log": True}}},
            "weight_decay: low 0 must be above 0 with log",
        ),
        ({"space": {"learning_rate": {"low": 0, "high": 1}}}, "search.s.space.learning_rate: 0.0 is not allowed"),
        ({"space": {"learning_rate": [1e-4, -1]}}, "search.s.space.learning_rate: -1 is not allowed"),
        ({"space": {"lora.rank": {"low": 8, "high": 16.5}}}, "search.s.space.lora.rank: 16.5 is not allowed"),
        ({"space": {"lr_scheduler": ["cosine", "cosin"]}}, "search.s.space.lr_scheduler: 'cosin' is not allowed"),
        ({"space": {"lr_scheduler": {"low": 1, "high": 2}}}, "lr_scheduler: is no number, so it has no range"),
        ({"space": {"lora.dora": {"low": 0, "high": 1}}}, "lora.dora: is no number, so it has no range"),
        ({"space": {"lora.rank": [8]}}, "search.s.space.lora.rank: [8] leaves nothing to choose"),
        ({"space": {"lora.rank": [8, "8"]}}, "has a value twice"),
        ({"space": {}}, "search.s.space: {} is not allowed"),
        ({"run": "full", "space": {"lora.rank": [8, 16]}}, "search.s.space.lora.rank: tuner full of its run trains no"),
        (
            {"space": {"quantisation.type": ["nf4", "fp4"]}},
            "quantisation.type: 'nf4' is not allowed; train.quantisation",
        ),
        (
            {"run": "q", "objective": "uses_feedback"},
            "search.s.objective: uses_feedback compares use of feedback, but the data set",
        ),
        ({"objective": "learned"}, "search.s.objective: learned was a loss compared with the base's; now"),
        ({"objective": "test"}, "search.s.objective: 'test' is not allowed; it must be one of eval_loss, uses_feedb"),
        ({"limits": {"gpu_hours": 0}}, "search.s.limits.gpu_hours: 0 is not allowed; it must be a number more than 0"),
        ({"rounds": 0}, "search.s.rounds: 0 is not allowed"),
    ],
)
def test_a_search_that_cannot_be_is_refused_with_key_and_value(block: dict[str, Any], said: str) -> None:
    with pytest.raises(VlmflowError) as error:
        checked(**block)
    assert said in error.value.cause
    assert "\n" not in error.value.cause


def test_rows_of_a_step_are_searched_only_where_best_yaml_can_say_them() -> None:
    space = {"gradient_accumulation_steps": [2, 4]}
    assert checked(space=space)
    with pytest.raises(VlmflowError, match=r"space\.gradient_accumulation_steps: run rows has rows_per"):
        checked(run="rows", space=space)
    assert checked(run="rows")


def test_a_quantising_run_may_search_its_quantisation() -> None:
    assert checked(run="q", space={"quantisation.type": ["nf4", "fp4"]}).run == "q"
    assert checked(objective="uses_feedback").objective == "uses_feedback"
