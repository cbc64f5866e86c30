"""The blocks of settings that stages take, for tests that call a script directly."""

from typing import Any


def validation(**changed: Any) -> dict[str, Any]:
    """Return the part of a data set's settings that validate_sharegpt takes."""
    return {
        "kind": "fire",
        "one_prompt": False,
        "form": "trajectory",
        "max_history_rounds": None,
        "modality": "image",
        "skip_images": False,
        "test_share": 0.0,
        "val_share": 0.1,
        "seed": 1,
        "max_reject_share": 0.5,
        "row_limits": {},
        "near_duplicates": {},
        **changed,
    }
