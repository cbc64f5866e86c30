"""Write what the installed ms-swift knows by name into the configuration's tables, for review.

Planning checks names against these tables, because importing ms-swift takes seconds, and the data image does not have
it.
"""

import dataclasses
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec

from vlmflow.config import model_types, swift_args
from vlmflow.config.model_types import ModelPart, ModelType
from vlmflow.core.files import write_json
from vlmflow.harness.stage import run_stage
from vlmflow.swift import template_texts
from vlmflow.swift.own_template import encode_as_in_training

OTHER_TASK = re.compile(r"_(emb|embedding|reranker|gte|gme|gen)$|^diffusion_")
"""What ms-swift calls kinds that are not marked as such, but give embeddings, scores or pictures."""


def main(
    *, names: Path = swift_args.TABLE, kinds: Path = model_types.TABLE, texts: Path = template_texts.TABLE
) -> None:
    """Write the arguments of `swift sft` and the chat templates, the kinds of models, and what templates write.

    names, kinds, texts: the files to write, see vlmflow.config.swift_args, vlmflow.config.model_types and
    vlmflow.swift.template_texts.
    """
    write_json(names, installed_names())
    write_json(kinds, msgspec.to_builtins(installed_types()))
    write_json(texts, installed_texts())


def installed_names() -> dict[str, Any]:
    """Return the names of arguments and templates, sorted."""
    from swift.arguments import SftArguments
    from swift.template import TEMPLATE_MAPPING

    return {
        "arguments": sorted(field.name for field in dataclasses.fields(SftArguments) if field.init),
        "templates": sorted(TEMPLATE_MAPPING),
    }


def installed_types() -> dict[str, ModelType]:
    """Return the kinds of models by name, sorted."""
    from swift.model import MODEL_MAPPING

    return {name: _model_type(MODEL_MAPPING[name]) for name in sorted(MODEL_MAPPING)}


def installed_texts() -> dict[str, list[str | None]]:
    """Return what the templates of kinds that runs train write of each of `template_texts.TALKS`, as it is trained.

    Null for what a template cannot write without a model's own files.
    """
    names = {name for kind in model_types.model_types().values() if not kind.refused for name in kind.templates}
    encode_as_in_training()
    return {name: [_written(name, talk) for talk in template_texts.TALKS] for name in sorted(names)}


def _written(name: str, talk: list[dict[str, str]]) -> str | None:
    from swift.template import get_template

    tokenizer = _characters()
    tokenizer.model_info = SimpleNamespace(
        max_model_len=1 << 20, task_type="causal_lm", config=SimpleNamespace(), model_dir="", is_moe_model=False
    )
    tokenizer.model_meta = SimpleNamespace(template=name, is_multimodal=False, model_arch=None, model_type=None)
    try:
        template = get_template(tokenizer, template_type=name)
        template.set_mode("train")
        return str(tokenizer.decode(template.encode({"messages": talk})["input_ids"]))
    except Exception as error:  # whatever a template asks of its model
        logging.info("%s: %s", name, error)
        return None


def _characters() -> Any:
    """Return a tokenizer that has a token for each byte, and names for what begins and ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        bos_token=template_texts.BOS,
        eos_token=template_texts.EOS,
        pad_token=template_texts.EOS,
    )
    # So these are the dates of templates that write today's.
    made.chat_template = "01 Jan 2000, 2000-01-01"
    return made


def _model_type(meta: Any) -> ModelType:
    """Return a kind of ms-swift's registry (4.6, model/model_meta.py); one without an architecture has "null" there."""
    candidates = sorted(meta.candidate_templates)
    own = meta.template or (candidates[0] if len(candidates) == 1 else None)
    published: dict[str, list[str]] = {}
    for group in meta.model_groups:
        repos = sorted({model.hf_model_id for model in group.models if model.hf_model_id})
        if repos and (template := group.template or own):
            published[template] = sorted({*published.get(template, []), *repos})
    parts = {part: modules for part in get_args(ModelPart) if (modules := getattr(meta.model_arch, part, None))}
    architectures = sorted(set(meta.architectures) - {"null"})
    return ModelType(architectures, candidates, own, parts, dict(sorted(published.items())), _refusal(meta))


def _refusal(meta: Any) -> str | None:
    """Return why no run trains a kind of models; None if runs do."""
    from transformers.models.auto import modeling_auto as auto

    if meta.is_reward or meta.task_type not in (None, "causal_lm") or OTHER_TASK.search(meta.model_type):
        return "does not write answers"
    decoders: set[str] = set()
    for mapping in (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for names in mapping.values():
            decoders.update([names] if isinstance(names, str) else names)
    if decoders.isdisjoint(meta.architectures):
        return "is no decoder of transformers, so that it would run Python from its folder"
    return None


if __name__ == "__main__":
    run_stage(main)
