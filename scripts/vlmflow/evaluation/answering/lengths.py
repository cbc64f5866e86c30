"""Leaves out rows that are longer than a run allows, as training counts their tokens."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from vlmflow.evaluation.accounts import LeftOut
from vlmflow.evaluation.choice import Case
from vlmflow.evaluation.chosen_split import ChosenSplit
from vlmflow.lengths.chat_form import ChatForm
from vlmflow.lengths.count import TokenCounter
from vlmflow.pictures.image_manifest import read_picture_manifest


def fitting_cases(
    chosen: ChosenSplit,
    base: Path,
    manifests: Sequence[Path],
    image_max_tokens: int,
    text_args: Mapping[str, Any],
    max_length: int,
) -> tuple[list[Case], list[LeftOut]]:
    """Return the chosen rows of at most `max_length` tokens, and the others as left out.

    base: the base model's folder. manifests: the image manifests of the rows. The others are settings of the run.
    """
    pictures = chain.from_iterable(map(read_picture_manifest, manifests))
    form = ChatForm.of(text_args, chosen.last_answer_only)
    counter = TokenCounter(base, pictures, image_max_tokens, form)
    cases = [each.case for each in chosen.rows]
    counts = [sum(each) for each in counter.count([case.row for case in cases])]
    fit, out = [], []
    for case, tokens in zip(cases, counts, strict=True):
        if tokens <= max_length:
            fit.append(case)
        else:
            out.append(LeftOut(case.row.id, "over_long", f"{tokens} tokens, more than train.max_length"))
    return fit, out
