"""What the stated licences of a run's data say about passing its weights on.

A licence is a name or a sentence that a person wrote into the configuration, or `unknown`. So the rule is one of words,
and all of them are in this module:

- FORBIDS: the owner allows nobody to pass on the data, or what is made from it. Nothing is published.
- NOT_COMMERCIAL: the weights may be passed on, and who gets them must know. It is shown.
- `unknown` is no permission. It is shown as "not stated"; the person decides.

Whether weights are made "from" their data in the sense of a licence is disputed; where the words forbid it, we keep to
them.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby

from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import printable
from vlmflow.reports.licences import UNKNOWN, LicenceOfSource, StatedLicences

FORBIDS = re.compile(
    r"\bno (re)?distribution\b|\bnon ?redistribut|\b(not|never) (be )?(re)?distribut"
    r"|\bredistribution (is )?(not|forbidden|prohibited)"
    r"|(?<!non )\bproprietary\b|\ball rights reserved\b|\bconfidential\b|\binternal use\b"
    r"|\bnd\b|\bno ?deriv"  # Creative Commons, NoDerivatives: nothing changed may be shared
)
NOT_COMMERCIAL = re.compile(r"\bnc\b|\bnon ?commercial|\bresearch (use )?only\b")
"""Both are searched in lower case, with one blank in place of blanks, hyphens and underscores."""

NAMED = 8
"""Sources of a licence that are named, the largest first."""


@dataclass(frozen=True)
class Rights:
    """A licence and what has it. note: what follows from it, for people; "" if nothing."""

    licence: str
    of: list[str]
    note: str

    def __str__(self) -> str:
        more = f" and {len(self.of) - NAMED} more" if len(self.of) > NAMED else ""
        name = "not stated" if self.licence == UNKNOWN else self.licence
        return printable(f"{name}{self.note and f' ({self.note})'}: {', '.join(self.of[:NAMED])}{more}")


def rights_of(*stated: StatedLicences) -> list[Rights]:
    """Return every licence of some runs' data, with what has it.

    Raises VlmflowError with the licence and the sources if one forbids to pass on the weights.
    """
    licences = sorted(chain.from_iterable(map(_all, stated)), key=lambda one: one[0])
    found = [
        Rights(licence, [what for _, what in listed], _note(licence))
        for licence, listed in groupby(licences, key=lambda one: one[0])
    ]
    if refused := [one for one in found if FORBIDS.search(_plain(one.licence))]:
        raise VlmflowError(
            f"the licence of the training data forbids to pass on what is made from it: {'; '.join(map(str, refused))}",
            "do not publish these weights: train without these rows (datasets.NAME.sources); if the "
            "licence is wrong, correct it (datasets.NAME.licence, .source_licences) and run `merged/RUN` again",
        )
    return found


def _all(stated: StatedLicences) -> Iterator[tuple[str, str]]:
    yield stated.licence, f"data set {stated.dataset}"
    yield from _sources("questions from", stated.questions)
    yield from _sources("pictures of", stated.pictures)


def _sources(what: str, listed: Iterable[LicenceOfSource]) -> Iterator[tuple[str, str]]:
    for one in listed:
        yield one.licence, f"{what} {one.source} ({one.rows:,} rows)"


def _note(licence: str) -> str:
    if licence == UNKNOWN:
        return "that is no permission"
    return (
        "not for commercial use: say so to those who get the weights" if NOT_COMMERCIAL.search(_plain(licence)) else ""
    )


def _plain(licence: str) -> str:
    return re.sub(r"[\s_-]+", " ", licence.lower())
