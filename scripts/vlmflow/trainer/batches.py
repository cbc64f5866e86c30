"""The batches that a trainer takes from its loader: their rows and tokens, and how long it waited for them."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from vlmflow.trainer.row_log import Batch, RowLog


class Batches:
    """Notes the batches of a trainer of transformers, on each rank.

    A loader's workers fetch batches ahead, so its sampler has handed out more than was trained. Batches come in the
    sampler's order; so each one that the trainer takes is the oldest that was handed out.
    """

    def __init__(self, trainer: Any, log: RowLog | None) -> None:
        """Note batches from now on.

        log: gets the rows of each step; None for a rank that shares its rows with another one, which records them.
        """
        self.waited = 0.0
        """Seconds of this session in which the trainer waited for its next batch."""
        self.of_step: list[Batch] = []
        """The batches of the present step."""
        self._tokens: list[torch.Tensor | int] = []
        self._trainer = trainer
        self._log = log
        self._ahead: deque[list[int]] = deque()
        self._get_loader = trainer.get_train_dataloader
        trainer.get_train_dataloader = self._get_train_dataloader
        self._get_samples = trainer.get_batch_samples
        trainer.get_batch_samples = self._get_batch_samples

    def _get_train_dataloader(self, *arguments: Any, **values: Any) -> Any:
        loader = self._get_loader(*arguments, **values)
        # torch forbids another sampler, lest the batch size differ; this one hands out the same batches.
        object.__setattr__(loader, "batch_sampler", NotedSampler(loader.batch_sampler, self._ahead))
        return loader

    def _get_batch_samples(self, batches: Iterator[Any], count: int, *arguments: Any) -> Any:
        """Take the batches of the next step, as transformers does, and note their rows."""
        taken = self._get_samples(self._timed(batches), count, *arguments)
        self.of_step = [self._ahead.popleft() for _ in taken[0]]
        self._tokens = [_tokens_of(batch) for batch in taken[0]]
        if self.of_step and self._log:
            self._log.write(self._trainer.state.global_step + 1, self.of_step)
        return taken

    def tokens_of_step(self) -> int:
        """Return the tokens of this rank in the present step, without padding.

        transformers can count them too (`include_num_input_tokens_seen`), but then all ranks wait for each other in
        each forward pass (trainer.py, `_track_num_input_tokens`).
        """
        return int(sum(self._tokens))

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            begun = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.waited += time.monotonic() - begun
            yield batch


def _tokens_of(batch: dict[str, Any]) -> torch.Tensor | int:
    """Return the number of a batch's tokens; a tensor, so that the GPU is not waited for. Without padding, no mask."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else mask.sum()


class NotedSampler:
    """A loader's batch sampler that notes what it hands out."""

    def __init__(self, sampler: Any, ahead: deque[list[int]]) -> None:
        self._sampler = sampler
        self._ahead = ahead

    def __iter__(self) -> Iterator[list[int]]:
        self._ahead.clear()
        for samples in self._sampler:
            self._ahead.append(samples)
            yield samples

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the sampler, such as set_epoch, for ms-swift and transformers."""
        return getattr(self._sampler, name)
