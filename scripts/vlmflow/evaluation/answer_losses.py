"""Measures how well a model predicts answers: the loss of a conversation's answers; runs in a separate process.

    python -m vlmflow.evaluation.answer_losses WORK LOSSES SETTINGS --model FOLDER …

WORK: JSON lines of `Work`. LOSSES: the output file, JSON lines of `Measured`, each written as soon as it is known, in
the order of the work. SETTINGS: `HowToMeasure` as JSON. ms-swift's own arguments of model and template follow. The
picture store and the picture budget come from the environment, as for training (`child_process.environment`).

ms-swift's template turns a conversation into tokens and pictures, as in training. Plain transformers loads the model,
from the folder alone. Nothing is trained, and no token is drawn. On a GPU the conversations of a row stand in one
sequence, each of which attends to itself alone: a GPU waits for Python in each forward pass.
"""

import hashlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vlmflow.core.account import read_lines
from vlmflow.core.processes import die_with_parent
from vlmflow.evaluation.report import Keyed, Loss
from vlmflow.rows.chat import Turn, trained_messages_of
from vlmflow.swift.child_process import quick_imports
from vlmflow.swift.own_template import own_template

IGNORED = -100
"""The label of tokens that are not part of a trained answer."""


class Pass(msgspec.Struct, frozen=True):
    """A conversation.

    images: names in the picture store. given: the beginning of its last answer: it is not scored. tools: as in a row,
    if it has some.
    """

    turns: list[Turn]
    images: list[str]
    given: str = ""
    tools: str | UnsetType = UNSET


class Work(msgspec.Struct, frozen=True):
    """One row. key: of its losses in the store. passes: conversations by name."""

    key: str
    passes: dict[str, Pass]


class HowToMeasure(msgspec.Struct, frozen=True):
    """device, dtype: of the computation. max_length: of a conversation in tokens; longer ones are not computed.

    together: tokens of several conversations in one forward pass; 0 for one at a time.
    """

    device: str
    dtype: str
    max_length: int
    together: int


class Measured(Keyed, frozen=True):
    """One row's losses. key: that of the work.

    losses: by pass; empty if the row is too long. inputs: a digest of the tokens of each pass, prompt and answer.
    answers: the same of the scored tokens alone. tokens: those of the longest pass.
    """

    losses: dict[str, Loss]
    inputs: dict[str, str]
    answers: dict[str, str]
    tokens: int


def main() -> None:
    """Measure all rows of the work."""
    die_with_parent(os.getppid())
    work, losses, settings, *words = sys.argv[1:]
    how = msgspec.json.decode(settings, type=HowToMeasure)
    with quick_imports():
        template = own_template(words)
        from transformers.utils.logging import disable_progress_bar

        from vlmflow.merging.logits import load
        from vlmflow.swift.row_attention import SDPA, joins_rows, keep_rows_apart
    disable_progress_bar()
    model = load(Path(template.model_info.model_dir), how.device, how.dtype)
    template.model = model  # the template asks it for the positions of pictures
    if how.together and joins_rows(template) and model.config._attn_implementation == SDPA:
        keep_rows_apart()
    else:
        how = msgspec.structs.replace(how, together=0)
    with Path(losses).open("wb", buffering=0) as file:
        for row in read_lines(Path(work), Work):
            file.write(msgspec.json.encode(_measure(row, template, model, how)) + b"\n")


def _measure(row: Work, template: Any, model: Any, how: HowToMeasure) -> Measured:
    encoded = {name: _encode(template, each) for name, each in row.passes.items()}
    inputs = {name: _digest([each["input_ids"], each["labels"]]) for name, each in encoded.items()}
    answers = {name: _digest([n for n in each["labels"] if n != IGNORED]) for name, each in encoded.items()}
    longest = max(len(each["input_ids"]) for each in encoded.values())
    fits = longest <= how.max_length
    losses: dict[str, Loss] = {}
    for names in _groups(encoded, how.together) if fits else []:
        given = [(encoded[name], row.passes[name].given) for name in names]
        losses |= zip(names, _losses(template, model, given), strict=True)
    for name, loss in losses.items():
        if not math.isfinite(loss.nats):  # JSON has none: the line could not be read again
            # The parent shows the last line of this form as the cause.
            sys.exit(
                f"ValueError: row {row.key}, {name}: the model's loss is {loss.nats}, which is not a finite number. "
                f"Weights or dtype {how.dtype} are the cause: float16 overflows, so set runs.NAME.train.dtype to "
                "bfloat16 or float32; otherwise see that the model's weights are finite"
            )
    return Measured(row.key, losses, inputs, answers, longest)


def _encode(template: Any, made: Pass) -> dict[str, Any]:
    root = Path(os.environ["ROOT_IMAGE_DIR"])
    images = [str(root / name) for name in made.images]
    tools = {"tools": made.tools} if made.tools else {}
    encoded: dict[str, Any] = template.encode({"messages": trained_messages_of(made.turns), "images": images, **tools})
    return encoded


def _digest(tokens: list[Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(tokens)).hexdigest()[:16]


def _groups(encoded: dict[str, dict[str, Any]], together: int) -> list[list[str]]:
    """Return the names of conversations in groups of at most so many tokens; each alone if it is longer."""
    groups: list[list[str]] = []
    tokens = 0
    for name, each in encoded.items():
        tokens += len(each["input_ids"])
        if not groups or tokens > together:
            groups.append([])
            tokens = len(each["input_ids"])
        groups[-1].append(name)
    return groups


def _losses(template: Any, model: Any, conversations: list[tuple[dict[str, Any], str]]) -> list[Loss]:
    """Return the losses of encoded conversations in one forward pass, each with what is given of its last answer."""
    import torch

    from vlmflow.swift.row_attention import NOT_INPUTS, ROWS, NamesRows

    lengths = [len(each["input_ids"]) for each, _ in conversations]
    encoded = [each | {"length": length} for (each, _), length in zip(conversations, lengths, strict=True)]
    template.padding_free = len(encoded) > 1
    batch = NamesRows(template.data_collator)(encoded) if template.padding_free else template.data_collator(encoded)
    labels = batch["labels"][0]
    inputs = {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name not in NOT_INPUTS
    }
    begins = inputs[ROWS][:-1] if template.padding_free else [0]
    scored = [
        begin + _scored(template, labels[begin : begin + length], given)
        for begin, length, (_, given) in zip(begins, lengths, conversations, strict=True)
    ]
    firsts = [int(positions[0]) - 1 for positions in scored]  # the positions that predict the answers' first tokens
    kept = torch.cat([torch.arange(first, int(positions[-1])) for first, positions in zip(firsts, scored, strict=True)])
    keep: Any = kept.to(model.device) if template.padding_free else len(labels) - firsts[0]
    with torch.inference_mode(), template.forward_context(model, inputs):
        logits = model(**inputs, logits_to_keep=keep).logits[0]
    losses, at = [], 0
    for first, positions in zip(firsts, scored, strict=True):
        own = logits[at : at + int(positions[-1]) - first] if template.padding_free else logits
        at += len(own)
        wanted = labels[positions].to(logits.device)
        log_probabilities = own.float().log_softmax(-1)[(positions - 1 - first).to(logits.device)]
        nats = -log_probabilities.gather(1, wanted[:, None]).double().sum()
        losses.append(Loss(float(nats), len(positions)))
    return losses


def _scored(template: Any, labels: Any, given: str) -> Any:
    """Return the positions of the trained answers' tokens, without what is given and what the template adds at the end.

    labels: those of one conversation.
    """
    scored = (labels != IGNORED).nonzero().flatten()
    ends = (labels[scored] == template.tokenizer.eos_token_id).nonzero().flatten()
    if len(ends):
        scored = scored[: int(ends[-1]) + 1]
    if given:
        first_tokens = template.tokenizer(given, add_special_tokens=False)["input_ids"]
        if labels[scored[: len(first_tokens)]].tolist() != first_tokens:
            sys.exit(f"ValueError: the tokens of an answer that begins with {given!r} do not begin with its tokens")
        scored = scored[len(first_tokens) :]
    return scored


if __name__ == "__main__":
    main()
