"""The date that a chat template holds."""

from datetime import date

import pytest

from vlmflow.fetch.chat_templates import date_in


@pytest.mark.parametrize(
    "template",
    ["{{ '2024-07-26' }} after 01 Jan 2023", "26 Jul 2024, 2023-01-01", "00 Abc 2023 2023-99-99 {{ '2024-07-26' }}"],
)
def test_the_first_date_counts_in_whatever_form(template: str) -> None:
    """`chat_templates` puts the date that servers write before a template, which may tell of others."""
    assert date_in(template, alone=False) == date(2024, 7, 26)


def test_a_date_within_a_text_may_mean_another_day() -> None:
    assert date_in("It ends on 2023-10-01. {{ '2024-07-26' }}", alone=True) == date(2024, 7, 26)
