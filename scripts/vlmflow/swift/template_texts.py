"""Finds the kind of a model, and its chat template, by its own files: the architecture, and what its template writes.

ms-swift knows both by the address of a model on the hub. For others, such as a folder, several kinds or templates may
be for an architecture; the right one writes what the model's own chat template writes. What ms-swift's templates write
of some conversations stands in a table, which `scripts/vlmflow/tools/make_swift_names.py` makes.
"""

import functools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from vlmflow.config.model_types import AUTO, TEMPLATE, ModelType, architectures_in, model_types, model_types_for
from vlmflow.config.settings import Settings
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.chat_templates import WRITTEN, chat_template_of
from vlmflow.fetch.model_files import CONFIG, architectures_shown, read_object
from vlmflow.swift.child_process import limited

TABLE = Path(__file__).with_name("template_texts.json")

BOS, EOS = "{{bos}}", "{{eos}}"
"""What the table has in place of the tokens that begin and end a text."""

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = [
    *({"role": "user", "content": "Question one?"}, {"role": "assistant", "content": "Answer one."}),
    *({"role": "user", "content": "Question two?"}, {"role": "assistant", "content": "Answer two."}),
]
TALKS: list[list[dict[str, str]]] = [ASKED, [SYSTEM, *ASKED]]
"""The conversations of the table."""

TYPE = "models.NAME.model_type"
KEYS = f"{TYPE} and template"

Block = TypeVar("Block", bound=Settings)

SHOWN = 40
"""Characters that are shown of a difference."""


def kind_of(folder: Path, model_type: str, template: str | None) -> tuple[str, str | None]:
    """Return ms-swift's kind of a model and its chat template; None for the template that ms-swift takes by itself.

    folder: the model's files; weights are not needed. model_type: as in the configuration, AUTO if it is not known.
    template: the run's; None if it names none.

    Raises VlmflowError with the candidates, and the first difference from the nearest one, if none or several fit.
    """
    names = model_types_for(architectures_in(folder)) if model_type == AUTO else [model_type]
    kinds = {name: kind for name in names if not (kind := model_types()[name]).refused}
    if not kinds:
        architectures = architectures_shown(folder) or "no architecture"
        raise VlmflowError(
            f"{folder / CONFIG}: {architectures}: ms-swift has no kind of model for it that runs train",
            "choose another model, or write the model_type of one with the same architecture (models.NAME.model_type)",
        )
    if template is not None:
        kinds = {name: kind for name, kind in kinds.items() if template in kind.templates} or kinds
        if len(kinds) > 1:
            raise VlmflowError(
                f"{folder / CONFIG}: ms-swift has several kinds of models for it", f"write {TYPE}: {' or '.join(kinds)}"
            )
    candidates = [(name, each) for name, kind in kinds.items() for each in _choice(kind, model_type, template)]
    if len(candidates) > 1 or candidates[0][1] == AUTO:
        candidates = [_that_writes_the_same(folder, [(name, each) for name, each in candidates if each != AUTO])]
    name, chosen = candidates[0]
    return name, None if chosen in (template, kinds[name].template) else chosen


def named(block: Block, folder: Path) -> Block:
    """Return the settings of a stage with the kind of its model and its chat template, as if they were written.

    block: a part of a run's settings: `model_type`, and `train` or `text_args`. folder: the model's files. Raises as
    `kind_of` does.
    """
    given: Any = block
    train = given.train if "train" in type(block).model_fields else None
    args = train.swift_args if train else given.text_args
    model_type, template = kind_of(folder, given.model_type, args.get(TEMPLATE))
    args = args if template is None else {TEMPLATE: template, **args}
    changed = {"train": train.model_copy(update={"swift_args": args})} if train else {"text_args": args}
    return cast(Block, given.model_copy(update={"model_type": model_type, **changed}))


def _choice(kind: ModelType, model_type: str, template: str | None) -> Sequence[str]:
    """Return the templates that a model of a kind may have; [AUTO] if nothing says which."""
    if template is not None:
        return [template]
    if model_type != AUTO and kind.template:
        return [kind.template]
    return kind.templates or [AUTO]


def _that_writes_the_same(folder: Path, candidates: list[tuple[str, str]]) -> tuple[str, str]:
    named = ", ".join(f"{name} / {template}" for name, template in candidates) or "none"
    write = f"write {KEYS}; candidates: {named}"
    if (own := chat_template_of(folder)) is None:
        raise VlmflowError(f"{folder}: nothing says of which kind it is: it has no single chat template", write)
    comparison = limited(partial(_compare, folder, own, sorted({template for _, template in candidates})))
    if "failed" in comparison:
        raise VlmflowError(f"{folder}: the model's chat template fails: {comparison['failed']!r}", write)
    fitting = [each for each in candidates if each[1] in comparison["same"]]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        several = ", ".join(f"{name} / {template}" for name, template in fitting)
        raise VlmflowError(
            f"{folder}: several of ms-swift's chat templates write what its own one does", f"write {KEYS}: {several}"
        )
    raise VlmflowError(
        f"{folder}: none of ms-swift's chat templates writes what its own one does; {comparison['difference']}", write
    )


def _compare(folder: Path, own: str, templates: list[str]) -> dict[str, Any]:
    """Return which templates write the same ("same"), and the first difference from the nearest ("difference")."""
    ends = _ends(folder)
    served = [_served(own, talk, ends) for talk in TALKS]
    same, nearest = [], (-1, "ms-swift writes no conversation with them without a model")
    for template in templates:
        differences = [
            _first_difference(_plain(text, ends), [[_plain(each, ends) for each in way] for way in ways])
            for text, ways in zip(texts()[template], served, strict=True)
            if text is not None and ways
        ]
        differing = [each for each in differences if each is not None]
        if differences and not differing:
            same.append(template)
        nearest = max([nearest, *((at, f"{template}: {fault}") for at, fault in differing)])
    return {"same": same, "difference": nearest[1]}


def _plain(text: str, ends: dict[str, str]) -> str:
    """Return a text with one date, and without the token that begins it: a tokenizer may write that by itself."""
    begin = ends.get("bos_token", "")
    text = text.replace(BOS, begin).replace(EOS, ends.get("eos_token", "")).removeprefix(begin)
    for looks in WRITTEN.values():
        text = looks.sub("DATE", text)
    return text


def _first_difference(trained: str, ways: list[list[str]]) -> tuple[int, str] | None:
    """Compare a conversation as it is trained with what servers write: each of its prompts with its answer.

    ways: what they write, for each way to give a template the same messages. Returns where and how the nearest of them
    differs; None if one does not.
    """
    differences = [next(filter(None, (_differs(trained, text) for text in served)), None) for served in ways]
    return None if None in differences else max(filter(None, differences))


def _differs(trained: str, served: str) -> tuple[int, str] | None:
    if trained.startswith(served):
        return None
    pairs = enumerate(zip(trained, served, strict=False))
    at = next((n for n, (own, other) in pairs if own != other), min(len(trained), len(served)))
    return at, (
        f"after {trained[max(0, at - SHOWN) : at]!r} it has {trained[at : at + SHOWN]!r}, the model's "
        f"{served[at : at + SHOWN]!r}"
    )


def _served(own: str, talk: list[dict[str, str]], ends: dict[str, str]) -> list[list[str]]:
    """Return each prompt with its answer, for messages of texts and of parts, where the template writes such."""
    from transformers.utils.chat_template_utils import render_jinja_template

    result: list[list[str]] = []
    failed = None
    for messages in (talk, [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in talk]):
        try:
            prompts: list[str] = []
            for index, turn in enumerate(talk):
                if turn["role"] == "assistant":
                    given: list[Any] = [messages[:index]]
                    written, _ = render_jinja_template(given, chat_template=own, add_generation_prompt=True, **ends)
                    prompts.append(written[0] + turn["content"])
            result.append(prompts)
        except Exception as error:  # whatever the template does
            failed = error
    if failed and not result and talk is ASKED:  # it may refuse a system turn
        raise failed
    return result


def _ends(folder: Path) -> dict[str, str]:
    """Return a tokenizer's special tokens by their names, as chat templates know them."""
    file = folder / "tokenizer_config.json"
    config = read_object(file) if file.is_file() else {}
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


@functools.cache
def texts() -> dict[str, list[str | None]]:
    """Return what each template writes of `TALKS`."""
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, list[str | None]])
