"""Keeps transformers from running Python of a model's folder in this process, whoever calls it.

ms-swift 4.6 passes trust_remote_code=True wherever it loads a model (swift/model/register.py, model_meta.py, and the
loaders of some models). With it transformers imports modules that a JSON file names (`auto_map`), and
`custom_generate/generate.py` where the folder has one. The folders that stages see hold no Python; this is the second
lock on that door.
"""

from collections.abc import Callable
from typing import Any


def refuse_remote_code() -> None:
    """Have every loader of transformers take trust_remote_code as false, whatever it is called with."""
    import transformers
    from transformers.models.auto import modeling_auto

    others = [
        getattr(transformers, f"Auto{kind}")
        for kind in ("Config", "FeatureExtractor", "ImageProcessor", "Processor", "Tokenizer", "VideoProcessor")
    ]
    # Each automatic class of models has a copy of its own of the two functions (auto_factory.auto_class_update).
    models = [kind for kind in vars(modeling_auto).values() if isinstance(kind, type)]
    for loader in [*others, *models, transformers.PreTrainedModel]:
        for name in ("from_pretrained", "from_config"):
            if name in vars(loader):
                setattr(loader, name, classmethod(_untrusting(vars(loader)[name].__func__)))


def _untrusting(load: Callable[..., Any]) -> Callable[..., Any]:
    def untrusting(*arguments: Any, **settings: Any) -> Any:
        return load(*arguments, **settings | {"trust_remote_code": False})

    return untrusting
