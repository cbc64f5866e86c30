"""Checkpoints in a run folder: which of them are whole, and which is the newest.

The files are those that transformers' Trainer writes (trainer.py, `_save_checkpoint`), in no order that a
kill respects; so a checkpoint counts only when each of them opens. Which files the run's strategy adds, its entry says.
"""

import json
import logging
import math
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from vlmflow.config.strategies import ADAPTER_WEIGHTS, Strategy
from vlmflow.core.account import read_account
from vlmflow.core.files import sha256_of
from vlmflow.core.integrity import refuse_changed
from vlmflow.training.accounts import StepLoss, TrainingReport

ADAPTER_CONFIG = "adapter_config.json"
STATE = "trainer_state.json"

log = logging.getLogger("vlmflow")


class TrainerState(msgspec.Struct, frozen=True):
    """What is read of `trainer_state.json`, transformers' own file (trainer_callback.py, `TrainerState`).

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
    """A whole checkpoint.

    strategy: how it was trained.
    """

    folder: Path
    state: TrainerState
    strategy: Strategy

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
        """The checkpoint with the lowest validation loss so far, beside this one; None where no loss was a number."""
        named = self.state.best_model_checkpoint
        return self.folder.parent / Path(named).name if named else None

    def ended(self, early_stop_after: int | None) -> bool:
        """Say whether the training ended here: at its evaluated last step, or early (see `ended_early`)."""
        at_target = self.step >= self.target and evaluated(self.state.log_history, self.step)
        return at_target or self.ended_early(early_stop_after)

    def ended_early(self, early_stop_after: int | None) -> bool:
        """Say whether validation loss had so long no new lowest value that the training ended below its last step."""
        return self.step < self.target and stalled(self.state.log_history, early_stop_after)


def logged(history: list[dict[str, Any]], kind: str) -> list[StepLoss]:
    """Give the losses of a trainer's log. kind: "loss" for those of training, "eval_loss" for those of validation."""
    return [(entry["step"], entry[kind]) for entry in history if kind in entry]


def evaluated(history: list[dict[str, Any]], step: int) -> bool:
    """Say whether a trainer's log holds the validation loss of a step."""
    return any(at == step for at, _ in logged(history, "eval_loss"))


def stalled(history: list[dict[str, Any]], early_stop_after: int | None) -> bool:
    """Say whether the last `early_stop_after` evaluations of a trainer's log brought no new lowest validation loss.

    The log is part of each checkpoint, so that a resumed training counts on. A loss that is no number is no lower one.
    """
    lowest, since = math.inf, 0
    for _, loss in logged(history, "eval_loss"):
        lowest, since = (loss, 0) if loss < lowest else (lowest, since + 1)
    return early_stop_after is not None and since >= early_stop_after


def newest_whole_checkpoint(output: Path, processes: int, strategy: Strategy) -> Checkpoint | None:
    """Give the newest checkpoint under `output` of which every file opens, or None.

    processes: how many trainers wrote it; each leaves the state of its random numbers. strategy: how they trained.
    Newer ones that a kill or a full disk cut off are removed. One that was saved to its end and still lacks a kind of
    file is of another form, and somebody's work: it is moved into the folder `aside` beside `output`.
    """
    for folder in sorted(output.glob("checkpoint-*"), key=_step, reverse=True):
        if (checkpoint := read_checkpoint(folder, processes, strategy)) is not None:
            return checkpoint
        missing = missing_kinds(folder, strategy)
        if not missing or STATE in missing:
            shutil.rmtree(folder)
            continue
        aside = output.parent / "aside"
        aside.mkdir(exist_ok=True)
        kept = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=aside))
        folder.rename(kept)
        log.warning(f"{folder}: lacks {', '.join(missing)}, so no training can resume from it; moved to {kept}")
    return None


def missing_kinds(folder: Path, strategy: Strategy) -> list[str]:
    """Name the kinds of files of which a checkpoint holds none. The trainer's state is written last."""
    states = [pattern.format(rank="*", latest="*") for pattern in strategy.states]
    kinds = [strategy.adapter, ADAPTER_CONFIG, *states, "scheduler.pt", "rng_state*.pth", STATE]
    return [kind for kind in kinds if not any(folder.glob(kind))]


def read_checkpoint(folder: Path, processes: int, strategy: Strategy) -> Checkpoint | None:
    """Give the checkpoint in `folder`, or None where a file is missing or does not open to its end.

    processes: how many trainers wrote it. strategy: how they trained.
    """
    try:
        state = json.loads((folder / STATE).read_bytes())
        json.loads((folder / ADAPTER_CONFIG).read_bytes())
        _open_every_tensor(folder / strategy.adapter)
        for file in _torch_files(folder, processes, strategy):
            with zipfile.ZipFile(file) as archive:
                if archive.testzip() is not None:
                    return None
    except (OSError, ValueError, SafetensorError, zipfile.BadZipFile):
        return None
    return Checkpoint(folder, msgspec.convert(state, TrainerState), strategy)


def copy_adapter(checkpoint: Checkpoint, target: Path) -> None:
    """Copy what peft needs of a checkpoint, readable for others (transformers writes weights with mode 0600)."""
    shutil.copyfile(checkpoint.folder / checkpoint.strategy.adapter, target / ADAPTER_WEIGHTS)
    shutil.copyfile(checkpoint.folder / ADAPTER_CONFIG, target / ADAPTER_CONFIG)


def adapter_digests(folder: Path, weights: str = ADAPTER_WEIGHTS) -> dict[str, str]:
    """Give the SHA-256 of an adapter's weights and of its configuration, under the names that report.json has.

    weights: the name of the file with the weights.
    """
    return {"adapter": sha256_of(folder / weights), "adapter_config": sha256_of(folder / ADAPTER_CONFIG)}


def refuse_changed_adapter(full: Path) -> None:
    """Refuse an adapter in `checkpoints/RUN/full` that is no more the one that the training handed on.

    Raises VlmflowError with the names of the files.
    """
    recorded = read_account(full / "report.json", TrainingReport).digests
    refuse_changed(
        "adapter files",
        full,
        {ADAPTER_WEIGHTS: recorded.adapter, ADAPTER_CONFIG: recorded.adapter_config},
        f"adapters/{full.parent.name}",
        f"remove {full} and run the same command again: it is copied from its run folder",
    )


def _open_every_tensor(file: Path) -> None:
    """Raise where the header promises a tensor that the file does not hold to its end."""
    with safe_open(file, framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (no mapping)
            tensors.get_slice(name)


def _torch_files(folder: Path, processes: int, strategy: Strategy) -> list[Path]:
    """Give the files that torch.save wrote: zip archives, each with a checksum per record."""
    random_states = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
    states = _states(folder, processes, strategy)
    return [*states, folder / "scheduler.pt", *(folder / name for name in random_states)]


def _states(folder: Path, processes: int, strategy: Strategy) -> list[Path]:
    """Give the files that the strategy adds; raises ValueError where one is missing, or `latest` names no folder."""
    named = any("{latest}" in pattern for pattern in strategy.states)
    latest = (folder / "latest").read_text().strip() if named else ""
    if named and not latest:
        raise ValueError(f"{folder / 'latest'}: empty")
    files: set[Path] = set()
    for pattern in {each.format(rank=rank, latest=latest) for each in strategy.states for rank in range(processes)}:
        found = list(folder.glob(pattern))
        if not found:
            raise ValueError(f"{folder}: no {pattern}")
        files.update(found)
    return sorted(files)


def _step(folder: Path) -> int:
    number = folder.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1
