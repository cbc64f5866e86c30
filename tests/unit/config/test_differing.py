"""The settings of a training beside the defaults."""

from typing import Any

import pytest

from vlmflow.config.run_blocks import asked, differing, own_settings
from vlmflow.config.run_settings import TrainSettings

OF_RUN = {"device": "cuda", "tuner": "lora", "strategy": "ddp", "deepspeed": None, "processes": 1}


def own(steps: int = 8, of_run: dict[str, Any] | None = None, **train: Any) -> dict[str, str]:
    """Return what a training of so many steps reports as its own settings."""
    of_run = OF_RUN | (of_run or {})
    settings = TrainSettings(**train).on_device(of_run["device"], of_run["processes"]).scheduled(steps)
    return dict(own_settings(asked(settings.model_dump(mode="json"), of_run, steps)))


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
