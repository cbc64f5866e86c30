"""Evaluations of models whose behaviour is known, drawn 2,000 times: how often do our functions say what is so?

PYTHONPATH=scripts:tests/helpers .venv/bin/python tests/helpers/simulated_evaluations.py
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np
from scipy.special import expit, log_expit, ndtri

from made_rows import made_row
from vlmflow.evaluation.answer_losses import Measured, Work
from vlmflow.evaluation.choice import feedback_donors, read_case
from vlmflow.evaluation.chosen_split import choose_candidates
from vlmflow.evaluation.margins import (
    Bounds,
    Groups,
    Values,
    compare_losses,
    compare_shares,
    difference_interval,
    intervals_of,
    links,
    mean_interval,
    share_interval,
)
from vlmflow.evaluation.measure import ChosenRow
from vlmflow.evaluation.report import (
    NEUTRAL,
    OTHERS,
    OWN,
    QUESTION,
    LeftOut,
    Loss,
    MarginFigures,
    MarginReport,
    OneAnswer,
    Share,
)
from vlmflow.evaluation.verdict import EQUAL, LEARNED, NO_GAIN, SAME, TOO_FEW, WORSE, falls_short, judge, preferred
from vlmflow.rows.chat import FIRST_LINE, Turn
from vlmflow.rows.sharegpt import ShareGptRow

ROWS = 120


def row(number: int, code: str, *, source: str = "codes", score: float = 3, images: Sequence[str] = ()) -> ShareGptRow:
    """Return a row whose feedback holds the right answer, `code`."""
    turns = [
        Turn("human", f"{FIRST_LINE * len(images)}What is the code of door {number}?"),
        Turn("gpt", "Answer: none"),
        Turn("human", f"Score: {score:g}. It is {code}."),
        Turn("gpt", f"Thought: I see.\nAnswer: {code}"),
    ]
    return made_row(f"val-{number:07}-aa", turns, source, list(images), [score, 10])


def rows(count: int = ROWS) -> list[ShareGptRow]:
    """Return rows with codes that differ between neighbours."""
    return [row(number, f"c{number % 7}") for number in range(count)]


def choose_rows(
    rows: Iterable[ShareGptRow],
    pictures: Mapping[str, str] = {},
    gold: Mapping[str, str] = {},
    *,
    feedback: bool = True,
    count: int = 1000,
    seed: int = 1,
    **how: Any,
) -> tuple[list[ChosenRow], list[LeftOut]]:
    """Choose and draw rows of a split; `choose_candidates`, and `how` of `Candidates.drawn`."""
    found = choose_candidates(rows, pictures, gold, feedback=feedback, last_answer_only=False, seed=seed)
    return found.drawn(count=count, key="k", seed=seed, **how)


Judge = Callable[[str, str, int], float]
"""Takes the last feedback of a conversation ("" without one), the scored answer and a number that varies between rows;
returns the loss per token."""


def scorer(judge: Judge) -> Callable[[Sequence[Work]], Mapping[str, Measured]]:
    """Return a model that loses what `judge` says for each pass, over five tokens."""

    def measure(work: Sequence[Work]) -> dict[str, Measured]:
        found = {}
        for number, each in enumerate(work):
            losses = {
                name: Loss(5 * judge(_feedback(made.turns), made.turns[-1].value, number), 5)
                for name, made in each.passes.items()
            }
            inputs = {name: _digest([made.turns, made.images]) for name, made in each.passes.items()}
            answers = {name: _digest(made.turns[-1:]) for name, made in each.passes.items()}
            found[each.key] = Measured(each.key, losses, inputs, answers, 9)
        return found

    return measure


def _feedback(turns: Sequence[Turn]) -> str:
    return turns[-2].value if len(turns) > 2 else ""


def _digest(content: Sequence[object]) -> str:
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


def noise(number: int) -> float:
    """Return a number between -0.05 and 0.05 that looks random."""
    return ((number * 7919) % 101 - 50) / 1000


def unlike(judge: Judge, seed: int) -> Judge:
    """Return a model of the same behaviour that differs a little for each conversation."""
    return lambda feedback, answer, number: (
        judge(feedback, answer, number) + noise(int(_digest([seed, feedback, answer, number])[:6], 16))
    )


def code_in(answer: str) -> str:
    """Return the right code in an answer."""
    return answer.rpartition("Answer: ")[2]


def uses(feedback: str, answer: str, number: int) -> float:
    """Know the code if the feedback says it."""
    return (1.0 if code_in(answer) in feedback else 3.0) + noise(number)


def ignores(feedback: str, answer: str, number: int) -> float:
    """Know nothing, whatever the feedback."""
    return 3.0 + noise(number)


def reacts_to_presence(feedback: str, answer: str, number: int) -> float:
    """Answer better after any feedback."""
    return (2.0 if feedback else 3.0) + noise(number)


DRAWS = 2000
NOISE = 0.5
LEVEL = 0.5
"""The mean margin: the right answer is likelier than the wrong one in two thirds of rows."""

ONE_ROW_EACH = [1] * 300
SEVERAL_ROWS_EACH = [1, 2, 3, 4, 5] * 24
"""Rows of each picture: 360 rows of 120 pictures."""

Models = dict[str, Values]


class Drawn:
    """Draws rows. seed: each figure comes out again. rows_of: how many rows each picture has."""

    def __init__(self, seed: int, rows_of: Sequence[int]) -> None:
        self.random = np.random.default_rng(seed)
        self.picture = np.repeat(np.arange(len(rows_of)), rows_of)
        self.groups = [str(number) for number in self.picture]

    def normal(self, *models: int) -> Values:
        """Return a standard normal value of each row; half of its variance is the picture's."""
        of_picture = self.random.normal(size=(*models, self.picture[-1] + 1, DRAWS))[..., self.picture, :]
        return (of_picture + self.random.normal(size=(*models, len(self.picture), DRAWS))) / np.sqrt(2)

    def noise(self, differ: float) -> Values:
        """Return noise of both models."""
        return NOISE * (np.sqrt(1 - differ) * self.normal() + np.sqrt(differ) * self.normal(2))

    def models(self, differ: float = 0.5, level: float = LEVEL) -> Models:
        """Return two models that do not use feedback and differ by noise."""
        rows = level + self.normal()
        return {context: rows + self.noise(differ) for context in (QUESTION, OWN, NEUTRAL, *OTHERS)}


def verdicts(
    models: Models,
    of_row: Sequence[str],
    one_answer: bool = False,
    pairs: Collection[tuple[int, int]] = (),
    echo: Values | None = None,
) -> Counter[str]:
    """Return the per cent of draws with each verdict; "costs": those that say so; "gated": that `not_worse` refuses.

    of_row: the group of each row. one_answer: margins are log-probabilities of right answers that have no wrong ones
    beside them. pairs: see `margins.links`. echo: (rows,), whether a row has echo; None if none has.
    """
    every = figures(models, of_row, one_answer, pairs)
    parts = [None] * DRAWS, [None] * DRAWS
    if echo is not None:
        parts = tuple(
            figures({name: each[:, rows] for name, each in models.items()}, [of_row[n] for n in rows], one_answer)
            for rows in (np.flatnonzero(echo), np.flatnonzero(~echo))
        )
    found: Counter[str] = Counter()
    for all_rows, with_echo, without_echo in zip(every, *parts, strict=True):
        verdict = judge(MarginReport(all_rows, None, {}, None, with_echo, without_echo))
        gated = falls_short("not_worse", verdict, all_rows) is not None
        found.update([verdict.name] + ["costs"] * verdict.costs_first_answers + ["gated"] * gated)
    return Counter({name: round(100 * count / DRAWS, 2) for name, count in found.items()})


def figures(
    models: Models, of_row: Sequence[str], one_answer: bool = False, pairs: Collection[tuple[int, int]] = ()
) -> list[MarginFigures]:
    """Return the figures of each draw; the parameters: `verdicts`."""
    groups = Groups(of_row)
    others = [models[name] for name in OTHERS if name in models]
    uses = compare_shares(*np.mean([preferred(models[OWN], other) for other in others], axis=0), Groups(of_row, pairs))
    base, tuned = models[OWN]
    above = share_interval(preferred(tuned, base, EQUAL), groups)
    different = np.count_nonzero(np.abs(tuned - base) > EQUAL, axis=0).tolist()
    rows = len(of_row), groups.count
    own = [Share(*rows, each, share) for each, share in zip(different, intervals_of(above), strict=True)]
    preference = np.exp if one_answer else expit
    adds, helps = (
        compare_shares(*preferred(preference(models[OWN]), preference(models[name]), SAME), groups)
        for name in (NEUTRAL, QUESTION)
    )
    losses = compare_losses(*-models[OWN], groups)
    right = [compare_shares(*preferred(models[name], 0.0), groups) for name in (QUESTION, OWN)]
    return [
        MarginFigures(
            *rows,
            None if one_answer else right[0][draw],
            None if one_answer else right[1][draw],
            uses[draw],
            None,
            {OWN: losses[draw]},
            adds[draw],
            helps[draw],
            own[draw],
            OneAnswer(own[draw], losses[draw]) if one_answer else None,
        )
        for draw in range(DRAWS)
    ]


def null(
    seed: int, rows_of: Sequence[int], differ: float = 0.5, level: float = LEVEL, use: float = 0, **how
) -> Counter[str]:
    """Judge models that differ by noise alone. use: what the own feedback gives both of them."""
    drawn = Drawn(seed, rows_of)
    models = drawn.models(differ, level)
    models[OWN] += use
    return verdicts(models, drawn.groups, **how)


HISTORY = (OWN, NEUTRAL, *OTHERS)
"""Contexts in which the wrong answer was said before."""

FOREIGN = (NEUTRAL, *OTHERS)
"""Contexts whose feedback is not the row's own."""

BASE, TUNED = 0, 1


def drawn_base(seed: int, rows: int = 300, noise: float = 0.3) -> tuple[Drawn, Models]:
    """Return two equal models as real ones are: after W was said they repeat it, and their own feedback helps a little.

    noise: of a margin, in nats; half of its variance is of both models.
    """
    drawn = Drawn(seed, [1] * rows)
    margins = LEVEL + drawn.normal()
    models = {context: margins + drawn.noise(0.5) * noise / NOISE for context in (QUESTION, *HISTORY)}
    shift(models, HISTORY, (-0.4, -0.4))
    shift(models, (OWN,), (0.1, 0.1))
    return drawn, models


def shift(models: Models, contexts: Iterable[str], by: tuple[float, float], rows: Values | slice = slice(None)) -> None:
    """Add so many nats to the margins of base and tuned model. rows: where."""
    for context in contexts:
        for model, amount in enumerate(by):
            models[context][model, rows] += amount


def planted(seed: int, plant: Callable[[Models], Values | None], rows: int = 300, noise: float = 0.3) -> Counter[str]:
    """Judge a training. plant: changes the margins of its models, and may return which rows have echo."""
    drawn, models = drawn_base(seed, rows, noise)
    return verdicts(models, drawn.groups, echo=plant(models))


def first_share(models: Models, share: float) -> Values:
    """Return which rows are among the first, (rows,): rows are drawn, so these are like the others."""
    rows = models[OWN].shape[1]
    return np.arange(rows) < share * rows


def repeats(models: Models) -> None:
    """After any feedback the tuned model repeats its wrong attempt."""
    shift(models, HISTORY, (0.4, -1.0))


def unlearns(models: Models) -> None:
    """The base copies words of its feedback, which name W; the tuned model ignores feedback."""
    shift(models, (OWN,), (-0.5, -0.1))


def forgets_w(models: Models) -> None:
    """The tuned model no longer says W again, whatever the feedback."""
    shift(models, HISTORY, (0, 0.4))
    shift(models, (OWN,), (0, -0.1))


def knows_more(models: Models) -> None:
    """The tuned model knows more right answers, whatever the feedback."""
    shift(models, (QUESTION, *HISTORY), (0, 1.0))


def topic(models: Models) -> None:
    """The question tells all; feedback repeats it, and foreign feedback leads astray."""
    shift(models, (QUESTION, *HISTORY), (0, 3.0))
    shift(models, FOREIGN, (0, -2.0))
    shift(models, HISTORY, (0, 0.4))
    shift(models, (OWN,), (0, -0.1))


def confused(models: Models) -> None:
    """Own feedback adds nothing to neutral feedback; another row's harms."""
    shift(models, OTHERS, (0, -0.7))
    shift(models, (NEUTRAL,), (0, 0.1))


def confused_by_all(models: Models) -> None:
    """Any feedback that does not fit harms, neutral feedback too; the own one adds nothing."""
    shift(models, FOREIGN, (0, -0.7))
    shift(models, (OWN,), (0, 0.3))


def confused_without_w(models: Models) -> None:
    """The same, of a model that also learned not to repeat W."""
    shift(models, FOREIGN, (0, -0.7))
    shift(models, HISTORY, (0, 0.4))


def gold_alone(models: Models) -> Values:
    """The tuned model gains in the rows alone whose feedback holds the gold answer; they are echo."""
    rows = first_share(models, 0.15)
    shift(models, (OWN,), (0, 3.0), rows)
    shift(models, HISTORY, (0, 0.4))
    return rows


def learner(models: Models) -> None:
    """The own feedback is worth 0.35 nats more in all rows, and W is no longer repeated."""
    shift(models, HISTORY, (0, 0.4))
    shift(models, (OWN,), (0, 0.35))


def learner_in_a_quarter(models: Models) -> None:
    """The own feedback is worth 1.5 nats in a quarter of the rows, and W is no longer repeated."""
    shift(models, HISTORY, (0, 0.4))
    shift(models, (OWN,), (0, 1.5), first_share(models, 0.25))


def learner_that_repeats(models: Models) -> None:
    """The own feedback is worth 0.35 nats more, and W is still repeated."""
    shift(models, (OWN,), (0, 0.35))


HOLES = {
    each.__name__: each for each in (unlearns, forgets_w, knows_more, topic, confused, confused_by_all, gold_alone)
}
"""Trainings that did not teach to use feedback."""

LEARNERS = {each.__name__: each for each in (learner, learner_in_a_quarter)}


def shared_feedback(seed: int, rows: int, yes: float, right: bool, size: float = 1.0) -> Counter[str]:
    """Judge such models where each feedback shifts every row that gets it.

    yes: the share of rows whose answer is "yes"; that of the others is "no". right: whether it makes right answers
    likelier, whatever they are; if not, it makes "yes" likelier, or "no", by chance. size: of the shift, in nats.
    """
    random = Random(seed)
    cases = [read_case(row(n, "yes" if random.random() < yes else "no"), {}) for n in range(rows)]
    for number, case in enumerate(cases):  # all feedback differs
        case.turns[2].value += f" See {number}."
    place = {case.row.id: number for number, case in enumerate(cases)}
    donors = {name: some for name, some in feedback_donors(cases, {}, seed).items() if len(some) == len(OTHERS)}
    takers = [place[name] for name in donors]
    drawn = Drawn(seed, [1] * len(cases))
    models, shifted = drawn.models(), size * drawn.normal(2)
    signs = np.array([1.0 if right or "yes" in case.answer else -1.0 for case in cases])[:, None]
    models[OWN] += signs * shifted
    for number, context in enumerate(OTHERS):
        givers = [place[some[number].row.id] for some in donors.values()]
        models[context][:, takers] += signs[takers] * shifted[:, givers]
    pairs = links(list(donors), [[case.row.id for case in some] for some in donors.values()])
    of_takers = {name: each[:, takers] for name, each in models.items()}
    return verdicts(of_takers, [drawn.groups[n] for n in takers], pairs=pairs)


def words_likelier(seed: int, longer: float = 1.0) -> Counter[str]:
    """Judge a tuned model that makes all words of its feedback likelier; right and wrong hold them equally often.

    longer: how many times as long the right answer is.
    """
    drawn = Drawn(seed, SEVERAL_ROWS_EACH)
    models = drawn.models()
    rows = len(drawn.groups)
    tokens = drawn.random.integers(4, 16, (2, rows, 1)) * np.array([longer, 1.0]).reshape(2, 1, 1)
    for context, often in ((OWN, 0.3), *((other, 0.15) for other in OTHERS)):
        right, wrong = (drawn.random.binomial(each.astype(int), often, (rows, DRAWS)) / each for each in tokens)
        models[context][1] += 3 * (right - wrong)
    return verdicts(models, drawn.groups)


def better(seed: int, gain: float, wrong_too: bool, differ: float = 0.5) -> Counter[str]:
    """Judge a tuned model that gives right answers `gain` more log-odds, and uses feedback twice as much.

    wrong_too: wrong answers get likelier by half of that, as they do where all words of a domain are learned.
    """
    drawn = Drawn(seed, ONE_ROW_EACH)
    right, wrong = drawn.models(differ, 0.0), drawn.models(differ, -1.0)
    right[OWN][0] += 1.4
    right[OWN][1] += 2.8
    for context in right:
        right[context][1] += gain
        wrong[context][1] += gain / 2 * wrong_too
    return verdicts({name: log_expit(right[name]) - log_expit(wrong[name]) for name in right}, drawn.groups)


def ten_points(seed: int, share: float, context: str, points: int = 10) -> Counter[str]:
    """Judge a tuned model that does better by ten points of 300 rows.

    share: that of the base, in per cent. context: OWN (it uses feedback more often), or QUESTION (its first answers are
    right more often).
    """
    drawn = Drawn(seed, ONE_ROW_EACH)
    models = drawn.models(level=0.0 if context == QUESTION else LEVEL)
    spread = np.hypot(1, NOISE) if context == QUESTION else NOISE * np.sqrt(2)
    models[context] += spread * ndtri([share / 100, (share + points) / 100]).reshape(2, 1, 1)
    base, tuned = preferred(models[context], 0.0 if context == QUESTION else models[OTHERS[0]]).mean(axis=(1, 2))
    assert abs(100 * (tuned - base) - points) < 0.3, "this is not what was to be simulated"
    return verdicts(models, drawn.groups)


def wrong_first_answer_unlearned(seed: int) -> Counter[str]:
    """Judge a tuned model that finds wrong answers less likely, and uses feedback more."""
    drawn = Drawn(seed, ONE_ROW_EACH)
    models = drawn.models()
    for margins in models.values():
        margins[1] += 0.4
    models[OWN][1] += 0.5
    return verdicts(models, drawn.groups)


def declined(seed: int) -> Counter[str]:
    """Judge a tuned model to whose answers feedback does harm."""
    drawn = Drawn(seed, ONE_ROW_EACH)
    models = drawn.models()
    models[OWN][1] -= 0.5
    return verdicts(models, drawn.groups)


def gains(drawn: Drawn, kind: str) -> tuple[Values, float]:
    """Return what a training gave to each row, and its true mean."""
    if kind == "normal":
        return drawn.normal(), 0.0
    if kind == "skewed":
        return np.exp(drawn.normal()), float(np.exp(0.5))
    share = {"one in ten": 0.1, "one in fifty": 0.02}[kind]
    return (drawn.normal() < ndtri(share)) * drawn.random.exponential(size=(len(drawn.groups), DRAWS)), share


def mean_covered(seed: int, kind: str, rows_of: Sequence[int]) -> float:
    """Return the per cent of intervals of a mean gain that hold the truth."""
    drawn = Drawn(seed, rows_of)
    values, truth = gains(drawn, kind)
    return _covered(mean_interval(values, Groups(drawn.groups)), truth)


def difference_covered(seed: int, kind: str, rows_of: Sequence[int], level: float = LEVEL) -> float:
    """Return the same of the difference between two shares of rows, where such a gain is added to margins."""
    drawn = Drawn(seed, rows_of)
    base, tuned = drawn.models(level=level)[OWN]
    difference = preferred(tuned + gains(drawn, kind)[0], 0.0) - preferred(base, 0.0)
    return _covered(difference_interval(difference, Groups(drawn.groups)), difference.mean())


def share_covered(seed: int, percent: float, rows_of: Sequence[int]) -> float:
    """Return the same of a share of rows."""
    drawn = Drawn(seed, rows_of)
    right = preferred(drawn.normal(), ndtri(1 - percent / 100))
    return _covered(share_interval(right, Groups(drawn.groups)), percent / 100)


def _covered(found: Bounds, truth: float) -> float:
    return round(100 * float(np.mean((found.low <= truth) & (truth <= found.high))), 2)


HUNDRED, HUNDRED_OF_SEVERAL = [1] * 100, [1, 2, 3, 4, 5] * 20

NULLS: dict[str, Callable[[], Counter[str]]] = {
    "100 pictures": lambda: null(1, HUNDRED),
    "100 pictures, models with little in common": lambda: null(2, HUNDRED, differ=1.0),
    "360 rows of 120 pictures": lambda: null(3, SEVERAL_ROWS_EACH),
    "models with much in common": lambda: null(4, SEVERAL_ROWS_EACH, differ=0.1),
    "both use feedback in 97 % of rows": lambda: null(5, ONE_ROW_EACH, use=1.3),
    "and are right in 97 %": lambda: null(6, ONE_ROW_EACH, level=2.0, use=1.3),
    "rows with one answer": lambda: null(7, SEVERAL_ROWS_EACH, one_answer=True),
    "each feedback shifts the rows that get it": lambda: shared_feedback(8, 500, 0.7, right=True),
    "each feedback makes one of two answers likelier": lambda: shared_feedback(8, 300, 0.5, right=False),
    "by much, in 1,000 rows": lambda: shared_feedback(24, 1000, 0.5, right=False, size=3.0),
    "one picture in 20 of 220 rows": lambda: null(25, [1] * 200 + [20]),
}
"""Models that do not use feedback more or less than each other, by what else is so."""

WORDS: dict[str, Callable[[], Counter[str]]] = {
    "right and wrong answers alike": lambda: words_likelier(9),
    "right answers twice as long": lambda: words_likelier(10, longer=2.0),
}

BETTER = [(gain, wrong_too) for gain in (0.1, 0.3, 1.0, 2.0, 5.0) for wrong_too in (False, True)]

COVERED = [
    (kind, rows_of)
    for kind in ("normal", "skewed", "one in ten")
    for rows_of in (HUNDRED, HUNDRED_OF_SEVERAL, ONE_ROW_EACH)
]

NOT_COVERED = [("one in fifty", rows_of) for rows_of in (HUNDRED, ONE_ROW_EACH)]
"""What is too rare for these intervals: docs/evaluation.md says so."""

PERCENT = (50, 90, 97, 99, 99.7)


def main() -> None:
    """Print what the tests assert, as a table."""
    rows = [("null: " + name, run()) for name, run in NULLS.items()]
    rows += [("words of the feedback get likelier: " + name, run()) for name, run in WORDS.items()]
    rows += [
        (f"better by {gain:g}{', wrong answers by half of it' * too}", better(11, gain, too)) for gain, too in BETTER
    ]
    rows += [
        (f"uses feedback in {share + 10} % of 300 rows, base {share} %", ten_points(12, share, OWN))
        for share in (50, 70, 85)
    ]
    rows += [
        ("first answers right in 40 %, base 50 %", ten_points(13, 50, QUESTION, -10)),
        ("feedback does harm", declined(14)),
        ("wrong first answers get less likely, feedback is used", wrong_first_answer_unlearned(23)),
    ]
    plants = [repeats, *HOLES.values(), confused_without_w, *LEARNERS.values(), learner_that_repeats]
    rows += [
        (f"{each.__doc__} {count} rows, noise {noise}", planted(1, each, count, noise))
        for each in plants
        for count in (150, 300, 1000)
        for noise in (0.3, 0.5, 1.0)
    ]
    print(
        "| simulated, in % of draws | learned | worse | no gain shown | too few rows | costs first answers | refused |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, found in rows:
        print(
            f"| {name} |",
            " | ".join(f"{found[each]:.1f}" for each in (LEARNED, WORSE, NO_GAIN, TOO_FEW, "costs", "gated")),
            "|",
        )
    print("\n| gains | pictures, rows | mean | share, tuned minus base |\n|---|---|---|---|")
    for kind, of in COVERED + NOT_COVERED:
        found = mean_covered(15, kind, of), difference_covered(16, kind, of)
        print(f"| {kind} | {len(of)}, {sum(of)} |", " | ".join(f"{each:.1f}" for each in found), "|")
    print("\n| share | 100 pictures | 300 rows of 100 pictures |\n|---|---|---|")
    for percent in PERCENT:
        print(
            f"| {percent:g} % |",
            " | ".join(f"{share_covered(17, percent, of):.1f}" for of in (HUNDRED, HUNDRED_OF_SEVERAL)),
            "|",
        )


if __name__ == "__main__":
    main()
