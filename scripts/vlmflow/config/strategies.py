"""The strategies of training: how a run's processes share the model, and all that follows from it.

Whoever must know something of a strategy asks its entry in STRATEGIES: the configuration (its name, its devices), the
arguments for ms-swift, the trainer, the judge of checkpoints, the doctor. Nothing else names or compares strategies, so
one more entry is one more strategy. What loaders take of the shared memory, and what the doctor's trial of processes
that train together does, is the same for all of them.

`tests/unit/training/test_strategies.py` has, by strategy, what a real training of two processes saved; its tests, and
those of `tests/stages/test_strategies_train.py`, which train, run for every entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""peft's name of the file with an adapter's weights."""


@dataclass(frozen=True)
class Strategy:
    """One strategy.

    name: what `runs.NAME.strategy` calls it.
    meaning: what it does, for docs/config.md.
    arguments: what it means for `swift sft`, beside the arguments of every training. The workflow alone sets them,
    and no two strategies have the same: a run folder is bound to its arguments.
    devices: where it trains.
    states: the files of a checkpoint that torch.save wrote of optimizer and model, as patterns: of each at least one
    file is there, and all that match open. {rank}: one for every process. {latest}: the folder that the checkpoint's
    file `latest` names.
    adapter: the file of a checkpoint that holds the adapter's weights whole, whatever is sharded.
    compares_ranks: every process holds the adapter whole, so that those of all are compared before each checkpoint.
    shards_weights: the processes share the base's weights, in equal parts; else each of them holds all.
    """

    name: str
    meaning: str
    arguments: Mapping[str, str | int | float | bool]
    devices: tuple[str, ...]
    states: tuple[str, ...]
    adapter: str = ADAPTER_WEIGHTS
    compares_ranks: bool = False
    shards_weights: bool = False

    def weights_of_each(self, weights_mb: int, processes: int) -> int:
        """Give what each process holds of the base's weights, in MB. weights_mb: all of them."""
        return weights_mb // processes if self.shards_weights else weights_mb


DDP = Strategy(
    name="ddp",
    meaning="every process holds the whole model",
    arguments={},
    devices=("cuda", "cpu"),
    states=("optimizer.pt",),
    compares_ranks=True,
)

# DeepSpeed writes `latest` when all ranks are done (deepspeed/runtime/engine.py, `save_checkpoint`).
ZERO2 = Strategy(
    name="zero2",
    meaning="DeepSpeed shards gradients and optimizer",
    arguments={"deepspeed": "zero2"},
    devices=("cuda",),
    states=("{latest}/mp_rank_*_model_states.pt", "{latest}/*zero_pp_rank_{rank}_mp_rank_*_optim_states.pt"),
)

# The adapter is whole since ms-swift's zero3.json sets stage3_gather_16bit_weights_on_model_save.
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
    """Give a strategy by its name; raises ValueError with the names that there are."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r}: unknown; there are {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def names_on(device: str) -> list[str]:
    """Give the names of the strategies that train on a device."""
    return [name for name, strategy in STRATEGIES.items() if device in strategy.devices]


def meanings() -> str:
    """Give what all strategies do, for docs/config.md."""
    return " ".join(f"{name}: {strategy.meaning}." for name, strategy in STRATEGIES.items())


def argument_names() -> list[str]:
    """Give the names of the arguments of ms-swift that some strategy sets."""
    return sorted({name for strategy in STRATEGIES.values() for name in strategy.arguments})
