"""The lengths of a split's rows in memory, as arrays: what memory, work and advice are computed from.

A run as the estimate sees it, and the one place that maps a run's settings to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlmflow.config.run_blocks import EstimateBlock
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import Strategy, strategy_of, tuner_of
from vlmflow.estimate.pass_memory import Batch
from vlmflow.estimate.shape import PARTS, ModelShape
from vlmflow.estimate.states import Adapter, Sharding, TrainingMode
from vlmflow.rows.sharegpt import lines_of

Numbers = NDArray[np.int64]


class Length(msgspec.Struct):
    """The fields of a line of `lengths/RUN/SPLIT.jsonl` that the estimate reads."""

    text_tokens: int
    picture_tokens: int
    trained_tokens: int = 0
    pictures: int = 1


@dataclass(frozen=True)
class Row:
    """The tokens of one row: text with the chat's marks, pictures, and how many of the text are trained."""

    text: int
    pictures: int
    trained: int

    @property
    def tokens(self) -> int:
        """Those that count against max_length."""
        return self.text + self.pictures


@dataclass(frozen=True)
class RowLengths:
    """Text and picture tokens of each row, in the order of the file.

    trained: those of the text that are trained. shown: the number of pictures, at least 1.
    """

    text: Numbers
    pictures: Numbers
    trained: Numbers
    shown: Numbers

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a lengths file (`lengths/RUN/SPLIT.jsonl`); raises VlmflowError if a line is damaged."""
        rows = lines_of(file, Length)
        return cls.of((row.text_tokens, row.picture_tokens, row.trained_tokens, row.pictures) for row in rows)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, ...]]) -> Self:
        """Make it from each row's tokens of text and of pictures, trained tokens, and number of pictures.

        The last two may be missing: 0 trained tokens mean that they are unknown, so that the whole text counts as
        trained; and there is one picture.
        """
        found = np.array([(*row, *(0, 1)[len(row) - 2 :]) for row in rows], dtype=np.int64).reshape(-1, 4)
        text, pictures, trained, shown = found.T
        return cls(text, pictures, np.where(trained, trained, text), shown)

    def __len__(self) -> int:
        return len(self.text)

    @property
    def tokens(self) -> Numbers:
        """Of each row, those that count against max_length."""
        return self.text + self.pictures

    def fitted(self, max_length: int, *, shorten: bool = False) -> Self:
        """Return the rows of at most `max_length` tokens. shorten: keep the others too, as long as that."""
        if shorten:
            text = np.minimum(self.text, np.maximum(max_length - self.pictures, 1))
            return replace(self, text=text, trained=np.minimum(self.trained, text))
        return self._only(self.tokens <= max_length)

    def _only(self, chosen: NDArray[np.bool_]) -> Self:
        return type(self)(self.text[chosen], self.pictures[chosen], self.trained[chosen], self.shown[chosen])

    def with_pictures_of(self, most: int) -> Self:
        """Return the rows with pictures of at most so many tokens; those of several sizes may have fewer."""
        return replace(self, pictures=np.minimum(self.pictures, self.shown * most))

    def extremes(self) -> list[Row]:
        """Return the rows that may need the most memory: with more trained or picture tokens than any longer row."""
        order = np.lexsort((-self.pictures, -self.trained, -self.tokens))
        more = np.zeros(len(self), dtype=bool)
        more[:1] = True
        for numbers in (self.trained[order], self.pictures[order]):
            more[1:] |= numbers[1:] > np.maximum.accumulate(numbers)[:-1]
        places = order[more]
        each = (numbers[places].tolist() for numbers in (self.text, self.pictures, self.trained))
        return [Row(*row) for row in zip(*each, strict=True)]

    def densest(self) -> tuple[float, float]:
        """Return the highest shares of a row's tokens that are trained, and that are pictures; 0 without rows."""
        if not len(self):
            return 0.0, 0.0
        return float((self.trained / self.tokens).max()), float((self.pictures / self.tokens).max())

    def grouped(self, size: int) -> NDArray[np.int64]:
        """Return rows in groups of `size`, as a training may draw them: groups × size places, the same each time.

        Rows that fill no group are left out, unless there is none.
        """
        drawn = np.random.default_rng(0).permutation(len(self))
        size = min(size, len(self))
        return drawn[: len(self) // size * size].reshape(-1, size)


SDPA = "sdpa"


@dataclass(frozen=True)
class EstimateInput:
    """What is estimated: a model, a training mode, the settings of a run, and its rows that fit max_length.

    train, val: the rows of each split. shortened: whether rows that are too long lose their oldest attempts instead of
    being left out. on_gpu: whether the run trains on GPUs. compared_rows: rows on which the tuned model is compared
    with its base (`runs.NAME.evaluate`). micro_batch_tokens: the most tokens of a planned micro-batch, whose rows stand
    in one sequence; None for batches of per_device_batch_size rows, padded to the longest.
    """

    shape: ModelShape
    mode: TrainingMode
    settings: TrainSettings
    train: RowLengths
    val: RowLengths
    shortened: bool
    on_gpu: bool
    compared_rows: int = 0
    micro_batch_tokens: int | None = None

    def batches(self) -> list[Batch]:
        """Return the batches that may need the most memory; [] without rows."""
        if self.micro_batch_tokens is None:
            return [self._fixed(row) for row in self.train.extremes()]
        return self._planned(self.micro_batch_tokens)

    def _fixed(self, row: Row) -> Batch:
        """Return a batch of such rows, as many as allowed. Processes with sequence_parallel share a row.

        ms-swift computes logits for the trained tokens of a single row alone (4.6, trainers/mixin.py,
        `prepare_logits_to_keep`): of several for all columns from the earliest trained token on, here their text; with
        sequence_parallel for all tokens.
        """
        rows, share = self.settings.per_device_batch_size, self.settings.sequence_parallel
        text, pictures, trained = (ceil(count * rows / share) for count in (row.text, row.pictures, row.trained))
        return Batch(
            rows=rows,
            tokens=text + pictures,
            longest=ceil((text + pictures) / rows),
            logits=text + pictures if share > 1 else text if rows > 1 else trained,
            padded=rows > 1 and self.settings.attention == SDPA,
            windowed=self._windowed(ceil((text + pictures) / rows)),
            pictures=pictures,
        )

    def _windowed(self, longest: int) -> bool:
        window = self.shape.of.window
        return window is not None and longest > window and self.settings.attention == SDPA

    def _planned(self, most: int) -> list[Batch]:
        """Return the dearest micro-batches of at most `most` tokens: rows in one sequence, and longer rows alone.

        Their tokens are the densest that rows can give: as many trained ones as possible, or as many of pictures.
        """
        alone = [
            Batch(1, row.tokens, row.tokens, row.trained, pictures=row.pictures)
            for row in self.train.extremes()
            if row.tokens > most
        ]
        rest = self.train.fitted(most)
        if not len(rest):
            return alone
        trained, pictures = (ceil(most * share) for share in rest.densest())
        longest = int(rest.tokens.max())
        return [
            *alone,
            Batch(ceil(most / longest), most, longest, trained, pictures=min(pictures, most - trained)),
            Batch(ceil(most / longest), most, longest, min(trained, most - pictures), pictures=pictures),
        ]

    def with_settings(self, **changes: object) -> Self:
        """Return the same run with other settings of `train`; rows longer than a lower max_length are left out."""
        settings = self.settings.model_copy(update=changes)
        mode = replace(self.mode, gradient_checkpointing=settings.gradient_checkpointing is not False)
        train, val = self._fitted(self.train, settings), self._fitted(self.val, settings)
        return replace(self, settings=settings, mode=mode, train=train, val=val)

    def _fitted(self, rows: RowLengths, settings: TrainSettings) -> RowLengths:
        if settings.image_max_tokens < self.settings.image_max_tokens:
            most = self.shape.budget(settings.image_max_tokens).most
            rows = rows.with_pictures_of(most) if most else rows
        return rows.fitted(settings.max_length, shorten=self.shortened)

    def with_sharding(self, sharding: Sharding) -> Self:
        """Return the same run with another strategy."""
        return replace(self, mode=replace(self.mode, sharding=sharding))

    def on_gpus(self, nodes: int, processes: int, strategy: Strategy) -> Self:
        """Return the same run on other GPUs, with another strategy. processes: of each node, as in a run's settings."""
        ranks = nodes * processes
        mode = replace(self.mode, nodes=nodes, processes=ranks, sharding=sharding_of(strategy, ranks))
        return replace(self, mode=mode)


def sharding_of(strategy: Strategy, processes: int) -> Sharding:
    """Return what a strategy shares among `processes`."""
    return Sharding(
        engine=strategy.engine,
        weights=processes if "weights" in strategy.shards else 1,
        gradients=processes if "gradients" in strategy.shards else 1,
        optimizer=processes if "optimizer" in strategy.shards else 1,
        second_copy=strategy.second_copy,
        optimizer_on_host="optimizer" in strategy.offloads,
        weights_on_host="weights" in strategy.offloads,
    )


def inputs_of(shape: ModelShape, settings: EstimateBlock, train: RowLengths, val: RowLengths) -> EstimateInput:
    """Return what is estimated of a run, from its settings.

    train, val: the lengths of all rows; those that `over_long` leaves out or refuses do not count.
    """
    training, strategy = settings.train, strategy_of(settings.strategy, settings.deepspeed)
    ranks = settings.nodes * settings.processes
    lora = training.lora
    mode = TrainingMode(
        tuner=tuner_of(settings.tuner).name,
        trained=frozenset(PARTS) - set(training.freeze),
        adapter=Adapter(lora.rank, lora.dropout, tuple(lora.target_modules), lora.dora),
        sharding=sharding_of(strategy, ranks),
        processes=ranks,
        nodes=settings.nodes,
        network=settings.network_gbit * 1e9 / 8,
        half=training.dtype != "float32",
        double_quant=training.quantisation.double,
        gradient_checkpointing=training.gradient_checkpointing is not False,
        eager=training.attention == "eager",
        liger=training.liger,
    )
    shortened = settings.over_long == "shorten"
    train, val = (rows.fitted(training.max_length, shorten=shortened) for rows in (train, val))
    on_gpu = settings.device == "cuda"
    return EstimateInput(shape, mode, training, train, val, shortened, on_gpu, settings.compared_rows)
