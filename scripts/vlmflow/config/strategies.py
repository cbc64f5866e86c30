"""The training strategies: how a run's processes share the model, and all that depends on it.

All properties of a strategy are in its entry in STRATEGIES. The configuration (name, devices), the arguments for
ms-swift, the trainer, the check of checkpoints, the estimate and the doctor read them there, and none of these compares
names: one more entry is one more strategy. The doctor's trial of processes that train together, and the shared memory
that data loaders use, are the same for all strategies.

`tests/unit/supervisor/test_strategies.py` has, by strategy, the files that a real training of two processes saved. Its
tests, and the trainings in `tests/stages/test_strategies_train.py`, run for every entry.

The tuners: what a training changes of its model, and all that depends on it; and the supported ways to train.

All properties of a tuner are in its entry in TUNERS. The configuration, the arguments for ms-swift, the trainer, the
check of checkpoints, the merge and its proof read them there.

A way to train is a pair of a tuner and a strategy. It is supported if `tests/stages/test_ways_to_train.py` trains,
kills, resumes, merges and verifies with it, on a tiny Qwen3 and a tiny Qwen3-VL. Any other pair is experimental.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from vlmflow.config.deepspeed_json import filled, offloaded, sharing_second_copy, stage_of

Value = str | int | float | bool

Part = Literal["weights", "gradients", "optimizer"]
"""A part of what training holds in memory.

weights: those of the model, in the type in which it computes. gradients: those of the trained weights. optimizer: its
moments, and the 32-bit copy of the trained weights if they compute in another type.
"""


@dataclass(frozen=True)
class Choices:
    """The settings of a run (`runs.NAME.train`) on which a strategy's arguments may depend."""

    dtype: str
    gradient_checkpointing: bool


Argument = Value | Callable[[Choices], Value | None]
"""The value of an argument of ms-swift, or how to get it; None leaves the argument out."""


@dataclass(frozen=True)
class Strategy:
    """One strategy.

    name: its name in `runs.NAME.strategy`.
    meaning: what it does, for docs/config.md.
    arguments: its arguments for `swift sft`, besides those of every training. Only the workflow sets them, and no two
    strategies have the same: a run folder is bound to its arguments.
    devices: where it trains.
    states: the files of a checkpoint in which torch.save stored the optimizer and the model, as patterns. Each pattern
    must match at least one file, and all that match must open. {rank}: one for every process. {latest}: the folder that
    the checkpoint's file `latest` names.
    engine: what the trainers must wrap the model in; they refuse to train in another.
    compares_ranks: every process holds all trained weights, and these copies are compared before each checkpoint.
    shards: what the processes share in equal parts; each holds all of the rest.
    second_copy: how many processes share a second copy of the weights, and gather them without the others (DeepSpeed's
    hpZ, arXiv:2306.10209); 0 without one.
    offloads: what is in the machine's memory instead of the GPU's, except while it is used.
    keeps_masters: with weights of 16 bit it trains copies of them in float32 of its own. Without such copies, updates
    that are smaller than a step of the type would be rounded away.
    needs_compiler: DeepSpeed compiles its optimizer for the CPU when the training starts.
    takes_json: its settings are DeepSpeed's own, in `runs.NAME.deepspeed`. deepspeed: these settings, with what the
    workflow fills in; None for an entry of STRATEGIES.
    """

    name: str
    meaning: str
    arguments: Mapping[str, Argument]
    devices: tuple[str, ...]
    states: tuple[str, ...]
    engine: Literal["ddp", "deepspeed", "fsdp2"] = "ddp"
    compares_ranks: bool = False
    shards: frozenset[Part] = frozenset()
    second_copy: int = 0
    offloads: frozenset[Part] = frozenset()
    keeps_masters: bool = True
    needs_compiler: bool = False
    takes_json: bool = False
    deepspeed: dict[str, Any] | None = None

    def arguments_for(self, choices: Choices) -> dict[str, Value]:
        """Return its arguments for a run with these settings."""
        values = {name: value(choices) if callable(value) else value for name, value in self.arguments.items()}
        return {name: value for name, value in values.items() if value is not None}

    def held(self, part: Part, amount: int, processes: int) -> tuple[int, int]:
        """Return how much of a part each process holds all the time: on its GPU, and in the machine's memory.

        amount: the size of the whole part, in any unit. Weights that are sharded or offloaded are also on the GPU
        while a layer computes; that is not counted here.
        """
        share = -(-amount // processes) if part in self.shards else amount
        if part == "weights" and self.second_copy:
            share += -(-amount // self.second_copy)
        return (0, share) if part in self.offloads else (share, 0)

    def weights_of_each(self, weights_mb: int, processes: int) -> int:
        """Return the MB of the base's weights that each process holds on its GPU. weights_mb: all of them."""
        return self.held("weights", weights_mb, processes)[0]


def _adapter_type(choices: Choices) -> str | None:
    """Return the type of an adapter under ZeRO 3: bfloat16, if the run has that.

    peft makes adapters in 32 bits. DeepSpeed casts nothing in a model made under `zero.Init`, and accelerate gives no
    autocast, so their branch would compute in 32 bits, without tensor cores. DeepSpeed's optimizer has a 32-bit copy in
    any case. Adapters in float16 have 32 bits whatever is asked for (swift/pipelines/train/tuner.py, `prepare_model`).
    """
    return choices.dtype if choices.dtype == "bfloat16" else None


def _fsdp2(choices: Choices) -> str:
    """Return ms-swift's settings of FSDP2 (swift/config/fsdp2.json), with the run's choice of checkpointing."""
    return json.dumps(
        {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {
                "fsdp_version": 2,
                "reshard_after_forward": True,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "cpu_ram_efficient_loading": True,
                "state_dict_type": "SHARDED_STATE_DICT",
                "activation_checkpointing": choices.gradient_checkpointing,
            },
        }
    )


WEIGHTS: frozenset[Part] = frozenset({"weights"})
OPTIMIZER: frozenset[Part] = frozenset({"optimizer"})
ALL_BUT_WEIGHTS: frozenset[Part] = frozenset({"gradients", "optimizer"})
ALL: frozenset[Part] = ALL_BUT_WEIGHTS | WEIGHTS
NOTHING: frozenset[Part] = frozenset()

# DeepSpeed writes `latest` when all ranks are done (deepspeed/runtime/engine.py, `save_checkpoint`).
OPTIMIZER_SHARDS = "{latest}/*zero_pp_rank_{rank}_mp_rank_*_optim_states.pt"
WHOLE_MODEL = "{latest}/mp_rank_*_model_states.pt"
MODEL_SHARDS = "{latest}/zero_pp_rank_{rank}_mp_rank_*_model_states.pt"

DDP = Strategy(
    name="ddp",
    meaning="every process holds the whole model",
    arguments={},
    devices=("cuda", "cpu"),
    states=("optimizer.pt",),
    compares_ranks=True,
    keeps_masters=False,
)

ZERO2 = Strategy(
    name="zero2",
    meaning="DeepSpeed shards gradients and optimizer",
    arguments={"deepspeed": "zero2"},
    devices=("cuda",),
    states=(WHOLE_MODEL, OPTIMIZER_SHARDS),
    engine="deepspeed",
    compares_ranks=True,
    shards=ALL_BUT_WEIGHTS,
)

# The adapter is whole because ms-swift's zero3.json sets stage3_gather_16bit_weights_on_model_save.
ZERO3 = Strategy(
    name="zero3",
    meaning="DeepSpeed shards the weights too",
    arguments={"deepspeed": "zero3", "lora_dtype": _adapter_type},
    devices=("cuda",),
    states=(MODEL_SHARDS, OPTIMIZER_SHARDS),
    engine="deepspeed",
    shards=ALL,
)

ZERO2_OFFLOAD = replace(
    ZERO2,
    name="zero2_offload",
    meaning="like zero2, with the optimizer in main memory, on the CPU",
    arguments={"deepspeed": "zero2_offload"},
    offloads=ALL_BUT_WEIGHTS,
    needs_compiler=True,
)

ZERO3_OFFLOAD = replace(
    ZERO3,
    name="zero3_offload",
    meaning="like zero3, with the optimizer and the weights in main memory",
    arguments={"deepspeed": "zero3_offload", "lora_dtype": _adapter_type},
    offloads=ALL,
    needs_compiler=True,
)

FSDP2 = Strategy(
    name="fsdp2",
    meaning="PyTorch shards weights, gradients and optimizer",
    arguments={"fsdp": _fsdp2, "gradient_checkpointing": False},
    devices=("cuda",),
    states=("fsdp2_rank_{rank}.pt",),
    engine="fsdp2",
    shards=ALL,
)

DEEPSPEED = Strategy(
    name="deepspeed",
    meaning="DeepSpeed with the settings in runs.NAME.deepspeed",
    arguments={"deepspeed": ""},
    devices=("cuda",),
    states=(),
    engine="deepspeed",
    takes_json=True,
)

STRATEGIES = {
    strategy.name: strategy for strategy in (DDP, ZERO2, ZERO3, ZERO2_OFFLOAD, ZERO3_OFFLOAD, FSDP2, DEEPSPEED)
}
"""All strategies, by name."""

STAGES = {
    0: replace(ZERO2, states=(WHOLE_MODEL,), shards=NOTHING),
    1: replace(ZERO2, shards=OPTIMIZER),
    2: ZERO2,
    3: ZERO3,
}
"""By stage of ZeRO, what a strategy has that trains with DeepSpeed settings of one's own."""


def strategy_of(name: str, deepspeed: Mapping[str, Any] | None = None) -> Strategy:
    """Return a strategy by its name; raises ValueError with the known names for any other.

    deepspeed: the checked settings of `runs.NAME.deepspeed`, for a strategy that takes them.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r}: unknown; there are {', '.join(STRATEGIES)}")
    strategy = STRATEGIES[name]
    if deepspeed is None:
        return strategy
    like, settings, moved = STAGES[stage_of(deepspeed)], filled(deepspeed), offloaded(deepspeed)
    return replace(
        like,
        name=strategy.name,
        meaning=strategy.meaning,
        arguments={**like.arguments, "deepspeed": json.dumps(settings, sort_keys=True)},
        second_copy=sharing_second_copy(deepspeed),
        offloads=(ALL_BUT_WEIGHTS if "optimizer" in moved else NOTHING) | (WEIGHTS if "weights" in moved else NOTHING),
        needs_compiler="optimizer" in moved and settings.get("zero_force_ds_cpu_optimizer", True),
        takes_json=True,
        deepspeed=settings,
    )


def names_on(device: str) -> list[str]:
    """Return the names of the strategies that train on a device."""
    return [name for name, strategy in STRATEGIES.items() if device in strategy.devices]


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


def meanings_of(table: Mapping[str, Strategy | Tuner]) -> str:
    """Return what all strategies, or all tuners, do, for docs/config.md."""
    return " ".join(f"{name}: {choice.meaning}." for name, choice in table.items())


def arguments_of(table: Mapping[str, Strategy | Tuner]) -> list[str]:
    """Return the names of the arguments of ms-swift that some strategy, or some tuner, sets."""
    return sorted({name for choice in table.values() for name in choice.arguments})
