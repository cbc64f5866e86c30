"""A base whose tensors are not those of its configuration."""

from typing import Any

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.against_swift import refuse_incomplete_base


@pytest.mark.parametrize("found", [{}, {"missing": [], "unneeded": []}])
def test_a_whole_base_is_taken(found: dict[str, Any]) -> None:
    refuse_incomplete_base(found, "base")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {"missing": ["a", "b"], "unneeded": ["c"]},
            r"base: its files lack tensors .*: a, b; the training would begin",
        ),
        ({"missing": [], "unneeded": [*"abcd\x1b"]}, r"base: its files have tensors .*: a, b, c and 2 more; nobody"),
        ({"failed": "ValueError: no\x1b"}, r"base: transformers cannot build .*: 'ValueError: no\\x1b'"),
    ],
)
def test_other_tensors_are_named_with_the_base(found: dict[str, Any], said: str) -> None:
    with pytest.raises(VlmflowError, match=said):
        refuse_incomplete_base(found, "base")
