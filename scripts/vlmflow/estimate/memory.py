"""The memory of one GPU in a training step, by what takes it."""

from vlmflow.estimate.accounts import Memory
from vlmflow.estimate.case import Case
from vlmflow.estimate.pass_memory import Batch, language_activations
from vlmflow.estimate.states import states
from vlmflow.estimate.tower import picture_tower

CONTEXT = 800_000_000
"""Bytes of CUDA's context, of the libraries' kernels and of cuBLAS's workspaces. An assumption, not measured."""

COMMUNICATION = 1_000_000_000
"""Bytes of NCCL's buffers with several GPUs. An assumption, not measured."""


def memory(case: Case) -> Memory:
    """Return the memory of the batch that needs the most; without rows, what the training keeps between steps."""
    batches = case.batches() or [Batch(1, 0, 0, 0)]
    return max((_of_batch(case, batch) for batch in batches), key=lambda one: one.total)


def _of_batch(case: Case, batch: Batch) -> Memory:
    kept = states(case.shape, case.way)
    language = language_activations(case.shape, case.way, batch)
    pictures = picture_tower(case.shape.vision, case.way, batch)
    at_once = language.kept + max(language.layer, language.logits)
    communication = COMMUNICATION if case.way.processes > 1 else 0
    return Memory(
        weights=kept.weights,
        adapter=kept.adapter,
        gradients=kept.gradients,
        optimizer=kept.optimizer,
        gathered=kept.gathered,
        activations=language.kept,
        layer=language.layer,
        logits=language.logits,
        pictures=pictures.kept + max(0, pictures.passing - pictures.kept - at_once),
        context=(CONTEXT + communication) if case.on_gpu else 0,
        host=kept.host,
    )
