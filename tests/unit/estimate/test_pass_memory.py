"""The memory of a pass is measured once, and then found in the user's cache."""

import subprocess
import sys
from pathlib import Path

import pytest

from made_inputs import mode_of, text_shape
from vlmflow.config.strategies import QLORA, ZERO2, ZERO3
from vlmflow.core.errors import VlmflowError
from vlmflow.estimate import memory, shape
from vlmflow.estimate.memory import Moment, PassMemory
from vlmflow.estimate.run import Batch
from workflow_runs import ROOT

TEXT = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SOME = Batch(1, 1_000, 1_000, 100)


def needed() -> memory.Activations:
    return memory.language_activations(text_shape(**TEXT), mode_of(), SOME)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape._measured.cache_clear()
    return tmp_path / "vlmflow" / "passes"


def measured_elsewhere(cache: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Let another process print the memory of a small model. before: what it runs first."""
    code = f"{before}\nimport test_pass_memory as one\nprint(one.needed())"
    paths = ":".join(str(ROOT / name) for name in ("scripts", "tests/helpers", "tests/unit/estimate"))
    environment = {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(cache.parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
    )


def test_what_is_in_the_cache_needs_no_torch(cache: Path) -> None:
    """Nor does a measurement advise to install a package, as far as this machine's CPU makes a library do it."""
    measured = measured_elsewhere(cache)
    assert "kernels" not in measured.stderr
    assert list(cache.iterdir())
    again = measured_elsewhere(cache, 'import sys; sys.modules["torch"] = None')
    assert again.stdout == measured.stdout != ""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a measurement of a pass take no time."""
    found = PassMemory(Moment(5, 1, 0, 0), [Moment(9, 1, 0, 0)], [Moment(9, 0, 1, 0)])
    monkeypatch.setattr("vlmflow.estimate.fake_pass.measure", lambda wanted: found)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "damaged", [b'{"kept": [1', b'{"kept": [1, 1, 1, 1], "layers": [], "loss": []}', b"[" * 100_000]
)
def test_a_damaged_file_in_the_cache_is_measured_again(cache: Path, damaged: bytes) -> None:
    found = needed()
    (file,) = cache.glob("fake_pass-*")
    whole = file.read_bytes()
    file.write_bytes(damaged)
    shape._measured.cache_clear()
    assert needed() == found
    assert file.read_bytes() == whole


@pytest.mark.usefixtures("quick")
def test_a_cache_that_cannot_be_written_costs_only_time(cache: Path) -> None:
    cache.parent.write_text("no folder")
    assert needed().kept > 0


def test_sizes_that_do_not_fit_together_are_named() -> None:
    """A head of an odd width cannot be rotated."""
    with pytest.raises(VlmflowError, match=r"(?s)config\.json fails: .*even rotary"):
        text_shape(**TEXT | {"head_dim": 15})


def test_an_adapter_of_a_hostile_size_takes_no_memory() -> None:
    """Its layers are so wide that no machine could hold the adapter: 2^48 bytes."""
    hostile = text_shape(**TEXT | {"intermediate_size": 1 << 42})
    assert memory.language_activations(hostile, mode_of(), SOME).kept > 1 << 42


def test_layers_with_and_without_experts_add_up() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "num_hidden_layers": 6}
    mode = mode_of({"gradient_checkpointing": False, "lora": {"target_modules": ["q_proj", "v_proj"]}})
    all_sparse, half, dense = (
        memory.language_activations(text_shape("qwen3_moe", **TEXT | experts | more), mode, SOME).kept
        for more in ({}, {"decoder_sparse_step": 2}, {"mlp_only_layers": list(range(6))})
    )
    assert dense < half < all_sparse
    assert half == pytest.approx((dense + all_sparse) / 2, rel=0.01)


def test_strategies_that_compute_alike_share_a_measurement() -> None:
    shape = text_shape(**TEXT)
    one, zero2, zero3 = (
        memory.pass_of(shape, mode)
        for mode in (mode_of(), mode_of(strategy=ZERO2, processes=4), mode_of(strategy=ZERO3, processes=4))
    )
    assert zero2 == zero3 != one
    assert memory.pass_of(shape, mode_of(tuner=QLORA)) != one


def test_memory_is_that_of_the_highest_moment() -> None:
    found = PassMemory(Moment(5, 1, 0, 0), [Moment(0, 3, 0, 0), Moment(100, 1, 0, 0)], [Moment(0, 0, 7, 1)])
    few, many = found.of(Batch(1, 10, 10, 10)), found.of(Batch(2, 80, 40, 10))
    assert (few.kept, few.layer, few.logits) == (15, 95, 155)
    assert (many.kept, many.layer, many.logits) == (85, 155, 2 * 40**2 + 70 - 85)
