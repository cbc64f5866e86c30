"""A run as the estimate sees it: how it trains, its rows' lengths, and the batches that need the most memory."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlmflow.config.model_types import ModelPart
from vlmflow.config.run_settings import RunSettings, TrainSettings
from vlmflow.config.settings import PartOf
from vlmflow.config.strategies import DDP, LORA, Part, Strategy, Tuner, strategy_of, tuner_of
from vlmflow.estimate.shape import PARTS, ModelShape
from vlmflow.rows.sharegpt import lines_of

Numbers = NDArray[np.int64]

BF16, FP32 = 2, 4
"""Bytes of a number. float16 takes as many as bfloat16."""

SDPA = "sdpa"


@dataclass(frozen=True)
class TrainingMode:
    """How a model is trained, and in which types.

    settings: the run's block `train`. processes: those of all nodes. nodes: machines, each with as many processes.
    network: bytes per second that a node sends to the others, at most.
    """

    settings: TrainSettings
    tuner: Tuner = LORA
    strategy: Strategy = DDP
    processes: int = 1
    nodes: int = 1
    network: float = 100e9 / 8

    def shares(self, part: Part) -> int:
        """Return into how many shares the processes cut a part; 1 means that every GPU holds all of it."""
        return self.processes if part in self.strategy.shards else 1

    @property
    def trained(self) -> frozenset[ModelPart]:
        """The parts of the model that are not frozen."""
        return frozenset(PARTS) - set(self.settings.freeze)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether layers are computed again; also if the smoke run is to find out."""
        return self.settings.gradient_checkpointing is not False

    @property
    def is_full(self) -> bool:
        """Whether the base's own weights are trained."""
        return not self.tuner.trains_adapter

    @property
    def half(self) -> bool:
        """Whether matrix products are in 16 bits, as in every training but one with dtype float32."""
        return self.settings.dtype != "float32"

    @property
    def autocast(self) -> bool:
        """Whether torch.autocast chooses the types; DeepSpeed and FSDP2 cast the weights instead."""
        return self.half and self.strategy.engine == "ddp"

    @property
    def base(self) -> int:
        """Bytes of a weight of the base, unless it is quantised. Under ddp, full fine-tuning loads float32 weights."""
        return BF16 if self.half and not (self.is_full and self.strategy.engine == "ddp") else FP32

    @property
    def trained_bytes(self) -> int:
        """Bytes of a weight that is trained, without the optimizer's own copy, and of its gradient.

        peft keeps adapters in float32; DeepSpeed casts them to the run's type (and gradients:
        `gradient_accumulation_dtype`); FSDP2 keeps float32 shards.
        """
        return BF16 if self.half and self.strategy.engine == "deepspeed" else FP32

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of AdamW's state for a weight: two moments, and DeepSpeed's float32 copy of a 16-bit weight."""
        return (FP32 if self.trained_bytes < FP32 else 0) + 2 * FP32


class Length(msgspec.Struct):
    """The fields of a line of `lengths/RUN/SPLIT.jsonl` that the estimate reads."""

    text_tokens: int
    picture_tokens: int
    trained_tokens: int = 0
    pictures: int = 1


class Row(NamedTuple):
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
    """Text and picture tokens of each row of a split, in the order of the file.

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
        filled = np.array([(*row, *(0, 1)[len(row) - 2 :]) for row in rows], dtype=np.int64).reshape(-1, 4)
        text, pictures, trained, shown = filled.T
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
        fits = self.tokens <= max_length
        return type(self)(self.text[fits], self.pictures[fits], self.trained[fits], self.shown[fits])

    def extremes(self) -> list[Row]:
        """Return the rows that may need the most memory: with more trained or picture tokens than any longer row."""
        order = np.lexsort((-self.pictures, -self.trained, -self.tokens))
        more = np.zeros(len(self), dtype=bool)
        more[:1] = True
        for numbers in (self.trained[order], self.pictures[order]):
            more[1:] |= numbers[1:] > np.maximum.accumulate(numbers)[:-1]
        chosen = order[more]
        columns = (numbers[chosen].tolist() for numbers in (self.text, self.pictures, self.trained))
        return [Row(*row) for row in zip(*columns, strict=True)]

    def densest(self) -> tuple[float, float]:
        """Return the highest shares of a row's tokens that are trained, and that are pictures; 0 without rows."""
        if not len(self):
            return 0.0, 0.0
        return float((self.trained / self.tokens).max()), float((self.pictures / self.tokens).max())

    def grouped(self, size: int) -> Numbers:
        """Return rows in groups of `size`, as a training may draw them: groups × size places, the same each time.

        Rows that fill no group are left out, unless there is none.
        """
        drawn = np.random.default_rng(0).permutation(len(self))
        size = min(size, len(self))
        return drawn[: len(self) // size * size].reshape(-1, size)


@dataclass(frozen=True)
class Batch:
    """The rows that one GPU processes at a time.

    rows: their number. tokens: of all rows, with padding. longest: of the longest row. logits: positions for which
    logits are computed. padded: whether rows are padded to the longest, which sdpa needs a mask for. windowed: whether
    a row is longer than a layer's window, for which that layer needs one. pictures: picture tokens of all rows.
    """

    rows: int
    tokens: int
    longest: int
    logits: int
    padded: bool = False
    windowed: bool = False
    pictures: int = 0


@dataclass(frozen=True)
class EstimateInput:
    """What is estimated: a model, how it is trained, and the run's rows that fit max_length.

    train, val: the rows of each split. shortened: whether rows that are too long lose their oldest attempts instead of
    being left out. on_gpu: whether the run trains on GPUs. compared_rows: rows on which the tuned model is compared
    with its base (`runs.NAME.evaluate`). micro_batch_tokens: the most tokens of a planned micro-batch, whose rows stand
    in one sequence; None for batches of per_device_batch_size rows, padded to the longest.
    """

    shape: ModelShape
    mode: TrainingMode
    train: RowLengths
    val: RowLengths
    shortened: bool
    on_gpu: bool
    compared_rows: int = 0
    micro_batch_tokens: int | None = None

    @property
    def settings(self) -> TrainSettings:
        """The run's block `train`."""
        return self.mode.settings

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
        settings, window = self.settings, self.shape.of.window
        rows, share = settings.per_device_batch_size, settings.sequence_parallel
        text, pictures, trained = (ceil(count * rows / share) for count in (row.text, row.pictures, row.trained))
        longest, masks = ceil((text + pictures) / rows), settings.attention == SDPA
        return Batch(
            rows=rows,
            tokens=text + pictures,
            longest=longest,
            logits=text + pictures if share > 1 else text if rows > 1 else trained,
            padded=rows > 1 and masks,
            windowed=window is not None and longest > window and masks,
            pictures=pictures,
        )

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
        train, val = self._fitted(self.train, settings), self._fitted(self.val, settings)
        return replace(self, mode=replace(self.mode, settings=settings), train=train, val=val)

    def _fitted(self, rows: RowLengths, settings: TrainSettings) -> RowLengths:
        if settings.image_max_tokens < self.settings.image_max_tokens:
            most = self.shape.budget(settings.image_max_tokens).most
            # Pictures of several sizes may have fewer tokens.
            rows = replace(rows, pictures=np.minimum(rows.pictures, rows.shown * most)) if most else rows
        return rows.fitted(settings.max_length, shorten=self.shortened)

    def with_mode(self, **changes: Any) -> Self:
        """Return the same run trained in another way. changes: of `TrainingMode`."""
        return replace(self, mode=replace(self.mode, **changes))


def inputs_of(shape: ModelShape, settings: PartOf[RunSettings], train: RowLengths, val: RowLengths) -> EstimateInput:
    """Return what is estimated of a run, from its settings.

    train, val: the lengths of all rows; those that `over_long` leaves out or refuses do not count.
    """
    mode = TrainingMode(
        settings=settings.train,
        tuner=tuner_of(settings.tuner),
        strategy=strategy_of(settings.strategy, settings.deepspeed),
        processes=settings.nodes * settings.processes,
        nodes=settings.nodes,
        network=settings.network_gbit * 1e9 / 8,
    )
    shortened = settings.over_long == "shorten"
    train, val = (rows.fitted(settings.train.max_length, shorten=shortened) for rows in (train, val))
    return EstimateInput(shape, mode, train, val, shortened, settings.device == "cuda", settings.compared_rows)
