"""How the ranks of a training hold the model: what wraps it by the run's strategy, and what they tell each other."""

import hashlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import other as accelerate_utils
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, TrainerCallback

from vlmflow.config.model_types import model_types
from vlmflow.config.strategies import Strategy, strategy_of
from vlmflow.in_trainer import fsdp2
from vlmflow.in_trainer.messages import Orders
from vlmflow.swift.model_layers import layers_of
from vlmflow.swift.row_attention import SDPA


def spare_deepspeed(strategy: Strategy) -> None:
    """Keep accelerate from importing DeepSpeed under another strategy, only to ask whether it wraps the model."""
    if strategy.engine != "deepspeed":
        accelerate_utils.is_deepspeed_available = lambda: False


class Ranks(TrainerCallback):
    """Lets the ranks train together, as the run's strategy asks, and hear of each other once a step.

    tell: what each rank tells at a step, as functions by name. told: what all ranks told at the present step, by rank.
    """

    def __init__(self, orders: Orders, trainer: Any) -> None:
        """Prepare a trainer (transformers' `Trainer`) before it wraps the model."""
        self.tell: dict[str, Callable[[], Any]] = {}
        self.told: dict[str, list[Any]] = {}
        self._processes = orders.processes
        self._strategy = strategy_of(orders.strategy)
        self._trainer = trainer
        if self._strategy.engine == "fsdp2":
            fsdp2.replace_checkpoints(trainer)
            fsdp2.keep_precision(trainer)
        if self._strategy.engine == "fsdp2" or _trains_vision(trainer):
            _pass_blank_pictures()
            if trainer.args.world_size > 1:
                _require_the_tower(trainer)
        if self._strategy.engine == "deepspeed":
            trainer.save_model = partial(_save_model, trainer, trainer.save_model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise RuntimeError if the processes do not train together, on equal GPUs."""
        mode, processes = args.parallel_mode.name, self._processes
        if args.world_size != processes or (processes > 1 and mode != "DISTRIBUTED"):
            raise RuntimeError(f"not really distributed: world size {args.world_size} of {processes}, mode {mode}")
        if processes > int(os.environ["LOCAL_WORLD_SIZE"]) and len(products := set(gather(device_name()))) > 1:
            raise RuntimeError(f"not the same GPUs on all nodes: {', '.join(sorted(products))}")
        refuse_another_engine(self._strategy, self._trainer)
        if self._strategy.engine == "fsdp2":
            fsdp2.keep_random_states(self._trainer.model_wrapped)
        if self._strategy.engine == "deepspeed":
            # The scheduler sets the rate of DeepSpeed's optimizer, also after a checkpoint was loaded. ms-swift
            # (trainers/mixin.py, `create_scheduler`) gives the scheduler the optimizer from before DeepSpeed. With
            # offload, DeepSpeed's is another (accelerate/utils/deepspeed.py, `map_pytorch_optim_to_deepspeed`). Both
            # have the same groups until a checkpoint replaces those of DeepSpeed's: the rate would then stay that of
            # the checkpoint, and the logs would show the scheduler's.
            trainer = self._trainer
            trainer.lr_scheduler.optimizer.param_groups = trainer.model_wrapped.basic_optimizer.param_groups
        _keep_their_form(self._trainer.model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Exchange what the ranks tell; all of it at once, because they wait for each other."""
        of_ranks = gather({name: tell() for name, tell in self.tell.items()})
        self.told = {name: [told[name] for told in of_ranks] for name in self.tell}


def refuse_another_engine(strategy: Strategy, trainer: Any) -> None:
    """Raise RuntimeError if the model is not wrapped as the strategy asks.

    With `use_cpu`, accelerate trains plain DDP in place of FSDP2, and says nothing.
    """
    model = trainer.model_wrapped
    names = [f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__]  # importing it takes seconds
    is_deepspeed = any(name.startswith("deepspeed.") for name in names)
    engines = {"deepspeed": is_deepspeed, "fsdp2": isinstance(model, FSDPModule)}
    wanted = {name: name == strategy.engine for name in engines}
    if engines != wanted:
        raise RuntimeError(f"strategy {strategy.name} is not at work: the model is a {type(model).__name__}")


def _trains_vision(trainer: Any) -> bool:
    model_type = model_types()[trainer.template.model_meta.model_type]
    return any(
        layer.trained and model_type.part_of(layer.name) != "language_model" for layer in layers_of(trainer.model)
    )


def _pass_blank_pictures() -> None:
    """Let batches without a picture pass a blank one through the vision tower.

    Otherwise only some ranks gather the tower's weights, and under FSDP2 all wait for ever. Or DDP fails, because
    weights of the tower that it trains got no gradient. ms-swift (4.6) does so under DeepSpeed alone, in its loaders of
    models and in its templates.
    """
    for name, module in sys.modules.items():
        if name.startswith(("swift.model.", "swift.template.")) and "is_deepspeed_enabled" in vars(module):
            module.is_deepspeed_enabled = lambda: True  # type: ignore[attr-defined]


def _require_the_tower(trainer: Any) -> None:
    """Refuse the first batch that does not pass through the vision tower, instead of waiting for ever.

    ms-swift passes blank pictures for some models only: not for LLaVA, Gemma 3, Idefics3.
    """
    kind = model_types()[trainer.template.model_meta.model_type]
    towers = set(kind.parts.get("vision_tower", ()))
    passed: list[bool] = []
    for name, module in trainer.model.named_modules():
        if name.removeprefix("base_model.model.") in towers:
            module.register_forward_hook(lambda *_: passed.append(True))

    def look(model: Any, *_: Any) -> None:
        if model.training and towers and not passed:
            raise ValueError(
                f"a batch without pictures does not pass through {', '.join(sorted(towers))}, and the processes wait "
                "for each other there; train rows with pictures alone, in one process, or, except under fsdp2, with "
                "train.freeze: [vision_tower, aligner]"
            )
        passed.clear()

    trainer.model.register_forward_hook(look)


def _save_model(trainer: Any, save: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """Save the model as DDP does, from the first process alone, if each process holds all weights.

    accelerate (`Accelerator.get_state_dict`) would copy the whole model into the memory of every process for each
    checkpoint, and an output layer that is also the embedding would be saved twice.
    """
    if trainer.deepspeed.zero_optimization_stage() == 3:
        save(output_dir, _internal_call=_internal_call)
    elif trainer.args.should_save:
        trainer._save(output_dir)


def attend_as_the_model_can() -> None:
    """Let models that are loaded from now on and in this process take sdpa as transformers' own default.

    Without an argument transformers takes sdpa, or else eager; ms-swift always gives one, and transformers refuses it.
    """
    plain = PreTrainedModel.get_correct_attn_implementation

    def choose(model: PreTrainedModel, requested: str | None, *values: Any, **named: Any) -> str:
        return str(plain(model, None if requested == SDPA else requested, *values, **named))

    PreTrainedModel.get_correct_attn_implementation = choose


def _keep_their_form(model: Any) -> None:
    """Forbid bitsandbytes' layers to repack their weights at the first evaluation on a CPU with AVX512-BF16.

    It computes a little differently afterwards (bitsandbytes 0.50, nn/modules.py, `Linear4bit.forward`), so a training
    that resumes at an evaluated step would not have an unbroken one's losses. On a GPU this changes nothing.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank; all ranks must call it."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def refuse_different_weights(model: torch.nn.Module) -> None:
    """Raise RuntimeError on all ranks if their trained weights differ: they do not train together."""
    digests = set(gather(_digest_of_trained(model)))
    if len(digests) > 1:
        raise RuntimeError(f"not really distributed: {len(digests)} different sets of trained weights at one step")


def device_name() -> str:
    """Return the product name of this process's GPU, or "cpu"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _digest_of_trained(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            digest.update(name.encode())
            digest.update(weight.detach().contiguous().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()
