"""CIDEr-D: how much of what is special to its reference a text has in common with it.

Vedantam, Zitnick and Parikh, "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015 (arXiv:1411.5726),
sections 3 and 5.1, with one reference per text. There is no maintained library: pycocoevalcap, the authors' code, was
last published in 2020, and aac-metrics needs audio models. The test compares with values of pycocoevalcap 1.2.

An n-gram weighs less the more references have it (IDF), so values of different sets do not compare.

FIRE's measures of fixed dialogues: BLEU-1 to 4 and CIDEr over all answers, each with one reference.

The words are those of nltk's Treebank tokenizer, in lower case and without punctuation, close to those of FIRE's code
(the PTB tokenizer of CoreNLP, which needs Java).
"""

import math
import unicodedata
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

from nltk.tokenize import TreebankWordTokenizer
from nltk.translate.bleu_score import corpus_bleu

from vlmflow.evaluation.scoring.stated import MOST_CHARACTERS, Overlap

LONGEST = 4
"""n-grams of 1 to this many words."""

SIGMA = 6.0
"""The penalty for another length is a Gaussian of this standard deviation, in words."""

SCALE = 10.0

Gram = tuple[str, ...]


def cider(texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float | None:
    """Return the mean CIDEr-D of texts, 0 to 10; None for fewer than two, whose n-grams all have an IDF of 0.

    texts, references: the words of each.
    """
    count = len(references)
    if count < 2:
        return None
    cooked = [_grams(words) for words in references]
    documents = Counter(gram for grams in cooked for gram in grams)
    weights = {gram: math.log(count / found) for gram, found in documents.items()}
    unseen = math.log(count)
    scores = [_likeness(_grams(words), grams, weights, unseen) for words, grams in zip(texts, cooked, strict=True)]
    return SCALE * sum(scores) / count


def _grams(words: Sequence[str]) -> Counter[Gram]:
    return Counter(
        tuple(words[first : first + size]) for size in range(1, LONGEST + 1) for first in range(len(words) - size + 1)
    )


def _likeness(text: Counter[Gram], reference: Counter[Gram], weights: Mapping[Gram, float], unseen: float) -> float:
    """Return the mean over n of the clipped cosine of two TF-IDF vectors, times the penalty for length."""
    products, squares, others = ([0.0] * LONGEST for _ in range(3))
    for gram, times in text.items():
        weight = weights.get(gram, unseen)
        squares[len(gram) - 1] += (times * weight) ** 2
        wanted = reference[gram] * weight
        products[len(gram) - 1] += min(times * weight, wanted) * wanted
    for gram, times in reference.items():
        others[len(gram) - 1] += (times * weights[gram]) ** 2
    cosines = [
        product / math.sqrt(square * other) if square and other else product
        for product, square, other in zip(products, squares, others, strict=True)
    ]
    difference = _pairs(text) - _pairs(reference)
    return sum(cosines) / LONGEST * math.exp(-(difference**2) / (2 * SIGMA**2))


def _pairs(grams: Counter[Gram]) -> int:
    """Return the number of 2-grams: the authors' measure of length."""
    return sum(times for gram, times in grams.items() if len(gram) == 2)


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
