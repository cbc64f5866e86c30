"""Compares what is trained with what ms-swift and the model itself say: kind, tensors, chat template, lengths.

A model must be of the kind that its `model_type` in the configuration says, and have the tensors that its configuration
needs (`swift.meta_model`). All rows must be trained as the model's own chat template writes them (`swift.served_rows`).
Our lengths, and trained tokens, are compared with ms-swift's own on some rows of every run.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from vlmflow.config.model_types import architectures_in, model_types, model_types_for
from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import Progress, lines_meanwhile
from vlmflow.fetch.chat_templates import GENERATION, STOPS, added_tokens
from vlmflow.fetch.model_files import CONFIG, shown
from vlmflow.lengths.count import RowLength, lines_of
from vlmflow.lengths.summary import ShownText
from vlmflow.rows.chat import THOUGHT
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift import encoded_rows
from vlmflow.swift.arguments import BaseModel, as_words
from vlmflow.swift.chat_form import ChatForm
from vlmflow.swift.child_process import environment, run_module
from vlmflow.swift.model_layers import Description

NAMED = 3
"""Tensors that the error names."""

KEY = "models.NAME.template_differs"

WHAT = "the check of token lengths"

NO_LIMIT = 1 << 30

DRAWN = 12
"""Rows drawn at random for the check, in addition to the extremes."""


def refuse_other_architecture(folder: Path, model_type: str) -> None:
    """Raise VlmflowError if a model's architecture is none of those that its model_type is for.

    ms-swift would load it with another model's code and fail, or train it in another model's chat form.
    folder: the model's files; weights are not needed.
    """
    given, allowed = architectures_in(folder), model_types()[model_type].architectures
    if not given or not allowed or set(given) & set(allowed):
        return
    fitting = model_types_for(given)
    raise VlmflowError(
        f"{folder / CONFIG}: the model is a {', '.join(map(shown, given))}; model_type {model_type} is for "
        f"{', '.join(allowed)}",
        f"set models.NAME.model_type: {' or '.join(fitting)}" if fitting else "use a model that ms-swift knows",
    )


def refuse_incomplete_base(comparison: Mapping[str, Any], base: str) -> None:
    """Raise VlmflowError if a base lacks tensors that its config.json needs, or has others that nothing loads.

    comparison: the result of `meta_model.compare_tensors`. base: its name for people.
    """
    if "failed" in comparison:
        raise VlmflowError(
            f"{base}: transformers cannot build the model of its config.json: {comparison['failed']!r}",
            "use a model with the config.json that its owner published, and that transformers supports",
        )
    if missing := comparison.get("missing"):
        raise VlmflowError(
            f"{base}: its files lack tensors that its config.json needs: {_some(missing)}; the training would begin "
            "with random numbers there",
            "choose a complete model: another commit in models.NAME.source (hf://…@COMMIT) or pins.yaml, or a whole "
            "folder; or fix config.json in a local copy (tie_word_embeddings, for a head that is the embedding)",
        )
    if unneeded := comparison.get("unneeded"):
        raise VlmflowError(
            f"{base}: its files have tensors that no model of its config.json has: {_some(unneeded)}; nobody would "
            "load them",
            "choose another commit in models.NAME.source (hf://…@COMMIT) or pins.yaml, or remove the tensors, or fix "
            "config.json, in a local copy",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(map(shown, names[:NAMED])) + more


def accepted_difference(
    first: Mapping[str, Any], folder: Path, text_args: Mapping[str, Any], template_differs: bool
) -> str | None:
    """Return the first difference between training and chat template in words; None if there is none.

    first: the result of `served_rows.first_difference`. folder: the model's. text_args: see TrainSettings.
    template_differs: whether the configuration accepts a difference.

    Raises VlmflowError for a difference that it does not accept, and for a template that fails or knows no tools, with
    the row.
    """
    if "failed" in first:
        at = f" at row {first['row']}" if "row" in first else ""
        raise VlmflowError(
            f"{folder}: the model's chat template fails{at}: {first['failed']!r}; so does every server that uses it",
            "put a template that renders such rows into a local copy of the model, and use that; if it refuses system "
            "turns, do without them (datasets.NAME.system_prompt)",
        )
    if "no_tools" in first:
        raise VlmflowError(
            f"{folder}: row {first['row']} has tools, and the model's chat template writes none, so every server would "
            "leave them out without a word",
            "put a chat template that writes tools into a local copy of the model, and use that; or choose a model "
            "whose template does",
        )
    if not first:
        return None
    where = f"after {first['before']!r}" if first["before"] else "at the beginning"
    difference = (
        f"row {first['row']}: {where} the training has {first['trained']!r}, the model's chat template "
        f"{first['served']!r}"
    )
    if not template_differs:
        raise VlmflowError(
            f"{folder}: servers would not give the model what it is trained on: {difference}",
            f"{_what_makes_them_equal(first, text_args)}; or accept the difference, which the model card then tells: "
            f"{KEY}: true",
        )
    return difference


def refuse_endless(endless: Mapping[str, Any], folder: Path) -> None:
    """Raise VlmflowError if the training ends an answer with no token at which the model stops.

    Whoever uses the weights would get more text behind each answer, up to a limit of tokens.
    endless: the result of `encoded_rows.first_endless`. folder: the model's.
    """
    if endless:
        end = endless["end"]
        step = f"add {json.dumps([end.strip()])} to models.NAME.stop_tokens; the merged weights then stop there, too"
        if end.strip() not in added_tokens(folder):  # a text of several tokens, of which this is the last
            step = "the template's end is no token of the model: for a base, write models.NAME.chat_template: plain"
        raise VlmflowError(
            f"{folder}: row {endless['row']}: the training ends the answer with {end!r}, at which the model does not "
            f"stop ({STOPS} in {GENERATION} or {CONFIG}): every server would write on until its limit",
            step,
        )


def _what_makes_them_equal(difference: Mapping[str, Any], text_args: Mapping[str, Any]) -> str:
    form = ChatForm.of(text_args, False)
    if form.empty_thoughts != "none" and difference["trained"].startswith(THOUGHT):
        return "train no empty thoughts: add add_non_thinking_prefix: false to runs.NAME.train.swift_args"
    if form.system is not None:
        return "write the system prompt into the rows (datasets.NAME.system_prompt), not into swift_args"
    return "put the chat template that the training uses into a local copy of the model, and use that"


class CheckedRows:
    """Chooses rows for the check in one pass: the extremes in text and in pictures, and a random draw.

    Among them are rows with and without a system turn, with and without tools, and with and without several pictures,
    where there are both: a template may cut several pictures otherwise than one.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seen = 0
        self._drawn: list[RowLength] = []
        self._extremes: dict[str, RowLength] = {}
        self._random = Random(seed)  # noqa: S311 (drawn, not secret)

    def see(self, row: RowLength) -> None:
        """Consider one row (reservoir sampling: each is drawn with the same probability)."""
        self._seen += 1
        if len(self._drawn) < DRAWN:
            self._drawn.append(row)
        elif (index := self._random.randrange(self._seen)) < DRAWN:
            self._drawn[index] = row
        self._extremes.setdefault(f"system turn: {row.system_turn}, tools: {row.tools}", row)
        self._extremes.setdefault(f"several pictures: {row.pictures is not UNSET}", row)
        for kind in ("text_tokens", "picture_tokens"):
            for name, sign in (("most", 1), ("fewest", -1)):
                best = self._extremes.get(name + kind)
                if best is None or sign * getattr(row, kind) > sign * getattr(best, kind):
                    self._extremes[name + kind] = row

    def rows(self) -> list[RowLength]:
        """Return the chosen rows, each once, in the order of the file."""
        chosen = {row.start: row for row in [*self._extremes.values(), *self._drawn]}
        return [chosen[start] for start in sorted(chosen)]


class Comparison(NamedTuple):
    """What ms-swift's template and the model's own say of some rows.

    differs: how lengths or trained tokens differ in ms-swift's template, as a text; None if they do not. chat_template:
    the first difference between the two templates that the configuration accepts, as a text; None without one.
    one_sequence: whether several rows may stand in one sequence. by_size: whether these pictures' sizes alone give the
    same counts. example: the shortest of the rows. model: what the model says of itself; None if transformers cannot
    build it, or nothing names its tensors.
    """

    differs: str | None
    chat_template: str | None
    one_sequence: bool
    by_size: bool
    example: list[ShownText]
    model: Description | None


def template_arguments(model: Path, model_type: str, loss_scale: str, text_args: Mapping[str, Any]) -> dict[str, Any]:
    """Give ms-swift's arguments for the template that the rows of a training go through; no row is too long for it.

    model: the folder. loss_scale: which answers are trained, as ms-swift names it.
    """
    return {
        "model": model.absolute(),
        "model_type": model_type,
        "loss_scale": loss_scale,
        "max_length": NO_LIMIT,
        "load_args": False,  # the arguments in a model's folder may name Python files
        **text_args,
    }


def check_lengths(
    chosen: dict[Path, list[RowLength]],
    data: TrainingData,
    model: BaseModel,
    image_max_tokens: int,
    text_args: dict[str, Any],
    threads: int,
    template_differs: bool = False,
    tensors: list[str] | None = None,
) -> Comparison:
    """Let ms-swift encode the chosen rows of each file, and the model's chat template render all of it.

    Where ms-swift's lengths differ from ours, the template renders the chosen rows alone.

    data: the data of the rows. image_max_tokens, text_args: see TrainSettings. template_differs: whether the two may
    give the rows other tokens (models.NAME.template_differs). tensors: the names of those in the model's files; None if
    they are not known.

    Raises VlmflowError as `accepted_difference` and `refuse_incomplete_base` do.
    """
    ours = [row for rows in chosen.values() for row in rows]
    with tempfile.TemporaryDirectory(prefix="vlmflow-lengths-") as scratch:
        folder = Path(scratch)
        with (folder / "rows.jsonl").open("wb") as file:
            for source, rows in chosen.items():
                file.write(lines_of(source, rows))
        whole = [] if template_differs else [str(source.absolute()) for source in chosen]
        form = asdict(ChatForm.of(text_args, data.last_answer_only))
        (folder / "given.json").write_text(json.dumps({"tensors": tensors, "files": whole, "form": form}))
        files = [str(folder / name) for name in ("rows.jsonl", "given.json", "found.json")]
        arguments = template_arguments(model.folder, model.model_type, data.loss_scale, text_args)
        words = [encoded_rows.CHECK, *files, *as_words(arguments)]
        env = environment(data.pictures, image_max_tokens, folder / "cache", threads)
        with Progress(WHAT, len(ours), "rows") as progress, lines_meanwhile(WHAT):
            run_module(encoded_rows.__name__, words, folder, env, folder / "log", WHAT)
            progress.advance(len(ours))
        result = json.loads((folder / "found.json").read_text())
    refuse_incomplete_base(result["tensors"], str(model.folder))
    refuse_endless(result["endless"], model.folder)
    theirs = result["lengths"]
    differences = []
    for quantity, name, index in (
        ("have a different length", "tokens", 0),
        ("train other tokens", "trained_tokens", 2),
    ):
        both = [(row, getattr(row, name), counts[index]) for row, counts in zip(ours, theirs, strict=True)]
        if differ := [(row, own, tokens) for row, own, tokens in both if own != tokens]:
            named = ", ".join(f"{row.id} ({own}, ms-swift {tokens})" for row, own, tokens in differ[:NAMED])
            differences.append(
                f"{len(differ)} of {len(ours)} checked rows {quantity} in ms-swift's own template: {named}"
            )
    first = result["template"] or ({} if differences else result["other_text"])
    difference = accepted_difference(first, model.folder, text_args, template_differs)
    example = msgspec.convert(result["example"], list[ShownText])
    described = msgspec.convert(result["tensors"].get("model"), Description | None)
    return Comparison(
        "; ".join(differences) or None, difference, result["one_sequence"], result["by_size"], example, described
    )
