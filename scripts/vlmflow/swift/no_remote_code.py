"""Prevents transformers from running Python from a model's folder in this process, whoever calls it.

ms-swift 4.6 passes trust_remote_code=True whenever it loads a model (swift/model/register.py, model_meta.py, and the
loaders of some models). transformers then imports modules that a JSON file names (`auto_map`), and
`custom_generate/generate.py` if the folder has it. The folders that stages see have no Python; this is a second
safeguard.
"""

from collections.abc import Callable
from typing import Any


def refuse_remote_code() -> None:
    """Make every loader of transformers use trust_remote_code=False, whatever it is called with."""
    import transformers
    from transformers.models.auto import modeling_auto

    others = [
        getattr(transformers, f"Auto{kind}")
        for kind in ("Config", "FeatureExtractor", "ImageProcessor", "Processor", "Tokenizer", "VideoProcessor")
    ]
    # Each automatic class of models has its own copy of the two functions (auto_factory.auto_class_update).
    models = [kind for kind in vars(modeling_auto).values() if isinstance(kind, type)]
    for loader in [*others, *models, transformers.PreTrainedModel]:
        for name in ("from_pretrained", "from_config"):
            if name in vars(loader):
                setattr(loader, name, classmethod(_untrusting(vars(loader)[name].__func__)))


def _untrusting(load: Callable[..., Any]) -> Callable[..., Any]:
    def untrusting(*arguments: Any, **settings: Any) -> Any:
        return load(*arguments, **settings | {"trust_remote_code": False})

    return untrusting
