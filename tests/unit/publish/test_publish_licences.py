"""Which stated licences forbid to publish, and what people are shown of the others."""

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.publish.package import rights_of
from vlmflow.reports.licences import LicenceOfSource, StatedLicences


def stated(licence: str, pictures: tuple[LicenceOfSource, ...] = ()) -> StatedLicences:
    return StatedLicences("mine", [], licence, [], list(pictures))


@pytest.mark.parametrize(
    "licence",
    [
        "proprietary",
        "Proprietary, of the museum",
        "(c) 2020, All rights reserved",
        "no redistribution",
        "may not be redistributed",
        "non-redistributable",
        "cc-by-nd-4.0",
        "CC BY-NC-ND 4.0",
        "Creative Commons NoDerivatives",
        "for internal use",
        "confidential",
    ],
)
def test_a_licence_that_forbids_to_pass_on_is_refused(licence: str) -> None:
    with pytest.raises(VlmflowError, match="forbids to pass on") as refusal:
        rights_of(stated("cc-by-4.0", (LicenceOfSource("coco", 1_234, licence),)))
    assert licence in str(refusal.value)
    assert ": pictures of coco (1,234 rows)" in str(refusal.value)
    with pytest.raises(VlmflowError, match="data set mine"):
        rights_of(stated(licence))


@pytest.mark.parametrize(
    ("licence", "shown"),
    [
        ("cc-by-4.0", "cc-by-4.0: data set mine"),
        ("apache-2.0", "apache-2.0: data set mine"),
        ("non-proprietary", "non-proprietary: data set mine"),
        ("cc-by-nc-4.0", "cc-by-nc-4.0 (not for commercial use: say so to those who get the weights): data set mine"),
        ("unknown", "not stated (that is no permission): data set mine"),
        ("mit\x1b[2J", "mit�[2J: data set mine"),
    ],
)
def test_any_other_licence_is_shown(licence: str, shown: str) -> None:
    assert [str(one) for one in rights_of(stated(licence))] == [shown]


def test_sources_of_a_licence_are_named_together_and_many_are_counted() -> None:
    sources = tuple(LicenceOfSource(f"s{number}", 9, "unknown") for number in range(12))
    first, second = map(str, rights_of(stated("mit", sources)))
    assert first == "mit: data set mine"
    assert second.endswith("pictures of s7 (9 rows) and 4 more")
