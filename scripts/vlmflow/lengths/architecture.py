"""Whether a model is of the kind that its `model_type` in the configuration says.

This is not beside the other checks of a model's files: what knows ms-swift's names also knows strategies and tuners,
and a new one of those must not fetch models again (harness/code_digest.py).
"""

from pathlib import Path

from vlmflow.config.swift_args import architectures_of, model_types_for
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json
from vlmflow.fetch.model_files import shown

CONFIG = "config.json"


def refuse_other_architecture(folder: Path, model_type: str) -> None:
    """Raise VlmflowError if a model's architecture is none of those that its model_type is for.

    ms-swift would load it with another model's code and fail, or train it in another model's chat form.
    folder: the model's files; weights are not needed.
    """
    stated, allowed = read_json(folder / CONFIG).get("architectures"), architectures_of(model_type)
    found = list(map(str, stated)) if isinstance(stated, list) else []
    if not found or not allowed or set(found) & set(allowed):
        return
    fitting = sorted({name for architecture in found for name in model_types_for(architecture)})
    raise VlmflowError(
        f"{folder / CONFIG}: the model is a {', '.join(map(shown, found))}; model_type {model_type} is for "
        f"{', '.join(allowed)}",
        f"set models.NAME.model_type: {' or '.join(fitting)}" if fitting else "use a model that ms-swift knows",
    )
