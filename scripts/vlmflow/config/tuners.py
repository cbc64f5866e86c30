"""The tuners: what a training changes of its model, and all that depends on it; and the supported ways to train.

All properties of a tuner are in its entry in TUNERS. The configuration, the arguments for ms-swift, the trainer, the
check of checkpoints, the merge and its proof read them there.

A way to train is a pair of a tuner and a strategy. It is supported if `tests/stages/test_ways_to_train.py` trains,
kills, resumes, merges and verifies with it, on a tiny Qwen3 and a tiny Qwen3-VL. Any other pair is experimental.
"""

from collections.abc import Mapping
from dataclasses import dataclass

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""peft's names for the files of an adapter: its weights, and its configuration."""

MODEL_WEIGHTS = "model.safetensors"
MODEL_INDEX = "model.safetensors.index.json"
"""transformers' names for a model's weights: one file, or the index of several."""


@dataclass(frozen=True)
class Tuner:
    """One tuner.

    name: its name in `runs.NAME.tuner`.
    meaning: what it trains, for docs/config.md.
    arguments: its arguments for `swift sft`, besides those of every training. Only the workflow sets them.
    trains_adapter: it trains an adapter beside the frozen model, which the merge adds to the base's weights; otherwise
    it trains the model's own weights, and the merge takes them over.
    quantises: the frozen model is quantised to 4 bit while it trains; the merge uses the unquantised base.
    strategies: the names of the strategies with which it is supported.
    """

    name: str
    meaning: str
    arguments: Mapping[str, str | int | bool]
    trains_adapter: bool
    quantises: bool
    strategies: tuple[str, ...]


LORA = Tuner(
    name="lora",
    meaning="trains an adapter beside the frozen model",
    arguments={"tuner_type": "lora"},
    trains_adapter=True,
    quantises=False,
    strategies=("ddp", "zero2", "zero3", "zero2_offload", "zero3_offload", "fsdp2", "deepspeed"),
)

QLORA = Tuner(
    name="qlora",
    meaning="the same, with the frozen model quantised to 4 bit",
    arguments={"tuner_type": "lora", "quant_method": "bnb", "quant_bits": 4},
    trains_adapter=True,
    quantises=True,
    strategies=("ddp",),
)

FULL = Tuner(
    name="full",
    meaning="trains all weights of the model that are not frozen",
    arguments={"tuner_type": "full"},
    trains_adapter=False,
    quantises=False,
    strategies=("ddp", "zero2", "zero3", "zero2_offload", "zero3_offload", "fsdp2", "deepspeed"),
)

TUNERS = {tuner.name: tuner for tuner in (LORA, QLORA, FULL)}
"""All tuners, by name."""


def tuner_of(name: str) -> Tuner:
    """Return a tuner by its name; raises ValueError with the known names for any other."""
    if name not in TUNERS:
        raise ValueError(f"tuner {name!r}: unknown; there are {', '.join(TUNERS)}")
    return TUNERS[name]


def meanings() -> str:
    """Return what all tuners do, for docs/config.md."""
    return " ".join(f"{name}: {tuner.meaning}." for name, tuner in TUNERS.items())


def argument_names() -> list[str]:
    """Return the names of the arguments of ms-swift that some tuner sets."""
    return sorted({name for tuner in TUNERS.values() for name in tuner.arguments})
