"""Code for trainers, which Python runs first (sitecustomize): strategies on cores, kills, counts, faults."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from warm_programs import WARM

DEEPSPEED = """
import sys
TRAINER = "vlmflow.in_trainer.process" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv
if TRAINER and "--deepspeed" in sys.orig_argv:
    import deepspeed
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
"""
"""transformers starts DeepSpeed's communication only on GPUs; on cores DeepSpeed would first compile a faster one."""

FSDP2 = """
if TRAINER and "--fsdp" in sys.orig_argv:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    begin = PartialState.__init__

    def __init__(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = __init__
"""
"""accelerate shards with FSDP2 only on GPUs, and trains plain DDP on cores."""

KILL = """
import os
FIRST = TRAINER and os.environ.get("RANK") == "0"
if TRAINER and "VLMFLOW_TEST_KILL_IN_SAVE" in os.environ:
    import threading, time
    from pathlib import Path
    from transformers.trainer_callback import TrainerState
    step, mark = os.environ["VLMFLOW_TEST_KILL_IN_SAVE"].split(maxsplit=1)
    save = TrainerState.save_to_json

    def die():
        while not Path(mark).exists():
            time.sleep(0.002)
        os.kill(os.getpid(), 9)

    def save_to_json(self, path):
        if self.global_step == int(step):
            Path(mark).touch()
            time.sleep(60)
        save(self, path)

    TrainerState.save_to_json = save_to_json
    threading.Thread(target=die, daemon=True).start()
"""
"""Kill all trainers in the save after a step, when only the trainer's state is not written yet: KILL_IN_SAVE has the
step, and a file that marks the moment."""

COUNT = """
if FIRST and "VLMFLOW_TEST_COUNT_GATHERED" in os.environ:
    import torch, transformers
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Count(TorchDispatchMode):
        gathered = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function.namespace in ("c10d", "_c10d_functional"):
                tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                Count.gathered += sum(tensor.nbytes for tensor in tensors)
            return result

    save_checkpoint = transformers.Trainer._save_checkpoint

    def _save_checkpoint(self, *args, **kwargs):
        with Count():
            save_checkpoint(self, *args, **kwargs)
        with open(os.environ["VLMFLOW_TEST_COUNT_GATHERED"], "w") as file:
            file.write(str(Count.gathered))

    transformers.Trainer._save_checkpoint = _save_checkpoint
"""
"""Write how many bytes collectives returned to the first process in saves so far to the file COUNT_GATHERED."""


def before_trainers(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Python run some code before that of the trainers (warm/sitecustomize.py)."""
    (folder / "before.py").write_text(code)
    monkeypatch.setenv("VLMFLOW_BEFORE", str(folder / "before.py"))
    monkeypatch.setenv("PYTHONPATH", WARM)


CODE = """
import json, os, signal, sys, time
if "vlmflow.in_trainer.process" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv:
    import torch, transformers
    from pathlib import Path
    fault = json.loads(os.environ["VLMFLOW_TEST_FAULT"])

    def is_here(place, step):
        if fault["place"] != place or os.environ["RANK"] != str(fault["rank"]) or step < fault["step"]:
            return False
        if fault["once"]:
            if step > fault["step"] or Path(fault["made"]).exists():
                return False
            Path(fault["made"]).touch()
        return True

    def note(kind, step, inputs):
        with Path(fault["made"]).with_name(f"{kind}-{os.environ['RANK']}").open("a") as file:
            values = [inputs[name].tolist() for name in ("input_ids", "labels")]
            file.write(json.dumps([step, *values]) + "\\n")

    def act():
        if fault["what"] == "hang":
            while True:
                time.sleep(1)
        if fault["what"] == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        os.kill(os.getpid(), signal.Signals[fault["what"]])

    def other_loss(change):
        def hook(model, inputs, output):
            output["loss"] = change(output["loss"])
            return output
        return hook

    Trainer = transformers.Trainer
    train, predict, save = Trainer.training_step, Trainer.prediction_step, Trainer._save_optimizer_and_scheduler

    def training_step(self, model, inputs, *args, **kwargs):
        note("trained", self.state.global_step + 1, inputs)
        if not is_here("step", self.state.global_step + 1):
            return train(self, model, inputs, *args, **kwargs)
        hooks = []
        if fault["what"] == "loss":
            hooks = [model.register_forward_hook(other_loss(lambda loss: loss * float("nan")))]
        elif fault["what"] == "exploded":
            hooks = [model.register_forward_hook(other_loss(lambda loss: loss + 200))]
        elif fault["what"] == "gradient":
            weight = next(weight for weight in model.parameters() if weight.requires_grad)
            hooks = [weight.register_hook(lambda gradient: gradient * float("inf"))]
        else:
            act()
        loss = train(self, model, inputs, *args, **kwargs)
        for hook in hooks:
            hook.remove()
        return loss

    def prediction_step(self, model, inputs, *args, **kwargs):
        note("evaluated", self.state.global_step, inputs)
        if is_here("evaluation", self.state.global_step):
            act()
        return predict(self, model, inputs, *args, **kwargs)

    def save_state(self, *args, **kwargs):
        save(self, *args, **kwargs)
        if is_here("save", self.state.global_step):
            act()

    Trainer.training_step, Trainer.prediction_step = training_step, prediction_step
    Trainer._save_optimizer_and_scheduler = save_state
"""
"""Python runs this before the trainer's code (warm/sitecustomize.py)."""


@dataclass(frozen=True)
class Passed:
    """A forward pass that a rank made, at a step: token ids and labels of its rows."""

    step: int
    tokens: list[list[int]]
    labels: list[list[int]]


def passes(folder: Path, kind: str, rank: int) -> list[Passed]:
    """Return the forward passes that a rank made in trainings with `make_fault`, as its model got them.

    kind: "trained" or "evaluated".
    """
    lines = (folder / "fault" / f"{kind}-{rank}").read_text().splitlines()
    return [Passed(*json.loads(line)) for line in lines]


def make_fault(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    what: str = "",
    place: str = "nowhere",
    step: int = 0,
    rank: int = 0,
    once: bool = True,
) -> None:
    """Make the trainers that start from now on have a fault, and note each forward pass (`passes`).

    what: a signal's name, "hang", "out of memory", or what is wrong with a step: "loss" (NaN), "gradient" (infinite),
    "exploded". place: "step", "evaluation", "save", or "nowhere". step: in the training, evaluation or save of this
    step; unless `once`, at each step from this one on.
    """
    (folder / "fault").mkdir()
    (folder / "fault" / "before.py").write_text(CODE)
    fault = {"what": what, "place": place, "step": step, "rank": rank, "once": once}
    monkeypatch.setenv("VLMFLOW_TEST_FAULT", json.dumps(fault | {"made": str(folder / "fault" / "made")}))
    monkeypatch.setenv("VLMFLOW_BEFORE", str(folder / "fault" / "before.py"))
    monkeypatch.setenv("PYTHONPATH", WARM)
