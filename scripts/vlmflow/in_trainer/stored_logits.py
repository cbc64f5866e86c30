"""Stores with each checkpoint of the model's own weights which tensors were trained, and some rows with their logits.

The files are part of the checkpoint (`trained_tensors`). They let the proof show that the published folder answers as
the model did in the trainer, without trusting what saved or rewrote the weights.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from transformers.core_model_loading import revert_weight_conversion

from vlmflow.core.account import write_account
from vlmflow.in_trainer.row_tensors import NOT_INPUTS, row_tensors
from vlmflow.in_trainer.trained_tensors import LOGITS, POSITIONS, ROWS, TRAINED, TrainedTensors


def store_with_each_checkpoint(trainer: Any) -> None:
    """Make a trainer of transformers write both files whenever it saves the model."""
    trainer.save_model = partial(_save_model, trainer, trainer.save_model)


def _save_model(trainer: Any, save: Any, folder: str | None = None, **values: Any) -> None:
    """Save the model as `save` does, then our files. All ranks call it: each computes, the first one writes."""
    save(folder, **values)
    stored = _rows_with_logits(trainer)
    if trainer.args.should_save and folder is not None:
        save_file(stored, Path(folder, LOGITS))
        write_account(Path(folder, TRAINED), TrainedTensors(_trained_tensors(trainer.model)))


def _trained_tensors(model: Any) -> list[str]:
    """Return the names of the trained tensors under which transformers saves them."""
    found: set[str] = set()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            whole = torch.empty(getattr(weight, "ds_shape", weight.shape), device="meta")  # DeepSpeed may hold a part
            found.update(revert_weight_conversion(model, {name.replace(_CHECKPOINT_PREFIX, ""): whole}))
    return sorted(found)


def _rows_with_logits(trainer: Any) -> dict[str, torch.Tensor]:
    """Compute the logits of the first rows of the val split, with the present weights.

    The training goes on as if this had not happened: dropout is off meanwhile, and no random number is drawn.
    """
    dataset, model, template = trainer.eval_dataset, trainer.model_wrapped, trainer.template
    stored: dict[str, torch.Tensor] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        for number in range(min(ROWS, len(dataset))):
            batch = trainer.data_collator([dataset[number]])
            batch = {name: value for name, value in batch.items() if name not in NOT_INPUTS}
            inputs = trainer._prepare_input(dict(batch))
            inputs.pop("text_position_ids", None)
            with trainer.compute_loss_context_manager(), template.forward_context(trainer.model, inputs):
                logits = model(**inputs, logits_to_keep=POSITIONS).logits
            stored |= row_tensors(number, batch)
            stored[f"row.{number}.logits"] = logits[0].float().cpu().contiguous()
    model.train(was_training)
    return stored
