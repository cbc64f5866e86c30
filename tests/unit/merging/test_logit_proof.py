"""The judgement of different logits: a verdict, or a refusal."""

from pathlib import Path

import msgspec
import pytest
import torch

from vlmflow.core.errors import VlmflowError
from vlmflow.merging.proof import LogitProof
from vlmflow.merging.verify_logits import AGREE, INCONCLUSIVE, Logits, compare, judge

ALLOWED = 0.05


def proof_of(found_share: float, rounded_share: float, stray: float = 0.0, shift: float = 0.0) -> LogitProof:
    """Return the figures of a merge that shows one share of the adapter's effect, while rounding leaves another."""
    draw = torch.Generator().manual_seed(1)
    plain = torch.randn(20, 50, generator=draw)
    plain[:, 0] += 10
    effect = 0.02 * torch.randn(20, 50, generator=draw)
    found = plain + found_share * effect + stray * torch.randn(20, 50, generator=draw) + shift
    return compare(Logits(plain, plain + effect, plain + rounded_share * effect, found), ALLOWED, 1, "bfloat16", "cpu")


def verdict(found_share: float, rounded_share: float, stray: float = 0.0, exact: bool = True) -> str:
    proof = proof_of(found_share, rounded_share, stray)
    assert proof.effect_rounded == pytest.approx(rounded_share, abs=1e-3)
    return judge(proof, Path("merged"), exact)


def test_the_same_logits_agree() -> None:
    assert verdict(1.0, 1.0) == AGREE


def test_an_effect_that_rounding_hides_is_inconclusive() -> None:
    """A valid merge of a short run shows what rounding leaves, as peft's own does."""
    assert verdict(0.6, 0.6) == INCONCLUSIVE
    assert verdict(1.0, 0.6, exact=False) == INCONCLUSIVE


@pytest.mark.parametrize(("found", "rounded"), [(0.0, 1.0), (0.6, 1.0), (2.0, 1.0), (0.0, 0.6), (1.0, 0.6)])
def test_an_effect_that_rounding_does_not_explain_is_refused(found: float, rounded: float) -> None:
    with pytest.raises(VlmflowError, match=rf"merged: .* show {found:.2f} times the adapter's effect"):
        verdict(found, rounded)


def test_a_shift_of_all_logits_of_a_position_is_no_difference() -> None:
    assert judge(proof_of(1.0, 1.0, shift=30.0), Path("merged"), exact=True) == AGREE


def test_other_tokens_at_clear_positions_are_refused() -> None:
    proof = proof_of(1.0, 1.0)
    assert (proof.clear_positions, proof.clear_disagreements) == (20, 0)
    with pytest.raises(VlmflowError, match="choose another token at 1 of 20 clear positions"):
        judge(msgspec.structs.replace(proof, clear_disagreements=1), Path("merged"), exact=True)


@pytest.mark.parametrize("stray", [1.0, float("nan")])
def test_logits_that_stray_are_refused(stray: float) -> None:
    with pytest.raises(VlmflowError, match=r"merged: .* differ by \S+ of their spread; rounding explains only 0\.05"):
        verdict(1.0, 1.0, stray)


def test_logits_without_spread_are_refused() -> None:
    same = torch.zeros(20, 50)
    proof = compare(Logits(same, same, same, same), ALLOWED, 1, "bfloat16", "cpu")
    with pytest.raises(VlmflowError, match="differ by nan of their spread"):
        judge(proof, Path("merged"), exact=True)


@pytest.mark.parametrize("shape", [(20, 1), (19, 50)])
def test_logits_of_other_shapes_are_refused(shape: tuple[int, int]) -> None:
    same = torch.ones(20, 50)
    with pytest.raises(VlmflowError, match=r"the logits have the shapes \(20, 50\), \(20, 50\), \("):
        compare(Logits(same, same, same, torch.ones(shape)), ALLOWED, 1, "bfloat16", "cpu")
