"""The rows that each rank trains and evaluates, from ms-swift's own loaders; what follows is in the stages' tests."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmflow.in_trainer.batches import Batches, Fixed
from vlmflow.in_trainer.messages import Batch, Heart, Orders, rows_of_step
from vlmflow.lengths.count import RowLength

NUMBERS = range(17)
"""A data set whose rows are their own numbers."""


class Fed(list):
    """What a collator makes of rows, here the rows themselves; the trainer asks for its tensors by name."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(rows)
        self.mask = torch.ones(len(rows), 3)

    def get(self, name: str) -> torch.Tensor | None:
        return self.mask if name == "attention_mask" else None


class Trainer:
    """The part of a trainer that `Batches` uses: ms-swift's loader, transformers' way to take batches from it."""

    def __init__(self, workers: int, sharing: int = 1) -> None:
        self.workers = workers
        self.template = SimpleNamespace(sequence_parallel_size=sharing)
        self.state = SimpleNamespace(global_step=0)
        self.args = SimpleNamespace(resume_from_checkpoint=None)

    def training_step(self, *_: Any) -> None:
        return None

    floating_point_ops = training_step

    def get_train_dataloader(self) -> Any:
        from swift.dataloader.shard import BatchSamplerShard, DataLoaderShard

        sampler = BatchSamplerShard(len(NUMBERS), 2, shuffle=True, drop_last=False, data_seed=1)
        values = {"num_workers": self.workers, "persistent_workers": self.workers > 0, "collate_fn": Fed}
        return DataLoaderShard(NUMBERS, batch_sampler=sampler, **values)

    def get_batch_samples(self, *arguments: Any) -> Any:
        from transformers import Trainer

        return Trainer.get_batch_samples(self, *arguments)

    def _get_num_items_in_batch(self, *_: Any) -> None:
        return None


def batches_of(trainer: Trainer, folder: Path, lengths: list[int] | None = None, rank: int = 0) -> Batches:
    """Let a rank of a trainer take two batches a step. folder: its run folder. lengths: of rows to group by them."""
    grouped = None
    if lengths:
        grouped = str(folder / "lengths.jsonl")
        rows = [RowLength("row", 0, 0, length, 0, 0) for length in lengths]
        Path(grouped).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    orders = Orders(
        folder=str(folder),
        starter=1,
        processes=1,
        batches_per_step=2,
        tuner="lora",
        strategy="ddp",
        early_stop_after=None,
        group_by_length=grouped,
    )
    ranks: Any = SimpleNamespace(tell={})
    return Batches(orders, Heart(folder, rank), trainer, ranks)


def steps_of(trainer: Trainer, passes: int) -> Iterator[list[Batch]]:
    """Yield the two batches that a loop as that of transformers takes as one in each step."""
    loader = trainer.get_train_dataloader()
    for epoch in range(passes):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        while step := trainer.get_batch_samples(iterator, 1, "cpu")[0]:
            yield [list(batch) for batch in step[0]]
            trainer.state.global_step += 1


@pytest.mark.parametrize("workers", [0, 2])
def test_each_steps_rows_are_those_that_its_batches_hold(tmp_path: Path, workers: int) -> None:
    """Workers fetch ahead; a pass ends with a smaller step; the next one has another order."""
    trainer = Trainer(workers)
    batches = batches_of(trainer, tmp_path)
    taken = list(steps_of(trainer, 2))
    assert [rows_of_step(tmp_path, step + 1)[0] for step in range(len(taken))] == taken
    assert sorted(row for step in taken for batch in step for row in batch) == sorted([*NUMBERS, *NUMBERS])
    assert batches.waited > 0
    assert batches.tokens_of_step() == 0  # the last pass is over


def test_rows_of_similar_length_are_those_of_ms_swift(tmp_path: Path) -> None:
    """Its own sampler, with lengths that are known before the start."""
    from swift.dataloader.shard import BatchSamplerShard

    lengths = [100 * (number % 5) + number for number in NUMBERS]
    trainer = Trainer(0)
    batches_of(trainer, tmp_path, lengths)
    theirs = BatchSamplerShard(len(NUMBERS), 2, True, False, 1, group_by_length=True, lengths=lengths)
    assert [batch for step in steps_of(trainer, 1) for batch in step] == list(theirs)


@pytest.mark.parametrize(("rows", "size"), [(7, 1), (9, 1), (11, 2), (12, 2)])
def test_ranks_have_equally_many_batches_of_rows_of_similar_length(
    rows: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an odd number of rows, ms-swift's sampler gives the first of two ranks a row more."""
    from swift.dataloader.shard import BatchSamplerShard

    counts = []
    for rank in (0, 1):
        monkeypatch.setattr(BatchSamplerShard, "rank", rank)
        monkeypatch.setattr(BatchSamplerShard, "world_size", 2)
        steps = Fixed(4, list(range(rows))).steps(BatchSamplerShard(rows, size, True, False, 1))
        counts.append([len(step) for step in steps])
        assert len(counts[-1]) == len(steps)
    assert counts[0] == counts[1]


def test_a_rank_that_shares_its_rows_with_another_does_not_record_them_again(tmp_path: Path) -> None:
    """Of four ranks, the first two share rows, and the last two."""
    for rank in range(4):
        trainer = Trainer(0, sharing=2)
        batches = batches_of(trainer, tmp_path, rank=rank)
        taken = next(steps_of(trainer, 1))
        assert batches.of_step == taken, "a bad step names its rows all the same"
    assert rows_of_step(tmp_path, 1).keys() == {0, 2}


def even_batches(rows: int, size: int, rank: int, ranks: int) -> Any:
    from vlmflow.in_trainer.evaluation import (  # here: it takes seconds, and all test processes read this file
        EvenBatches,
        dealt,
    )

    return EvenBatches(dealt(range(rows), size, ranks), rank)


@given(rows=st.integers(1, 40), size=st.integers(1, 5), ranks=st.integers(1, 8))
def test_each_row_is_evaluated_once_in_as_many_batches_on_each_rank(rows: int, size: int, ranks: int) -> None:
    batches = [even_batches(rows, size, rank, ranks) for rank in range(ranks)]
    assert len({len(one) for one in batches}) == 1
    own = [row for one in batches for batch in list(one)[: one.own] for row in batch]
    assert sorted(own) == list(range(rows))
    assert all(0 < len(batch) <= size for one in batches for batch in one)


@pytest.mark.parametrize(("rank", "batches", "own"), [(0, [[0, 2], [4]], 2), (1, [[1, 3], [1, 3]], 1)])
def test_a_rank_with_fewer_rows_repeats_some(rank: int, batches: list[list[int]], own: int) -> None:
    found = even_batches(5, 2, rank, 2)
    assert (list(found), found.own) == (batches, own)


def test_a_rank_without_a_row_repeats_the_first_one() -> None:
    found = even_batches(1, 2, 1, 2)
    assert (list(found), found.own) == ([[0]], 0)
