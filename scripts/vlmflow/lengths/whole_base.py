"""Judges what the comparison of a base's tensors with its configuration found (`swift.base_tensors`)."""

from collections.abc import Mapping
from typing import Any

from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_files import shown

NAMED = 3
"""Tensors that the error names."""


def refuse_incomplete_base(found: Mapping[str, Any], base: str) -> None:
    """Raise VlmflowError if a base lacks tensors that its config.json needs, or has others that nothing loads.

    found: the result of `base_tensors.compare_tensors`. base: its name for people.
    """
    if "failed" in found:
        raise VlmflowError(
            f"{base}: transformers cannot build the model of its config.json: {found['failed']!r}",
            "use a model with the config.json that its owner published, and that transformers supports",
        )
    if missing := found.get("missing"):
        raise VlmflowError(
            f"{base}: its files lack tensors that its config.json needs: {_some(missing)}; the training would begin "
            "with random numbers there",
            "choose a complete model: another commit in models.NAME.source (hf://…@COMMIT) or pins.yaml, or a whole "
            "folder; or fix config.json in a local copy (tie_word_embeddings, for a head that is the embedding)",
        )
    if unneeded := found.get("unneeded"):
        raise VlmflowError(
            f"{base}: its files have tensors that no model of its config.json has: {_some(unneeded)}; nobody would "
            "load them",
            "choose another commit in models.NAME.source (hf://…@COMMIT) or pins.yaml, or remove the tensors, or fix "
            "config.json, in a local copy",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(map(shown, names[:NAMED])) + more
