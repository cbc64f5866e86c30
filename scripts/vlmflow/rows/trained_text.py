"""How much of the text that is trained comes from bad attempts."""

from collections.abc import Mapping, Sequence

from vlmflow.config.row_settings import GOOD
from vlmflow.rows.sharegpt import ShareGptRow


def last_answer_only(form: str, train_on: str) -> bool:
    """Return whether only the last answer of a row is trained. form, train_on: see `data_settings.DatasetSettings`."""
    return form == "timestep" or train_on == "last"


def loss_scale(last_answer_only: bool) -> str:
    """Return the value of ms-swift's `loss_scale` that selects the trained answers: the last one of a row, or all."""
    return "last_round" if last_answer_only else "default"


def trained_characters(row: ShareGptRow, last_answer_only: bool) -> dict[int, int]:
    """Return the characters of a row's trained answers by score; {} if its answers have no scores.

    last_answer_only: whether all other answers are history.
    """
    found: dict[int, int] = {}
    if row.scores:
        answers = [turn for turn in row.conversations if turn.speaker == "gpt"]
        first = len(answers) - 1 if last_answer_only else 0
        for turn, score in zip(answers[first:], row.scores[first:], strict=True):
            if turn.loss is not False:
                found[int(score)] = found.get(int(score), 0) + len(turn.value)
    return found


def is_mixed(trained: Mapping[int, int]) -> bool:
    """Return whether any of the text is from a bad attempt. trained: its characters by score."""
    return any(score < GOOD for score in trained)


def in_words(trained: Mapping[int, int], datasets: Sequence[str], good_run: str | None) -> str | None:
    """Return what the scores of the trained text mean, for people; None without scores.

    trained: its characters by score. datasets: the names of those that it is from. good_run: a run that trains the
    good attempts of the same data alone, if there is one.
    """
    bad = sum(characters for score, characters in trained.items() if score < GOOD)
    if not trained:
        return None
    if not is_mixed(trained):
        return f"all of the trained text is attempts scored at least {min(trained)}"
    keys = [f"datasets.{name}.min_score: {GOOD}" for name in datasets]
    instead = f"run {good_run} trains" if good_run else f"{' with '.join(keys)} trains"
    return (
        f"{bad / sum(trained.values()):.0%} of the trained text is attempts scored below {GOOD}; {instead} the others"
    )
