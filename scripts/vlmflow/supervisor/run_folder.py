"""The folder of a training: who holds it, which of its checkpoints are complete, and whether one would run code.

A run folder is bound to data and settings, and one trainer at a time writes there. It is not an output of a rule,
because Snakemake deletes the outputs of a failed job.

transformers' Trainer writes the files of a checkpoint (trainer.py, `_save_checkpoint`), and a kill may leave any of
them incomplete. So a checkpoint counts only if every file can be read, and those that it releases are as they were
saved. The run's strategy lists the files that it adds.

DeepSpeed loads its files as pickles without limits, and a pickle may call any function. The other files of a checkpoint
are loaded with `weights_only=True` (transformers, `in_trainer.fsdp2`).
"""

import fcntl
import json
import os
import re
import shutil
import socket
import stat
import struct
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.config.strategies import LORA, Strategy, Tuner
from vlmflow.core.errors import PassingError, VlmflowError, log, printable
from vlmflow.core.files import records_digest, sha256_of, write_json
from vlmflow.core.lease import Lease
from vlmflow.core.patience import Waiting
from vlmflow.in_trainer.messages import DIGESTS, PROGRESS, STATE, SavedDigests, evaluated, stalled
from vlmflow.supervisor.report import kinds_of, released_files

JOB = "job.json"
"""What a run folder is bound to."""

PATIENCE = 120.0
"""Seconds to wait for another trainer to end: one that lost its parent saves a checkpoint and ends."""

HOLDER = 200
"""Bytes of a lock that messages show; a holder writes its process and its host's name there."""

NAME = re.compile(r"checkpoint-[0-9]{1,18}")
"""The names that transformers gives its checkpoints."""

DAMAGED_ZIP = (zipfile.BadZipFile, EOFError, RuntimeError, struct.error, zlib.error)
"""What zipfile raises for changed bytes; RuntimeError includes unknown methods, and JSON that is nested too deeply."""

TAG = re.compile(r"global_step[0-9]{1,18}")
"""The names of the folder that a checkpoint's file `latest` names."""

SAFE = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""What DeepSpeed's own checkpoints name besides tensors, texts and numbers; they hold values alone.

`tests/stages/test_strategies_train.py` gathers these names from real ones.
"""


@dataclass(frozen=True)
class RunFolder:
    """The places in one run folder."""

    path: Path

    @property
    def output(self) -> Path:
        """The folder of the trainer's checkpoints."""
        return self.path / "checkpoints"

    @property
    def progress(self) -> Path:
        """JSON lines that the trainer writes as it goes; see `in_trainer.messages`."""
        return self.path / PROGRESS

    @property
    def trainer_log(self) -> Path:
        """The trainer's output."""
        return self.path / "trainer.log"

    def holder(self) -> str | None:
        """Return the process of this machine that trains here now, as messages call it; None if there is none.

        It asks for the lock for a moment: a training that begins at that moment waits half a second.
        """
        try:
            with self._lock.open() as lock:
                fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._named_holder()
        except FileNotFoundError:
            pass
        return None

    def held_since(self) -> float:
        """Return when the newest holder got the folder, in seconds since 1970."""
        return self._lock.stat().st_mtime

    def _named_holder(self) -> str:
        """Return what the holder wrote into the lock, without characters that a terminal would obey."""
        with self._lock.open("rb") as lock:
            text = lock.read(HOLDER).decode(errors="replace").strip()
        return printable(text) or "another process"

    @property
    def _lock(self) -> Path:
        return self.path / "lock"

    @property
    def page(self) -> Path:
        """The page that shows the training while it runs."""
        return self.path / "run.html"

    @contextmanager
    def held(self, describe: dict[str, object], patience: float = PATIENCE) -> Iterator[int]:
        """Hold the folder for this process alone; yields the lock's file descriptor.

        A child that inherits the descriptor keeps the lock when we are killed: a later run then waits for that orphan
        instead of writing beside it. On volumes without locks between machines, a lease excludes other machines (see
        `Lease`). describe: what the folder is bound to, for its job.json.

        Raises PassingError if another trainer holds it longer than `patience` seconds.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a+") as lock:
            self._wait_for(lock.fileno(), patience)
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            lock.flush()
            with Lease(self.path).held(patience):
                if not (self.path / JOB).exists():
                    write_json(self.path / JOB, describe)
                yield lock.fileno()

    @contextmanager
    def set_aside_where_refused(self, label: str) -> Iterator[None]:
        """Rename the folder if the block refuses the training's input: no run resumes from it, and nothing is lost.

        label: the stage and run, for the message.

        Raises the block's VlmflowError with the folder's new name. After a PassingError the folder stays: such an error
        does not concern the input.
        """
        try:
            yield
        except PassingError:
            raise
        except VlmflowError as error:
            paths = (self.path.with_name(f"{self.path.name}.refused-{n}") for n in count(1))
            aside = next(path for path in paths if not path.exists())
            self.path.rename(aside)
            raise VlmflowError(
                f"{label}: the input changed during training: {error.cause}",
                f"{error.next_step}; then run the same command again: it trains from the first step, because it is "
                f"unknown what the steps so far were trained on (their run folder is now {aside})",
            ) from None

    def _wait_for(self, lock: int, patience: float) -> None:
        waiting, announced = Waiting(), False
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._named_holder()
            if waiting.seconds() > patience:
                raise PassingError(
                    f"{self.path}: {holder} is training here",
                    "wait for it to end, or stop it; then run the same command again",
                )
            if not announced:
                log.info(f"{self.path}: waiting for {holder} to end its training")
                announced = True
            time.sleep(0.5)


class TrainerState(msgspec.Struct, frozen=True):
    """The used fields of `trainer_state.json`, transformers' own file (trainer_callback.py, `TrainerState`).

    global_step, max_steps: optimizer steps done, and of the whole run. best_model_checkpoint, best_metric: folder and
    validation loss of the best checkpoint; null before the first evaluation. log_history: what was logged, by step.
    """

    global_step: int
    max_steps: int
    best_model_checkpoint: str | None = None
    best_metric: float | None = None
    log_history: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    state: TrainerState

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.global_step

    @property
    def target(self) -> int:
        """Optimizer steps of the whole run."""
        return self.state.max_steps

    @property
    def best(self) -> Path | None:
        """The checkpoint with the lowest validation loss so far, in the same folder; None if no loss was a number."""
        named = self.state.best_model_checkpoint
        return self.folder.parent / Path(named).name if named else None

    def ended(self, early_stop_after: int | None, stop_at: int | None = None) -> bool:
        """Return whether the training ended here or before: at its evaluated last step, or early (see `ended_early`).

        stop_at: the last step of a training that is told to stop before its target (`Training.stop_at`).
        """
        last = self.target if stop_at is None else min(stop_at, self.target)
        at_end = self.step >= last and evaluated(self.state.log_history, last)
        return at_end or self.ended_early(early_stop_after)

    def ended_early(self, early_stop_after: int | None) -> bool:
        """Return whether the training ended before its last step because validation loss stopped falling."""
        return self.step < self.target and stalled(self.state.log_history, early_stop_after)


def newest_whole_checkpoint(output: Path, processes: int, strategy: Strategy, tuner: Tuner = LORA) -> Checkpoint | None:
    """Return the newest complete checkpoint under `output`, or None.

    processes: the number of trainers that wrote it; each saves the state of its random numbers. strategy, tuner: how
    they trained. Newer checkpoints that a kill or a full disk left incomplete, or whose bytes have changed since, are
    removed. One that was saved to its end but lacks a kind of file has another form, and may be somebody's work: it is
    moved to `aside`, a folder beside `output`. Folders that transformers cannot have made are somebody's own.
    """
    folders = [
        path for path in output.glob("*") if NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    for folder in sorted(folders, key=lambda path: int(path.name.partition("-")[2]), reverse=True):
        if (checkpoint := read_checkpoint(folder, processes, strategy, tuner)) is not None:
            return checkpoint
        states = [pattern.format(rank="*", latest="*") for pattern in strategy.states]
        kinds = [*kinds_of(tuner), *states, "scheduler.pt", "rng_state*.pth", STATE]
        missing = [kind for kind in kinds if not any(folder.glob(kind))]  # STATE is written last
        if not missing or STATE in missing:
            log.warning(f"{folder}: incomplete or damaged; removed")
            shutil.rmtree(folder)
            continue
        aside = output.parent / "aside"
        aside.mkdir(exist_ok=True)
        kept = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=aside))
        folder.rename(kept)
        log.warning(f"{folder}: lacks {', '.join(missing)}, so no training can resume from it; moved to {kept}")
    return None


def read_checkpoint(folder: Path, processes: int, strategy: Strategy, tuner: Tuner = LORA) -> Checkpoint | None:
    """Return the checkpoint in `folder`, or None if a file is missing, incomplete, of another one or not as saved.

    processes: the number of trainers that wrote it. strategy, tuner: how they trained.

    Raises VlmflowError if the trainer's state has another form than transformers gives it.
    """
    from safetensors import SafetensorError  # the environment `data` is without it; agents of other nodes import this

    try:
        state = json.loads((folder / STATE).read_bytes())
        saved, names = _saved_digests(folder), released_files(folder, tuner)  # raises if one is missing
        if saved.sha256 and any(saved.sha256.get(name) != sha256_of(folder / name) for name in names):
            return None
        random_states = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
        # Files of torch.save are zip archives with a checksum per record.
        for file in [
            *_states(folder, processes, strategy),
            *(folder / name for name in ("scheduler.pt", *random_states)),
        ]:
            with zipfile.ZipFile(file) as archive:
                if archive.testzip() is not None:
                    return None
            if saved.records and saved.records.get(str(file.relative_to(folder))) != records_digest(file):
                return None
    except (OSError, ValueError, SafetensorError, *DAMAGED_ZIP):
        return None
    try:
        checkpoint = Checkpoint(folder, msgspec.convert(state, TrainerState))
        of_another = NAME.fullmatch(folder.name) and folder.name != f"checkpoint-{checkpoint.step}"
        return None if of_another else checkpoint
    except msgspec.ValidationError as error:
        raise VlmflowError(
            f"{folder / STATE}: {error}",
            f"another version of transformers may have written it: move {folder} away and run the same command again",
        ) from None


def _saved_digests(checkpoint: Path) -> SavedDigests:
    """Return the digests of a checkpoint's files as they were saved; none for those of earlier versions.

    Raises ValueError if they cannot be read.
    """
    if not (checkpoint / DIGESTS).exists():
        return SavedDigests({})
    return msgspec.json.decode((checkpoint / DIGESTS).read_bytes(), type=SavedDigests)


def _states(folder: Path, processes: int, strategy: Strategy) -> list[Path]:
    """Return the files that the strategy adds; raises ValueError if one is missing, or `latest` is empty."""
    named = any("{latest}" in pattern for pattern in strategy.states)
    latest = (folder / "latest").read_text().strip() if named else ""
    if named and not latest:
        raise ValueError(f"{folder / 'latest'}: empty")
    files: set[Path] = set()
    for name in {pattern.format(rank=rank, latest=latest) for pattern in strategy.states for rank in range(processes)}:
        matching = list(folder.glob(name))
        if not matching:
            raise ValueError(f"{folder}: no {name}")
        files.update(matching)
    return sorted(files)


class ForeignCodeError(VlmflowError):
    """A checkpoint is not what DeepSpeed writes: to load it could run somebody's code."""


class _Inert:
    """Stands for a safe global while a file is read: nothing of DeepSpeed is imported or called."""

    def __new__(cls, *values: Any) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *values: Any) -> None:
        """Take any values, and keep none."""

    def __setstate__(self, state: Any) -> None:
        """Keep nothing."""


def refuse_foreign_code(checkpoint: Path) -> None:
    """Refuse a checkpoint unless DeepSpeed's files in it name only what its own ones name (`SAFE`).

    Each is read with `weights_only=True`, without the bytes of its tensors. It imports torch, which takes seconds.

    Raises ForeignCodeError with the file and what it names, or how its form differs.
    """
    import torch

    latest = (checkpoint / "latest").read_text(errors="replace").strip()
    if not TAG.fullmatch(latest):
        raise ForeignCodeError(
            f"{checkpoint / 'latest'}: {latest[:100]!r} is no name of DeepSpeed's", _next(checkpoint)
        )
    stand_ins: list[Any] = [(type(name, (_Inert,), {}), name) for name in SAFE]
    with torch.serialization.safe_globals(stand_ins):
        for file in sorted((checkpoint / latest).iterdir()):
            try:
                if not stat.S_ISREG(file.lstat().st_mode):
                    raise ValueError("it is no regular file")
                names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
                if not names:
                    torch.load(file, map_location="meta", weights_only=True)
            except Exception as error:  # a file made on purpose can raise anything
                reason = printable(str(error))[:300]
                raise ForeignCodeError(
                    f"{file}: has another form than DeepSpeed's files: {reason}", _next(checkpoint)
                ) from None
            if names:
                calls = printable(", ".join(names))[:300]
                raise ForeignCodeError(f"{file}: would call {calls} when it is loaded", _next(checkpoint))


def _next(checkpoint: Path) -> str:
    return (
        f"find out who wrote {checkpoint}, and load it nowhere; if it was this training, report it with its name; "
        f"after `rm -r {checkpoint}` the same command resumes from the checkpoint before, or begins again"
    )
