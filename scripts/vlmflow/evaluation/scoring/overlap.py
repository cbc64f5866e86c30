"""FIRE's measures of fixed dialogues: BLEU-1 to 4 and CIDEr over all answers, each with one reference.

The words are those of nltk's Treebank tokenizer, in lower case and without punctuation, close to those of FIRE's code
(the PTB tokenizer of CoreNLP, which needs Java).
"""

import unicodedata
import warnings
from collections.abc import Sequence

from nltk.tokenize import TreebankWordTokenizer
from nltk.translate.bleu_score import corpus_bleu

from vlmflow.evaluation.scoring.answer_text import MOST_CHARACTERS
from vlmflow.evaluation.scoring.cider import cider
from vlmflow.evaluation.scoring.results import Overlap

DECIMALS = 6

WEIGHTS = [tuple([1 / size] * size) for size in (1, 2, 3, 4)]


def overlap(texts: Sequence[str], references: Sequence[str]) -> Overlap:
    """Compare whole texts, at least one, with their references."""
    given, right = ([words_of(text) for text in some] for some in (texts, references))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of n-grams that no text shares; the value is then 0
        bleu = corpus_bleu([[words] for words in right], given, weights=WEIGHTS)
    likeness = cider(given, right)
    return Overlap(
        answers=len(texts),
        bleu=[round(value, DECIMALS) for value in bleu],
        cider=None if likeness is None else round(likeness, DECIMALS),
    )


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    words = TreebankWordTokenizer().tokenize(text[-MOST_CHARACTERS:].lower())
    return [word for word in words if any(unicodedata.category(character)[0] != "P" for character in word)]
