"""Code for trainers, which Python runs first (sitecustomize): GPU strategies on this machine's cores, kills, counts."""

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
