"""Rounds, prompts and JSON in texts: read as ms-swift's own preprocessors read them, but where it is wrong."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from swift.dataset.preprocessor.core import AutoPreprocessor

from fire_rows import form_rows
from vlmflow.rows.chat import Reject, trained_messages_of

pytestmark = pytest.mark.slow  # until ms-swift changes, the forms' own tests say the same

ROWS = 200
"""The rows of each form that are compared."""

WORDS = ["What", "is", "a disc?", "Ein Kreis – rot", "赤い", "{x}", "[1]", "<b>", "\n", "\t2.", "It's", '"q"']


def text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, 6))).strip() or "x"


def history(draw: random.Random) -> list[list[str]]:
    return [[text(draw), text(draw)] for _ in range(draw.randint(0, 3))]


def beside(draw: random.Random) -> dict[str, Any]:
    return {"system": draw.choice([None, text(draw)])}


def alpaca(draw: random.Random) -> dict[str, Any]:
    asked = {"instruction": text(draw), "input": draw.choice(["", text(draw)]), "output": text(draw)}
    return asked | beside(draw) | {"history": history(draw)}


def query(draw: random.Random) -> dict[str, Any]:
    return {"query": text(draw), "response": text(draw), "history": history(draw)} | beside(draw)


def pairs(draw: random.Random) -> dict[str, Any]:
    talk = [{"human": text(draw), "assistant": text(draw)} for _ in range(draw.randint(1, 3))]
    return {"conversation": talk} | beside(draw)


def texts_of_json(draw: random.Random) -> dict[str, Any]:
    roles = ["user", "assistant"] * draw.randint(1, 3)
    return {"messages": json.dumps([{"role": role, "content": text(draw)} for role in roles])}


def asked(draw: random.Random) -> dict[str, Any]:
    return {"question": text(draw), "answer": text(draw)}


def prompted(draw: random.Random) -> dict[str, Any]:
    return {"prompt": text(draw), "completion": text(draw)}


def of_swift(rows: list[dict[str, Any]]) -> list[Any]:
    """Return the messages that ms-swift makes of the rows."""
    read = AutoPreprocessor()(Dataset.from_list(rows), load_from_cache_file=False, enable_auto_mapping=True)
    return [[{"role": one["role"], "content": one["content"]} for one in row] for row in read["messages"]]


def own(kind: str, row: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    made = form_rows(kind, None, {}, None, None, **options)("id", 0, json.dumps(row).encode())
    assert not isinstance(made, Reject), made
    return trained_messages_of(made[0].conversations)


@pytest.mark.parametrize(
    ("kind", "maker"),
    [
        ("alpaca", alpaca),
        ("query_response", query),
        ("pairs", pairs),
        ("messages", texts_of_json),
        ("vqa", asked),
        ("prompt_completion", prompted),
    ],
)
def test_both_read_the_same(kind: str, maker: Callable[[random.Random], dict[str, Any]]) -> None:
    draw = random.Random(4)
    rows = [maker(draw) for _ in range(ROWS)]
    assert [own(kind, row) for row in rows] == of_swift(rows)


def test_what_swift_reads_otherwise() -> None:
    """It trains no answer of two columns, drops rounds about pictures, and trains the bad answers of KTO rows."""
    two = {"question": "What?", "answer": "It.", "answers": ["It.", "A disc."]}
    assert of_swift([two]) == [[{"role": "user", "content": "What?"}]]
    assert own("vqa", two, ignore_keys=["answers"])[1]["content"] == "It."
    rounds = {"texts": [{"user": "What?", "assistant": "It."}]}
    assert of_swift([rounds]) == []
    assert len(own("texts", rounds)) == 2
    bad = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "No."}], "label": False}
    assert of_swift([bad])[0][1]["content"] == "No."
