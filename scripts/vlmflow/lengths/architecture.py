"""Whether a model is of the kind that its `model_type` in the configuration says."""

from pathlib import Path

from vlmflow.config.model_types import architectures_in, model_types, model_types_for
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_files import CONFIG, shown


def refuse_other_architecture(folder: Path, model_type: str) -> None:
    """Raise VlmflowError if a model's architecture is none of those that its model_type is for.

    ms-swift would load it with another model's code and fail, or train it in another model's chat form.
    folder: the model's files; weights are not needed.
    """
    found, allowed = architectures_in(folder), model_types()[model_type].architectures
    if not found or not allowed or set(found) & set(allowed):
        return
    fitting = model_types_for(found)
    raise VlmflowError(
        f"{folder / CONFIG}: the model is a {', '.join(map(shown, found))}; model_type {model_type} is for "
        f"{', '.join(allowed)}",
        f"set models.NAME.model_type: {' or '.join(fitting)}" if fitting else "use a model that ms-swift knows",
    )
