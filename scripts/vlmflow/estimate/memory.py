"""The memory of one GPU in a training step, by what takes it."""

from dataclasses import asdict

from vlmflow.estimate.accounts import Memory
from vlmflow.estimate.estimate_input import EstimateInput
from vlmflow.estimate.pass_memory import Batch, language_activations, picture_tower
from vlmflow.estimate.states import states

CONTEXT = 800_000_000
"""Bytes of CUDA's context: what the driver shows more than PyTorch reserves (H100, driver 580)."""

COMMUNICATION = 1_000_000_000
"""Bytes of NCCL's buffers with several GPUs. An assumption, not measured."""

LEFT, CACHE = 1_600_000_000, 0.1
"""What PyTorch reserves and does not use: bytes in any training, and a share of the bytes that come and go in a step.

LEFT is what ms-swift's trainings with rows of 150 tokens need beside tensors and context. CACHE is between the 0.06 of
ours on an H100, whose allocator has expandable segments, and the 0.35 of ms-swift's packs of 2,048 tokens. These
trainings and others: tests/published/trainings.csv, compared with the estimate by test_published_trainings.py.
"""


def memory(inputs: EstimateInput) -> Memory:
    """Return the memory of the batch that needs the most; without rows, what the training keeps between steps."""
    batches = inputs.batches() or [Batch(1, 0, 0, 0)]
    return max((_of_batch(inputs, batch) for batch in batches), key=lambda one: one.total)


def _of_batch(inputs: EstimateInput, batch: Batch) -> Memory:
    kept = states(inputs.shape, inputs.mode)
    language = language_activations(inputs.shape, inputs.mode, batch)
    tower = picture_tower(inputs.shape, inputs.mode, batch)
    at_once = language.kept + max(language.layer, language.logits)
    pictures = tower.kept + max(0, tower.passing - tower.kept - at_once)
    moving = max(at_once + pictures, kept.step)
    communication = COMMUNICATION if inputs.mode.processes > 1 else 0
    return Memory(
        **asdict(kept),
        activations=language.kept,
        layer=language.layer,
        logits=language.logits,
        pictures=pictures,
        cache=LEFT + round(CACHE * moving) if inputs.on_gpu else 0,
        context=(CONTEXT + communication) if inputs.on_gpu else 0,
    )
