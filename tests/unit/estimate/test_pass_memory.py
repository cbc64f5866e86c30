"""The memory of a pass is measured once, and then found in the user's cache."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.estimate import pass_memory
from vlmflow.estimate.pass_memory import Batch, Moment, PassMemory
from vlmflow.estimate.shape import ModelShape, TextShape
from vlmflow.estimate.way import Sharding, Way
from workflow_runs import ROOT

TEXT = TextShape(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=5,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
ONE = pass_memory.pass_of(ModelShape(TEXT, None, tied=False), Way(), padded=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pass_memory._known.cache_clear()
    return tmp_path / "vlmflow" / "passes"


def measured_elsewhere(cache: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Let another process print the memory of ONE. before: what it runs first."""
    code = f"{before}\nimport test_pass_memory as one\nprint(one.pass_memory.pass_memory(one.ONE))"
    paths = ":".join(str(ROOT / name) for name in ("scripts", "tests/helpers", "tests/unit/estimate"))
    environment = {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(cache.parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
    )


def test_what_is_in_the_cache_needs_no_torch(cache: Path) -> None:
    found = pass_memory.pass_memory(ONE)
    assert measured_elsewhere(cache, 'import sys; sys.modules["torch"] = None').stdout.strip() == str(found)


def test_a_measurement_gives_no_advice_to_install_a_package(cache: Path) -> None:
    """As far as this machine's CPU makes a library give it."""
    assert "kernels" not in measured_elsewhere(cache).stderr
    assert list(cache.iterdir())


def test_a_damaged_file_in_the_cache_is_measured_again(cache: Path) -> None:
    found = pass_memory.pass_memory(ONE)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-9], b'{"kept": [1, 1, 1, 1], "layers": [], "loss": []}', b"[" * 100_000):
        file.write_bytes(damaged)
        pass_memory._known.cache_clear()
        assert pass_memory.pass_memory(ONE) == found
        assert file.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_only_time(cache: Path) -> None:
    cache.parent.write_text("no folder")
    assert pass_memory.pass_memory(ONE).kept.token > 0


def test_sizes_that_do_not_fit_together_are_named(cache: Path) -> None:
    """A head of an odd width cannot be rotated."""
    with pytest.raises(VlmflowError, match=r"(?s)config\.json fails: .*even rotary"):
        pass_memory.pass_memory(msgspec.structs.replace(ONE, text=msgspec.structs.replace(TEXT, head_dim=15)))


def test_an_adapter_of_a_hostile_size_takes_no_memory() -> None:
    """Its layers are so wide that no machine could hold the adapter: 2^48 bytes."""
    from vlmflow.estimate.fake_pass import measure

    hostile = msgspec.structs.replace(ONE, text=msgspec.structs.replace(TEXT, intermediate_size=1 << 42))
    assert measure(hostile).kept.constant > 1 << 42


def test_layers_with_and_without_experts_count_as_those_with_experts() -> None:
    """Beside experts, down_proj is no linear layer but a matrix of theirs, whose dropout peft refuses."""
    from vlmflow.estimate.fake_pass import measure

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text = msgspec.structs.replace(TEXT, num_hidden_layers=6, **experts)
    mixed = msgspec.structs.replace(text, decoder_sparse_step=2)
    of_both = [
        measure(pass_memory.pass_of(ModelShape(one, None, tied=False), Way(), padded=False)) for one in (text, mixed)
    ]
    assert of_both[0] == of_both[1]


def test_strategies_that_compute_alike_share_a_measurement() -> None:
    shape = ModelShape(TEXT, None, tied=False)
    zero2, zero3 = (
        pass_memory.pass_of(shape, Way(sharding=Sharding("deepspeed", weights=weights)), padded=False)
        for weights in (1, 4)
    )
    assert zero2 == zero3 != ONE
    assert pass_memory.pass_of(shape, replace(Way(), tuner="qlora"), padded=False) != ONE


def test_memory_is_that_of_the_highest_moment() -> None:
    found = PassMemory(Moment(5, 1, 0, 0), [Moment(0, 3, 0, 0), Moment(100, 1, 0, 0)], [Moment(0, 0, 7, 1)])
    few, many = found.of(Batch(1, 10, 10, 10)), found.of(Batch(2, 80, 40, 10))
    assert (few.kept, few.layer, few.logits) == (15, 95, 155)
    assert (many.kept, many.layer, many.logits) == (85, 155, 2 * 40**2 + 70 - 85)
