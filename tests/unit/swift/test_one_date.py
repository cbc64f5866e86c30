"""The date that a chat template holds."""

from datetime import datetime

import pytest

from vlmflow.swift.one_date import _own_day


@pytest.mark.parametrize(
    "template",
    ["{{ '2024-07-26' }} after 01 Jan 2023", "26 Jul 2024, 2023-01-01", "00 Abc 2023 2023-99-99 {{ '2024-07-26' }}"],
)
def test_the_first_date_counts_in_whatever_form(template: str) -> None:
    """`chat_templates` puts the date that servers write before a template, which may tell of others."""
    assert _own_day(template) == datetime(2024, 7, 26)
