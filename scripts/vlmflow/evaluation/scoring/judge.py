"""How good answers are: each by our rule for its gold answer and by measures with a name, and all of them together.

The named measures are as the code of their owners computes them; the tests compare with its values. Each compares one
answer with one gold answer: where an owner takes the best of several, this is that gold's value. FIRE's, BLEU-1 to 4
and CIDEr, compare all answers of fixed dialogues with one reference each.
"""

import math
import re
import string
import unicodedata
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

from rapidfuzz.distance import Levenshtein

from vlmflow.evaluation.scoring.answer_forms import (
    is_number,
    numbers_in,
    option_in,
    option_of,
    options_named,
    read_number,
    same_number,
    says,
    yes_or_no,
)
from vlmflow.evaluation.scoring.stated import MOST_CHARACTERS, Judgement, Overlap, Rule, denials, normalised, states

FEW_WORDS = 30
"""A longer gold answer explains something: no good answer has all of its words."""

SHARED = 0.5
"""From this token F1 on an answer is like an explanation; of FIRE's train rows, those scored 1 to 4 reach 0.28."""

ANLS_FROM = 0.5
"""A lower likeness counts as 0: DocVQA's threshold."""

RELAXED = 0.05
"""The share of the gold number by which ChartQA lets an answer differ."""

SQUAD_ARTICLES = re.compile(r"\b(a|an|the)\b")

SQUAD_PUNCTUATION = str.maketrans("", "", string.punctuation)

LONGEST = 4
"""BLEU and CIDEr compare n-grams of 1 to this many words."""

SIGMA = 6.0
"""CIDEr's penalty for another length is a Gaussian of this standard deviation, in words."""

SCALE = 10.0
DECIMALS = 6

Gram = tuple[str, ...]


def rule_of(gold: str) -> Rule:
    """Return our rule by which answers are right for a gold answer."""
    if option_of(gold):
        return "option"
    if read_number(gold):
        return "number"
    if yes_or_no(gold):
        return "yes_no"
    return "words" if len(gold.split()) <= FEW_WORDS else "text"


def judge(answer: str, gold: str) -> Judgement:
    """Compare an answer with the gold answer. Both are answers, not turns (see `answer_in`)."""
    return Judgement(
        right=answer == gold or _says_the_same(answer, gold) or _follows_rule(answer, gold),
        exact_match=exact_match(answer, gold),
        token_f1=token_f1(answer, gold),
        anls=anls(answer, gold),
        relaxed_accuracy=relaxed_accuracy(answer, gold),
    )


def holds(feedback: str, gold: str) -> bool:
    """Return whether feedback gives the gold answer away: it names the option, the number, or the normalised text.

    Words must be whole. A short answer, such as "no", may be there by chance.
    """
    if option := option_of(gold):
        return option in options_named(feedback)
    if number := read_number(gold):
        return any(same_number(other, number) for other in numbers_in(feedback))
    wanted = normalised(gold)
    return bool(wanted) and f" {wanted} " in f" {normalised(feedback)} "


def _says_the_same(answer: str, gold: str) -> bool:
    """Return whether two texts are equal but for their form; one that asks says nothing, and of options "A" is one."""
    asks = "?" in answer and "?" not in gold
    return not asks and not option_of(gold) and normalised(answer) == normalised(gold)


def _follows_rule(answer: str, gold: str) -> bool:
    """Return whether an answer that is not equal to the gold one is right by its rule."""
    if option := option_of(gold):
        return option_in(answer) == option
    if number := read_number(gold):
        return is_number(answer, number)
    if word := yes_or_no(gold):
        return says(answer) == word
    if rule_of(gold) == "words":
        return states(answer, gold)
    return token_f1(answer, gold) >= SHARED and denials(answer) == denials(gold)


def exact_match(answer: str, gold: str) -> bool:
    """Return SQuAD's exact match: equal without case, ASCII punctuation, articles and extra white space.

    From `compute_exact` of its evaluation script 2.0 (arXiv:1806.03822). transformers has this function and the next,
    in a module that imports torch.
    """
    return _squad_words(answer) == _squad_words(gold)


def token_f1(answer: str, gold: str) -> float:
    """Return SQuAD's F1 of the words that two answers share, 0 to 1 (`compute_f1`, as above)."""
    given, right = _squad_words(answer), _squad_words(gold)
    if not given or not right:
        return float(given == right)
    shared = (Counter(given) & Counter(right)).total()
    return 2 * shared / (len(given) + len(right))


def anls(answer: str, gold: str) -> float:
    """Return DocVQA's likeness of the characters: 1 - d / n, or 0 below one half; d is their Levenshtein distance.

    Case and extra white space do not count in d, but white space does in n, the longer length. From the script of the
    Robust Reading Competition (rrc.cvc.uab.es, challenge 17), which keeps a likeness of just one half; the paper
    (arXiv:1907.00490) does not. Its name is a mean's: average normalised Levenshtein similarity.
    """
    distance = Levenshtein.distance(*(" ".join(text.lower().split()) for text in (answer, gold)))
    longest = max(len(answer.upper()), len(gold.upper()))
    likeness = 1 - (distance / longest if longest else 0.0)
    return likeness if likeness >= ANLS_FROM else 0.0


def relaxed_accuracy(answer: str, gold: str) -> bool:
    """Return whether ChartQA takes an answer: a number within 5 % of the gold one, or an equal text without case.

    42% is 0.42. Nothing but digits is a number: "$5" and "5 m" are texts, as are all answers where the gold one is 0.
    From `relaxed_correctness` of google-research/pix2struct, after arXiv:2203.10244, section 5.1.
    """
    given, right = _chart_number(answer), _chart_number(gold)
    if given is None or not right:
        return answer.lower() == gold.lower()
    return abs(given - right) / abs(right) <= RELAXED


def _squad_words(text: str) -> list[str]:
    return SQUAD_ARTICLES.sub(" ", text.lower().translate(SQUAD_PUNCTUATION)).split()


def _chart_number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def overlap(texts: Sequence[str], references: Sequence[str]) -> Overlap:
    """Compare whole texts, at least one, with their references: FIRE's measures of fixed dialogues."""
    from nltk.translate.bleu_score import corpus_bleu  # it takes a second to load, and only answers need it

    words, right = ([words_of(text) for text in some] for some in (texts, references))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of n-grams that no text shares; the value is then 0
        weights = [tuple([1 / size] * size) for size in range(1, LONGEST + 1)]
        bleu = corpus_bleu([[reference] for reference in right], words, weights=weights)
    likeness = cider(words, right)
    return Overlap(
        answers=len(texts),
        bleu=[round(value, DECIMALS) for value in bleu],
        cider=None if likeness is None else round(likeness, DECIMALS),
    )


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation.

    They are those of nltk's Treebank tokenizer, close to those of FIRE's code (the PTB tokenizer of CoreNLP, which
    needs Java).
    """
    from nltk.tokenize import TreebankWordTokenizer

    words = TreebankWordTokenizer().tokenize(text[-MOST_CHARACTERS:].lower())
    return [word for word in words if any(unicodedata.category(character)[0] != "P" for character in word)]


def cider(texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float | None:
    """Return the mean CIDEr-D of texts, 0 to 10; None for fewer than two, whose n-grams all have an IDF of 0.

    It is how much of what is special to its reference a text has in common with it: Vedantam, Zitnick and Parikh,
    "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015 (arXiv:1411.5726), sections 3 and 5.1, with one
    reference per text. An n-gram weighs less the more references have it (IDF), so values of different sets do not
    compare. There is no maintained library: pycocoevalcap, the authors' code, was last published in 2020, and
    aac-metrics needs audio models. The test compares with values of pycocoevalcap 1.2.

    texts, references: the words of each.
    """
    count = len(references)
    if count < 2:
        return None
    of_references = [_grams(words) for words in references]
    documents = Counter(gram for grams in of_references for gram in grams)
    weights = {gram: math.log(count / times) for gram, times in documents.items()}
    pairs = zip(map(_grams, texts), of_references, strict=True)
    return SCALE * sum(_likeness(text, reference, weights, math.log(count)) for text, reference in pairs) / count


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
    # The authors measure lengths in 2-grams.
    lengths = (sum(times for gram, times in grams.items() if len(gram) == 2) for grams in (text, reference))
    return sum(cosines) / LONGEST * math.exp(-((next(lengths) - next(lengths)) ** 2) / (2 * SIGMA**2))
