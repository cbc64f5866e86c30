"""What the workflow asks of its trainers besides ms-swift's arguments: one JSON word of their command line."""

from pathlib import Path

import msgspec

from vlmflow.core.errors import VlmflowError

PROGRESS = "progress.jsonl"
"""The file of a run folder with the trainer's events."""


class MicroBatches(msgspec.Struct, frozen=True):
    """How steps are cut into micro-batches (`in_trainer.micro_batches`).

    tokens: the most in one. rows_per_step: of all processes. seed: of the rows' order. padded: whether its rows are
    filled up to the longest. train, val: the absolute paths of the splits' lengths files.
    """

    tokens: int
    rows_per_step: int
    seed: int
    padded: bool
    train: str
    val: str


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """The orders.

    folder: the absolute path of the run folder. starter: the process that starts torchrun. processes: the number of
    trainers. batches_per_step: of each trainer, where micro_batches is null. tuner, strategy: their names in `config`.
    group_by_length: the absolute path of the train split's lengths file, where rows of a batch are of similar length.
    early_stop_after: evaluations in a row without a lower loss after which the training ends; null: never. stop_at: the
    step after whose evaluation the training ends; null: the last one. seconds: how long this process may run before it
    saves a checkpoint and ends, after at least one step; null: without a limit.
    """

    folder: str
    starter: int
    processes: int
    batches_per_step: int
    tuner: str
    strategy: str
    early_stop_after: int | None
    micro_batches: MicroBatches | None = None
    group_by_length: str | None = None
    stop_at: int | None = None
    seconds: float | None = None

    @property
    def progress(self) -> Path:
        """The file of the trainer's events."""
        return Path(self.folder, PROGRESS)

    def as_word(self) -> str:
        """Return the orders as one word of a command line."""
        return msgspec.json.encode(self).decode()


def read_orders(word: str) -> Orders:
    """Parse the orders; raises VlmflowError if the word has another form."""
    try:
        return msgspec.json.decode(word, type=Orders)
    except msgspec.DecodeError as error:
        raise VlmflowError(f"{word!r:.100}: {error}", "start trainers by the workflow's rules") from None
