"""Checkpoints in a run folder: which of them are whole, and which is the newest.

The files are those that transformers' Trainer writes (trainer.py, `_save_checkpoint`), in no order that a
kill respects; so a checkpoint counts only when each of them opens.
"""

import json
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
STATE = "trainer_state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    step: optimizer steps done. target: steps of the whole run. state: transformers' trainer state.
    """

    folder: Path
    step: int
    target: int
    state: dict[str, Any]

    @property
    def best(self) -> Path:
        """The checkpoint with the lowest validation loss so far, beside this one."""
        return self.folder.parent / Path(self.state["best_model_checkpoint"]).name


def newest_whole_checkpoint(output: Path, processes: int) -> Checkpoint | None:
    """Give the newest checkpoint under `output` of which every file opens, or None.

    processes: how many trainers wrote it; each leaves the state of its random numbers.
    Newer ones that are not whole are removed: a kill or a full disk cut them off.
    """
    for folder in sorted(output.glob("checkpoint-*"), key=_step, reverse=True):
        if (checkpoint := read_checkpoint(folder, processes)) is not None:
            return checkpoint
        shutil.rmtree(folder)
    return None


def read_checkpoint(folder: Path, processes: int) -> Checkpoint | None:
    """Give the checkpoint in `folder`, or None where a file is missing or does not open to its end."""
    try:
        state = json.loads((folder / STATE).read_bytes())
        json.loads((folder / ADAPTER_CONFIG).read_bytes())
        _open_every_tensor(folder / ADAPTER_WEIGHTS)
        for file in _torch_files(folder, processes):
            with zipfile.ZipFile(file) as archive:
                if archive.testzip() is not None:
                    return None
    except (OSError, ValueError, SafetensorError, zipfile.BadZipFile):
        return None
    return Checkpoint(folder, state["global_step"], state["max_steps"], state)


def copy_adapter(checkpoint: Path, target: Path) -> None:
    """Copy what peft needs of a checkpoint, readable for others (transformers writes weights with mode 0600)."""
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        shutil.copyfile(checkpoint / name, target / name)


def _open_every_tensor(file: Path) -> None:
    """Raise where the header promises a tensor that the file does not hold to its end."""
    with safe_open(file, framework="numpy") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (no mapping)
            tensors.get_slice(name)


def _torch_files(folder: Path, processes: int) -> list[Path]:
    """Give the files that torch.save wrote: zip archives, each with a checksum per record."""
    random_states = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
    optimizer = _deepspeed_shards(folder, processes) or [folder / "optimizer.pt"]
    return [*optimizer, folder / "scheduler.pt", *(folder / name for name in random_states)]


def _deepspeed_shards(folder: Path, processes: int) -> list[Path]:
    """Give DeepSpeed's own files, none without it: optimizer states by rank, in the folder that `latest` names.

    Raises ValueError where a rank's optimizer states are missing (deepspeed/runtime/engine.py, `save_checkpoint`:
    `latest` is written when all ranks are done).
    """
    shards = sorted(folder.glob("global_step*/*.pt"))
    if not shards:
        return []
    newest = (folder / "latest").read_text().strip()
    for rank in range(processes):
        if not list(folder.glob(f"{newest}/*zero_pp_rank_{rank}_mp_rank_*_optim_states.pt")):
            raise ValueError(f"{folder / newest}: no optimizer states of rank {rank}")
    return shards


def _step(folder: Path) -> int:
    number = folder.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1
