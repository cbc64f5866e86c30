"""The training strategies: how a run's processes share the model, and all that depends on it.

All properties of a strategy are in its entry in STRATEGIES. The configuration (name, devices), the arguments for
ms-swift, the trainer, the check of checkpoints and the doctor read them there, and none of these compares names: one
more entry is one more strategy. The doctor's trial of processes that train together, and the shared memory that data
loaders use, are the same for all strategies.

`tests/unit/training/test_strategies.py` has, by strategy, the files that a real training of two processes saved. Its
tests, and the trainings in `tests/stages/test_strategies_train.py`, run for every entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass


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
    compares_ranks: every process holds all trained weights, and these copies are compared before each checkpoint.
    shards_weights: the processes share the base's weights, in equal parts; otherwise each holds all of them.
    keeps_masters: with weights of 16 bit it trains copies of them in float32 of its own. Without such copies, updates
    that are smaller than a step of the type would be rounded away.
    """

    name: str
    meaning: str
    arguments: Mapping[str, str | int | float | bool]
    devices: tuple[str, ...]
    states: tuple[str, ...]
    compares_ranks: bool = False
    shards_weights: bool = False
    keeps_masters: bool = True

    def weights_of_each(self, weights_mb: int, processes: int) -> int:
        """Return the MB of the base's weights that each process holds. weights_mb: all of them."""
        return weights_mb // processes if self.shards_weights else weights_mb


DDP = Strategy(
    name="ddp",
    meaning="every process holds the whole model",
    arguments={},
    devices=("cuda", "cpu"),
    states=("optimizer.pt",),
    compares_ranks=True,
    keeps_masters=False,
)

# DeepSpeed writes `latest` when all ranks are done (deepspeed/runtime/engine.py, `save_checkpoint`).
ZERO2 = Strategy(
    name="zero2",
    meaning="DeepSpeed shards gradients and optimizer",
    arguments={"deepspeed": "zero2"},
    devices=("cuda",),
    states=("{latest}/mp_rank_*_model_states.pt", "{latest}/*zero_pp_rank_{rank}_mp_rank_*_optim_states.pt"),
)

# The adapter is whole because ms-swift's zero3.json sets stage3_gather_16bit_weights_on_model_save.
ZERO3 = Strategy(
    name="zero3",
    meaning="DeepSpeed shards the weights too",
    arguments={"deepspeed": "zero3"},
    devices=("cuda",),
    states=(
        "{latest}/zero_pp_rank_{rank}_mp_rank_*_model_states.pt",
        "{latest}/*zero_pp_rank_{rank}_mp_rank_*_optim_states.pt",
    ),
    shards_weights=True,
)

STRATEGIES = {strategy.name: strategy for strategy in (DDP, ZERO2, ZERO3)}
"""All strategies, by name."""


def strategy_of(name: str) -> Strategy:
    """Return a strategy by its name; raises ValueError with the known names for any other."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r}: unknown; there are {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def names_on(device: str) -> list[str]:
    """Return the names of the strategies that train on a device."""
    return [name for name, strategy in STRATEGIES.items() if device in strategy.devices]


def meanings() -> str:
    """Return what all strategies do, for docs/config.md."""
    return " ".join(f"{name}: {strategy.meaning}." for name, strategy in STRATEGIES.items())


def argument_names() -> list[str]:
    """Return the names of the arguments of ms-swift that some strategy sets."""
    return sorted({name for strategy in STRATEGIES.values() for name in strategy.arguments})
