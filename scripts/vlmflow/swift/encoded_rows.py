"""Rows as ms-swift encodes them for the training; runs in a process of its own, whose environment it needs.

    python -m vlmflow.swift.encoded_rows check ROWS TENSORS FOUND --model FOLDER …
    python -m vlmflow.swift.encoded_rows inputs ROWS INPUTS --model FOLDER …

ROWS: JSON lines of ShareGPT rows. ms-swift's own arguments of model and template come last. The picture store and the
picture budget come from the environment, as for training (`child_process.environment`).

`check` writes FOUND, a JSON object. Its "lengths" are the counts of each row (`row_counter`), "by_size" is whether the
sizes of pictures give the same; "example" is the shortest row as the model reads it (`shown_row`); "template" is how
the model's own chat template differs (`first_difference`); "endless" is an answer at whose end the model would not stop
(`first_endless`); "tensors" is how the names in TENSORS, a JSON list or null,
differ from those that the model's configuration needs (`meta_model.compare_tensors`); "one_sequence" is whether several
rows may stand in one sequence. `inputs` writes INPUTS, the rows as tensors (`row_attention.row_tensors`).
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from vlmflow.core.processes import die_with_parent
from vlmflow.fetch.chat_templates import stops_of
from vlmflow.rows.chat import IMAGE_TAG, as_written, declarations_of, messages_of, places_answered
from vlmflow.rows.sharegpt import ShareGptRow, lines_of
from vlmflow.swift.child_process import failure, limited, quick_imports
from vlmflow.swift.own_template import clock_at, own_template
from vlmflow.swift.row_counter import IGNORED, SMALL, RowCounter, picture_token

CHECK, INPUTS = "check", "inputs"

MOST_CHARS = 20_000
"""Characters of a row that are shown."""

DAYS = (datetime(2001, 2, 3, 4, 5), datetime(2034, 11, 28, 17, 6))
"""When the rows are rendered: a template may write the date, and the training keeps that of its own day."""

SHOWN = 12
"""Tokens that are shown of a difference, and before it."""


class NoToolsError(Exception):
    """A chat template writes no tools."""


def main() -> None:
    """Encode the rows as training would: pictures are read and scaled, chat marks added."""
    die_with_parent(os.getppid())
    task, rows, *words = sys.argv[1:]
    files, words = (words[:2], words[2:]) if task == CHECK else (words[:1], words[1:])
    with quick_imports():
        template = own_template(words)
        from swift.dataset import load_dataset

    dataset, _ = load_dataset([rows], strict=True)
    if task == CHECK:
        names, result = map(Path, files)
        result.write_text(json.dumps(_checked(template, Path(rows), dataset, json.loads(names.read_text()))))
    else:
        _write_inputs(template, dataset, Path(files[0]))


def _write_inputs(template: Any, dataset: Any, file: Path) -> None:
    with quick_imports():
        from safetensors.torch import save_file

        from vlmflow.swift.meta_model import meta_model
        from vlmflow.swift.row_attention import row_tensors

    template.model = meta_model(Path(template.model_info.model_dir))  # Qwen-VL's asks it for the positions of pictures
    tensors: dict[str, Any] = {}
    for number, row in enumerate(dataset):
        tensors |= row_tensors(number, template.data_collator([template.encode(row)]))
    save_file(tensors, file)


def _checked(template: Any, rows: Path, dataset: Any, names: list[str] | None) -> dict[str, Any]:
    """Return what `check` writes. names: of the model's tensors."""
    with quick_imports():
        from vlmflow.swift.meta_model import compare_tensors
        from vlmflow.swift.row_attention import joins_rows

    counter = RowCounter(template, whole=True)
    encoded = list(map(template.encode, dataset))
    lengths = list(map(counter.encoded, encoded))
    by_size = lengths == list(map(RowCounter(template, whole=False).count, dataset))
    tokens = [list(row["input_ids"]) for row in encoded]
    read = list(lines_of(rows, ShareGptRow))
    shortest = min(range(len(read)), key=lambda number: len(tokens[number]))
    folder = Path(template.model_info.model_dir)
    tensors = {} if names is None else compare_tensors(folder, names)
    labels = [row["labels"] for row in encoded]
    if "model" in tensors:
        tensors["model"] |= {
            "special": list(template.tokenizer.all_special_tokens),
            "pictures": type(getattr(template.processor, "image_processor", "")).__name__.removeprefix("str"),
        }
    return {
        "lengths": lengths,
        "by_size": by_size,
        "example": shown_row(template.processor, read[shortest], tokens[shortest], labels[shortest]),
        "template": first_difference(template.processor, read, tokens),
        "endless": first_endless(template.tokenizer, read, labels, stops_of(folder)),
        "tensors": tensors,
        "one_sequence": joins_rows(template),
    }


def shown_row(processor: Any, row: ShareGptRow, ids: Sequence[int], labels: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row's text in parts: "text", whether it is "trained", and whether the template has "added" it.

    processor: the model's, or its tokenizer. ids, labels: the row's tokens in the training. A picture is one token.
    """
    tokenizer, picture = getattr(processor, "tokenizer", processor), picture_token(processor)
    both = [(token, label != IGNORED) for token, label in zip(ids, labels, strict=True)]
    alone = [pair for last, pair in zip([None, *ids], both, strict=False) if pair[0] != picture or last != picture]
    own = [text for turn in row.conversations for text in turn.value.split(IMAGE_TAG) if text.strip()]
    parts, left = [], MOST_CHARS
    for trained, pairs in groupby(alone, key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in pairs])[:left]
        left -= len(text)
        parts += [{"text": part, "trained": trained, "added": added} for part, added in _by_whom(text, own) if part]
    return parts


def first_endless(
    tokenizer: Any, rows: Sequence[ShareGptRow], labels: Sequence[Sequence[int]], stops: Sequence[int]
) -> dict[str, Any]:
    """Return the first row whose last answer is trained and does not end with a token at which the model stops.

    labels: of each row's tokens. stops: those tokens. {} if there is none; otherwise "row", and as a text the "end" that
    is trained: the last token that is not white space.
    """
    for row, each in zip(rows, labels, strict=True):
        trained = [list(run) for given, run in groupby(each, key=lambda label: label != IGNORED) if given]
        if row.conversations[-1].loss is not False and not set(trained[-1]) & set(stops):
            texts = map(tokenizer.decode, reversed(trained[-1]))
            return {"row": row.id, "end": next((text for text in texts if text.strip()), "")}
    return {}


def _by_whom(text: str, own: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text, and whether the template has added each. own: the row's texts, less those found."""
    while own and (at := text.find(own[0].strip())) >= 0:
        written = own.pop(0).strip()
        yield text[:at], True
        yield written, False
        text = text[at + len(written) :]
    yield text, True


def first_difference(processor: Any, rows: Sequence[ShareGptRow], trained: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compare rows as they are trained with what a server gives to the model, by the model's own chat template.

    processor: the model's processor, or its tokenizer if it sees no pictures. trained: the tokens of each row in the
    training. A picture is one token or more in them. The template is its owner's text: it renders in a child process,
    with limits of memory and time.

    Returns {} if all are equal. {"failed": …, "row": …}: the template raised an error. {"failed": …}: it went beyond a
    limit. {"no_tools": True, "row": …}: it writes none of a row's tools. Otherwise the first difference: "row"; the
    texts "before" it, "trained" and "served"; "day", on which it is rendered, if the template writes the date.
    """
    import transformers.utils.chat_template_utils  # noqa: F401  # the child finds it loaded

    return limited(partial(_compare, processor, rows, trained, _picture(processor)))


def _picture(processor: Any) -> tuple[int | None, list[int]]:
    """Return the token that a chat template writes for a picture, and what the processor makes of it.

    None without pictures, and for a processor that writes a picture otherwise.
    """
    from PIL import Image

    mark = getattr(processor, "image_token", None)
    if isinstance(mark, str):
        blank = Image.new("RGB", SMALL)
        with suppress(Exception):  # whatever a processor asks of a text
            made = processor(text=[mark], images=[blank], add_special_tokens=False)["input_ids"][0]
            ids = processor.tokenizer(mark, add_special_tokens=False)["input_ids"]
            if len(ids) == 1:
                return ids[0], list(map(int, made))
    return None, []


def _compare(
    processor: Any,
    rows: Sequence[ShareGptRow],
    trained: Sequence[Sequence[int]],
    picture_of: tuple[int | None, list[int]],
) -> dict[str, Any]:
    tokenizer = getattr(processor, "tokenizer", processor)
    picture = picture_token(processor)
    mark, made = picture_of
    for row, ids in zip(rows, trained, strict=True):
        try:
            by_day = [_served(processor, tokenizer, row, day) for day in DAYS]
        except NoToolsError:
            return {"row": row.id, "no_tools": True}
        except Exception as error:  # whatever the template does
            return {"row": row.id, **failure(error)}
        expected = _pictures_as_one(ids, picture)
        for day, prompts in zip(DAYS, by_day, strict=True):
            for prompt in prompts:
                served = [token for read in prompt for token in (made if read == mark else [read])]
                served = _pictures_as_one(served, picture)
                if expected[: len(served)] != served:
                    shown = _shown(tokenizer, expected, served)
                    return {"row": row.id, "day": None if by_day[0] == by_day[1] else f"{day:%Y-%m-%d}", **shown}
    return {}


def _served(processor: Any, tokenizer: Any, row: ShareGptRow, day: datetime) -> list[list[int]]:
    """Return for each answer of a row what the model has read when it has written it: the prompt, text and calls.

    Raises whatever the template raises, also for the whole conversation, which shows whether it writes tools.
    """
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = clock_at(day)  # only in this child

    def rendered(number: int, prompt: bool, tools: str) -> str:
        shown = row.until(number)
        messages = messages_of(shown.conversations, [{"type": "image"}] * len(shown.images))
        given = {"tools": declarations_of(tools), "add_generation_prompt": prompt}
        return str(processor.apply_chat_template(messages, tokenize=False, **given))

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    turns, tools = row.conversations, row.tools
    whole = rendered(len(turns), False, tools)
    if tools and whole == rendered(len(turns), False, ""):
        raise NoToolsError
    return [
        tokens(rendered(first, True, tools)) + tokens("\n".join(as_written(turns[first:end])))
        for first, end in places_answered(turns)
    ]


def _pictures_as_one(ids: Sequence[int], picture: int | None) -> list[int]:
    """Return tokens with a single one for each picture, as a template writes it."""
    return [token for last, token in zip([None, *ids], ids, strict=False) if token != picture or last != picture]


def _shown(tokenizer: Any, trained: Sequence[int], served: Sequence[int]) -> dict[str, str]:
    pairs = enumerate(zip(trained, served, strict=False))
    at = next((n for n, (own, other) in pairs if own != other), min(len(trained), len(served)))
    return {
        "before": tokenizer.decode(trained[max(0, at - SHOWN) : at]),
        "trained": tokenizer.decode(trained[at : at + SHOWN]),
        "served": tokenizer.decode(served[at : at + SHOWN]),
    }


if __name__ == "__main__":
    main()
