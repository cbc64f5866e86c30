"""A plain training loop with transformers and peft, for machines without ms-swift.

It does the same as the workflow's trainer with the same settings: weights in bfloat16, the adapter in float32 under
autocast, gradients accumulated over several passes, AdamW, gradient checkpointing; logits only for trained tokens.
The batches are already on the device, so that the device is measured and not the loading of pictures.
"""

import logging
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

from gpu.batches import Batch
from gpu.trained import Trained
from gpu.work import now
from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.progress import Progress

DECODER_LAYERS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
"""The meaning of ms-swift's all-linear if vision tower and aligner are frozen."""

log = logging.getLogger(__name__)


def train_plainly(
    base: Path, batches: Sequence[Batch], settings: TrainSettings, warm_up: int, adapter: Path, device: str
) -> Trained:
    """Train settings.max_steps optimizer steps on the batches, repeatedly, and write the adapter.

    warm_up: steps before the measured ones.
    """
    torch.manual_seed(settings.seed)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = _with_adapter(base, settings, device)
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad],
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
    )
    supply = cycle([batch.to(device) for batch in batches])
    losses, tokens, positions, begun = [], 0, 0, 0.0
    with Progress("gpu-check: training", settings.max_steps, "steps") as progress:
        for step in range(settings.max_steps):
            if step == warm_up:
                tokens, positions, begun = 0, 0, now(device)
            passes = list(islice(supply, settings.gradient_accumulation_steps))
            losses.append(_step(model, optimizer, passes, device))
            tokens += sum(size.tokens for batch in passes for size in batch.sizes)
            positions += sum(batch.positions for batch in passes)
            progress.advance()
        seconds = now(device) - begun
    model.save_pretrained(adapter)
    return Trained(
        trainer="plain loop, transformers and peft",
        adapter=adapter,
        losses=[loss.item() for loss in losses],
        seconds=seconds,
        tokens=tokens,
        positions=positions,
        allocated=torch.cuda.max_memory_allocated() if device == "cuda" else None,
        reserved=torch.cuda.max_memory_reserved() if device == "cuda" else None,
    )


def _with_adapter(base: Path, settings: TrainSettings, device: str) -> PeftModel:
    model = AutoModelForImageTextToText.from_pretrained(
        base,
        dtype=getattr(torch, settings.dtype),
        device_map=device,
        attn_implementation=settings.attention,
        local_files_only=True,
    )
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    lora = LoraConfig(
        r=settings.lora.rank,
        lora_alpha=settings.lora.alpha,
        lora_dropout=settings.lora.dropout,
        target_modules=DECODER_LAYERS,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora).train()


def _step(model: PeftModel, optimizer: torch.optim.Optimizer, passes: Sequence[Batch], device: str) -> torch.Tensor:
    """Take one optimizer step over some batches; return the mean loss of their trained tokens, on the device."""
    trained = sum(len(batch.targets) for batch in passes)
    total = torch.zeros((), device=device)
    for batch in passes:
        with torch.autocast(device, torch.bfloat16):
            loss = _loss(model, batch) / trained
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def _loss(model: PeftModel, batch: Batch) -> torch.Tensor:
    """Return the sum of the losses of a batch's trained tokens."""
    plain = model.get_base_model()
    states = plain.model(**batch.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    logits = plain.lm_head(states.index_select(0, batch.before))
    return torch.nn.functional.cross_entropy(logits.float(), batch.targets, reduction="sum")
