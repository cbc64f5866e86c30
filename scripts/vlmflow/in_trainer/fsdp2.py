"""FSDP2's checkpoints: the complete trained weights in one file, and each rank's own shards for resuming.

transformers and accelerate (5.19, trainer.py `save_model`; 1.15, utils/fsdp_utils.py) would save the base with every
checkpoint, in files that peft cannot read, or gather all of it on the first rank. Here only trained weights are
gathered, one at a time. A rank's file has its shards of the trained weights and of the optimizer, so a resumed training
needs the same number of ranks, as the files of the random states do.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX, CheckpointWrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

SHARDS = "fsdp2_rank_{rank}.pt"
"""A rank's file in a checkpoint; `config/strategies` lists it."""

SCHEDULER = "scheduler.pt"
"""transformers' own name."""


def replace_checkpoints(trainer: Any) -> None:
    """Replace the trainer's saving and loading (transformers' `Trainer`) by FSDP2's.

    It must happen before the trainer shards the model: accelerate then gives trained weights 32 bits, and the complete
    file has the types of now.
    """
    types = {name: weight.dtype for name, weight in trainer.model.named_parameters(remove_duplicate=False)}
    trainer.save_model = partial(_save_model, trainer, types)
    trainer._save_optimizer_and_scheduler = partial(_save_shards, trainer)
    trainer._load_from_checkpoint = partial(_load_weights, trainer)
    trainer._load_optimizer_and_scheduler = partial(_load_optimizer, trainer)


def keep_precision(trainer: Any) -> None:
    """Add up gradients in 32 bits, and leave losses as they are, as DDP does.

    It must happen before the trainer shards the model. accelerate rounds both to the type of the weights
    (utils/dataclasses.py, `set_mixed_precision`): in bfloat16, a validation loss would have 8 bits.
    """
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)  # none if accelerate did not start FSDP2
    if plugin and plugin.mixed_precision_policy:
        precise = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None)
        plugin.mixed_precision_policy = precise


def keep_random_states(model: Module) -> None:
    """Let recomputed layers draw the dropout of the forward pass again.

    accelerate switches this off (utils/fsdp_utils.py, `fsdp2_apply_ac`), so gradients would belong to other dropout
    than the loss.
    """
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            module.checkpoint_fn = partial(module.checkpoint_fn, preserve_rng_state=True)


def gathered(model: Module, types: dict[str, torch.dtype], receives: bool) -> dict[str, torch.Tensor]:
    """Return the complete weights that a checkpoint holds, on the CPU: an adapter's, or without one all of the model.

    All ranks must call it. receives: whether this rank gets them; the others get {}. types: by name, the types in which
    to return them.
    """
    parameters = named(model)
    shards = get_model_state_dict(model)  # without communication
    adapter_alone = isinstance(model, PeftModel)
    done: dict[int | str, torch.Tensor] = {}
    complete: dict[str, torch.Tensor] = {}
    for name, shard in shards.items():
        parameter = parameters.get(name)
        if adapter_alone and (parameter is None or not parameter.requires_grad):
            continue  # ignore_frozen_params would gather an output layer that is also the embedding
        once = name if parameter is None else id(parameter)  # a weight may have two names
        if once not in done:
            whole = shard.full_tensor() if isinstance(shard, DTensor) else shard
            done[once] = whole.to("cpu", types.get(name, whole.dtype)) if receives else whole.new_empty(0)
        complete[name] = done[once]
    return complete if receives else {}


def named(model: Module) -> dict[str, Parameter]:
    """Return the parameters, sharded, by the names that they have without FSDP2 and without recomputed layers.

    An evaluation leaves the weights of the last layers gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    every = model.named_parameters(remove_duplicate=False)
    return {name.replace(_CHECKPOINT_PREFIX, ""): parameter for name, parameter in every}


def _save_model(
    trainer: Any, types: dict[str, torch.dtype], output_dir: str | None = None, _internal_call: bool = False
) -> None:
    weights = gathered(trainer.model, types, trainer.args.should_save)
    if trainer.args.should_save:
        trainer._save(output_dir, state_dict=weights)


def _save_shards(trainer: Any, output_dir: str) -> None:
    """Write this rank's shards: {"processes": int, "weights": {name: tensor}, "optimizer": its state_dict}.

    Raises RuntimeError if the optimizer keeps states of other shapes than its weights: nothing could load them.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)  # the first rank may still gather the weights
    optimizer = trainer.optimizer.state_dict()
    parameters = _parameters(trainer.optimizer)
    states = {
        index: {key: _local_state(parameters[index], value) for key, value in state.items()}
        for index, state in optimizer["state"].items()
    }
    content = {
        "processes": trainer.args.world_size,
        "weights": {name: _local(parameter) for name, parameter in _trained(trainer.model).items()},
        "optimizer": {"state": states, "param_groups": optimizer["param_groups"]},
    }
    torch.save(content, folder / SHARDS.format(rank=trainer.args.process_index))
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER)
    dist.barrier()  # the first rank now removes older checkpoints


def _load_weights(trainer: Any, checkpoint: str, model: Module | None = None) -> None:
    """Load this rank's shards of the trained weights; raises RuntimeError if they are not those of this training."""
    shards = _shards(trainer, checkpoint)["weights"]
    trained = _trained(trainer.model)
    if shards.keys() != trained.keys():
        other = sorted(shards.keys() ^ trained.keys())
        raise RuntimeError(f"{checkpoint}: other trained weights than this training has: {', '.join(other[:3])}")
    with torch.no_grad():
        for name, parameter in trained.items():
            _same_shape(parameter, shards[name], f"{checkpoint}: {name}").copy_(shards[name])


def _load_optimizer(trainer: Any, checkpoint: str | None) -> None:
    """Load this rank's shards of the optimizer, and the scheduler."""
    if checkpoint is None:
        return
    saved = _shards(trainer, checkpoint)["optimizer"]
    parameters = _parameters(trainer.optimizer)
    state = {
        index: {key: _sharded_like(parameters[index], value, f"{checkpoint}: {key}") for key, value in values.items()}
        for index, values in saved["state"].items()
    }
    trainer.optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
    trainer.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))


def _shards(trainer: Any, checkpoint: str) -> dict[str, Any]:
    file = Path(checkpoint, SHARDS.format(rank=trainer.args.process_index))
    content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    if content["processes"] != trainer.args.world_size:
        raise RuntimeError(
            f"{file}: from {content['processes']} processes, this training has {trainer.args.world_size}"
        )
    return content


def _trained(model: Module) -> dict[str, Parameter]:
    return {name: parameter for name, parameter in named(model).items() if parameter.requires_grad}


def _parameters(optimizer: Optimizer) -> list[Parameter]:
    """Return an optimizer's parameters by their index in its state_dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _local_state(parameter: Parameter, value: Any) -> Any:
    """Return this rank's part of an optimizer's state of a parameter; counters have no dimension."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim and value.shape != parameter.shape:
        raise RuntimeError(
            "strategy fsdp2 needs an optimizer whose states have the shapes of the weights, as AdamW's; "
            f"found {list(value.shape)} for a weight of {list(parameter.shape)}"
        )
    return _local(value)


def _local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in memory of its own: torch.save stores whole storages."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach().cpu().clone()


def _same_shape(tensor: torch.Tensor, shard: torch.Tensor, label: str) -> torch.Tensor:
    """Return this rank's part of a tensor; raises RuntimeError if a shard has another shape."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.shape != shard.shape:
        raise RuntimeError(f"{label}: a shard of shape {list(shard.shape)}, this training has {list(local.shape)}")
    return local.detach()


def _sharded_like(parameter: Parameter, value: Any, label: str) -> Any:
    """Return an optimizer's state of a parameter, sharded as the parameter is; see `_local_state`."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or not isinstance(parameter.data, DTensor):
        return value
    local = _same_shape(parameter, value, label)
    weight = parameter.data
    return DTensor.from_local(
        value.to(local.device),
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
