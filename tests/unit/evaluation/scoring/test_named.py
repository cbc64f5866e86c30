"""Metrics with a name have the values of their owners' code.

`named_metrics.jsonl` has an answer, the gold answer and four values: SQuAD's `compute_exact` and `compute_f1` of
evaluation script 2.0 (huggingface/evaluate at a7dd338, metrics/squad_v2/compute_score.py), the ANLS of the script of
rrc.cvc.uab.es, challenge 17, at its threshold of 0.5 (QwenLM/Qwen-VL at aa00ed0, eval_mm/infographicsvqa_eval.py), and
`relaxed_correctness` of google-research/pix2struct at 945f27e (pix2struct/metrics.py). They were made by running these
files on the pairs; on 60,000 random pairs besides, our functions had no other value either.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmflow.evaluation.scoring.judge import anls, exact_match, relaxed_accuracy, token_f1

REFERENCE = [json.loads(line) for line in Path(__file__).with_name("named_metrics.jsonl").read_text().splitlines()]

TEXTS = st.text(max_size=30) | st.text("aA bB.,-%0159\t", max_size=20)


@pytest.mark.parametrize(("answer", "gold", "exact", "f1", "likeness", "relaxed"), REFERENCE)
def test_the_values_of_the_owners_code(
    answer: str, gold: str, exact: bool, f1: float, likeness: float, relaxed: bool
) -> None:
    assert exact_match(answer, gold) is exact
    assert token_f1(answer, gold) == pytest.approx(f1, abs=1e-8)
    assert anls(answer, gold) == pytest.approx(likeness, abs=1e-8)
    assert relaxed_accuracy(answer, gold) is relaxed


@given(TEXTS, TEXTS)
def test_ranges(answer: str, gold: str) -> None:
    assert 0 <= token_f1(answer, gold) <= 1
    assert token_f1(answer, gold) == token_f1(gold, answer)
    assert anls(answer, gold) == anls(gold, answer)
    assert anls(answer, gold) == 0 or 0.5 <= anls(answer, gold) <= 1
    assert not exact_match(answer, gold) or token_f1(answer, gold) == 1


@given(TEXTS)
def test_a_text_has_the_best_values_against_itself(text: str) -> None:
    assert (exact_match(text, text), token_f1(text, text), anls(text, text)) == (True, 1.0, 1.0)
