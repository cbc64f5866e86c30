"""Checkpoints with the files of a real training, and little content."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file


def checkpoint(output: Path, step: int, processes: int = 2, states: Sequence[str] = ("optimizer.pt",)) -> Path:
    """Write the folder of a complete checkpoint under `output`. states: the files that the training strategy adds."""
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"a": torch.ones(64, 8)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    state = {"global_step": step, "max_steps": 30, "best_model_checkpoint": f"/elsewhere/checkpoint-{step}"}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    names = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
    for name in (*states, "scheduler.pt", *names):
        (folder / name).parent.mkdir(exist_ok=True)
        if name == "latest":
            (folder / name).write_text(f"global_step{step}")
        else:
            torch.save({"x": torch.zeros(100)}, folder / name)
    return folder
