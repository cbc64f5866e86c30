"""What a trainer does not import."""

import subprocess
import sys

import pytest

from workflow_runs import ROOT

UNWRAP = """
import sys
from torch.nn import Linear
from vlmflow.config.strategies import strategy_of
from vlmflow.in_trainer import engine
engine.spare_deepspeed(strategy_of(sys.argv[1]))
from accelerate.utils import extract_model_from_parallel
extract_model_from_parallel(Linear(1, 1))
print("deepspeed" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "imports"), [("ddp", "False"), ("zero2", "True")])
def test_deepspeed_is_imported_only_where_it_trains(strategy: str, imports: str) -> None:
    """Otherwise accelerate imports it to ask whether it wraps the model."""
    words = [sys.executable, "-c", UNWRAP, strategy]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "scripts")})
    assert done.stdout.split()[-1] == imports
