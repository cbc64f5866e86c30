"""SQuAD's metrics have the values of the copy of its script in transformers."""

from hypothesis import given
from hypothesis import strategies as st
from transformers.data.metrics.squad_metrics import compute_exact, compute_f1

from vlmflow.evaluation.scoring.judge import exact_match, token_f1

WORDS = st.lists(st.sampled_from(["a", "The", "red", "Red.", "cat", "don't", "é", "12", " ", "—"]), max_size=8)

TEXTS = st.text(max_size=30) | WORDS.map(" ".join)


@given(TEXTS, TEXTS)
def test_the_values_of_transformers(answer: str, gold: str) -> None:
    assert exact_match(answer, gold) == compute_exact(gold, answer)
    assert abs(token_f1(answer, gold) - compute_f1(gold, answer)) < 1e-12
