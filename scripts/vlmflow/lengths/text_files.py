"""The files of a model that decide which tokens a conversation becomes."""

from pathlib import Path

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
"""The chat template decides, too: ms-swift's one is found by it, and it holds the date."""


def text_digests(model: Path) -> dict[str, str]:
    """Return the SHA-256 of those that a model has, by name. model: its folder."""
    return {name: sha256_of(model / name) for name in TEXT_FILES if (model / name).is_file()}


def refuse_other_texts(model: Path, measured: dict[str, str] | None, rows: Path) -> None:
    """Raise VlmflowError if a model is another one than rows were measured with.

    model: its folder. measured: `text_digests` of then; None in an account of before. rows: their folder.
    """
    if measured is None:
        return
    now = text_digests(model)
    for name in sorted(now.keys() | measured.keys()):
        if now.get(name) != measured.get(name):
            raise VlmflowError(
                f"{model / name}: is another file than when the lengths of {rows} were measured",
                "run the same command again: the workflow measures them with the model as it is now",
            )
