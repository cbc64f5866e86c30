"""Judges what the comparison of the training with the model's own chat template found (`swift.served_rows`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.chat_form import ChatForm
from vlmflow.rows.chat import THOUGHT

KEY = "models.NAME.template_differs"


def accepted_difference(
    found: Mapping[str, Any], folder: Path, text_args: Mapping[str, Any], template_differs: bool
) -> str | None:
    """Return the first difference between training and chat template in words; None if there is none.

    found: the result of `served_rows.first_difference`. folder: the model's. text_args: see TrainSettings.
    template_differs: whether the configuration accepts a difference.

    Raises VlmflowError for a difference that it does not accept, and for a template that fails or knows no tools, with
    the row.
    """
    if "failed" in found:
        at = f" at row {found['row']}" if "row" in found else ""
        raise VlmflowError(
            f"{folder}: the model's chat template fails{at}: {found['failed']!r}; so does every server that uses it",
            "put a template that renders such rows into a local copy of the model, and use that; if it refuses system "
            "turns, do without them (datasets.NAME.system_prompt)",
        )
    if "no_tools" in found:
        raise VlmflowError(
            f"{folder}: row {found['row']} has tools, and the model's chat template writes none, so every server would "
            "leave them out without a word",
            "put a chat template that writes tools into a local copy of the model, and use that; or choose a model "
            "whose template does",
        )
    if not found:
        return None
    dated = f" on {found['day']} (it writes the date)" if found["day"] else ""
    where = f"after {found['before']!r}" if found["before"] else "at the beginning"
    difference = (
        f"row {found['row']}: {where} the training has {found['trained']!r}, the model's chat template "
        f"{found['served']!r}{dated}"
    )
    if not template_differs:
        raise VlmflowError(
            f"{folder}: servers would not give the model what it is trained on: {difference}",
            f"{_what_makes_them_equal(found, text_args)}; or accept the difference, which the model card then tells: "
            f"{KEY}: true",
        )
    return difference


def _what_makes_them_equal(found: Mapping[str, Any], text_args: Mapping[str, Any]) -> str:
    form = ChatForm.of(text_args, False)
    if form.empty_thoughts != "none" and found["trained"].startswith(THOUGHT):
        return "train no empty thoughts: add add_non_thinking_prefix: false to runs.NAME.train.swift_args"
    if form.system is not None:
        return "write the system prompt into the rows (datasets.NAME.system_prompt), not into swift_args"
    return "put the chat template that the training uses into a local copy of the model, and use that"
