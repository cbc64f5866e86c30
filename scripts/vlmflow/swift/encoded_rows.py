"""Rows as ms-swift encodes them for the training; runs in a process of its own, whose environment it needs.

    python -m vlmflow.swift.encoded_rows check ROWS GIVEN FOUND --model FOLDER …
    python -m vlmflow.swift.encoded_rows inputs ROWS INPUTS --model FOLDER …

ROWS: JSON lines of ShareGPT rows. ms-swift's own arguments of model and template come last. The picture store and the
picture budget come from the environment, as for training (`child_process.environment`).

`check` reads GIVEN, a JSON object: "tensors", the names of those in the model's files, or null; "files", those of all
rows, and the "form" of their texts (`chat_form.ChatForm`). It writes FOUND, a JSON object. Its "lengths" are the counts
of each of ROWS (`row_counter`), "by_size" is whether the sizes of pictures give the same; "example" is the shortest row
as the model reads it (`shown_row`); "template" is how the model's own chat template differs in ROWS, "other_text" how
it differs from the form in all rows (`served_rows`); "endless" is an answer at whose end the model would not stop
(`first_endless`); "tensors" is how those names differ from those that the model's configuration needs
(`meta_model.compare_tensors`); "one_sequence" is whether several rows may stand in one sequence. `inputs` writes
INPUTS, the rows as tensors (`row_attention.row_tensors`).
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from vlmflow.core.processes import die_with_parent
from vlmflow.fetch.chat_templates import stops_of
from vlmflow.rows.chat import IMAGE_TAG
from vlmflow.rows.sharegpt import ShareGptRow, lines_of
from vlmflow.swift.chat_form import ChatForm
from vlmflow.swift.child_process import quick_imports
from vlmflow.swift.own_template import own_template
from vlmflow.swift.row_counter import IGNORED, RowCounter
from vlmflow.swift.served_rows import first_difference, first_other_text, picture_token

CHECK, INPUTS = "check", "inputs"

MOST_CHARS = 20_000
"""Characters of a row that are shown."""


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
        given, result = map(Path, files)
        result.write_text(json.dumps(_checked(template, Path(rows), dataset, **json.loads(given.read_text()))))
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


def _checked(
    template: Any, rows: Path, dataset: Any, tensors: list[str] | None, files: list[str], form: dict[str, Any]
) -> dict[str, Any]:
    """Return what `check` writes. tensors, files, form: as it reads them."""
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
    compared = {} if tensors is None else compare_tensors(folder, tensors)
    labels = [row["labels"] for row in encoded]
    if "model" in compared:
        compared["model"] |= {
            "special": list(template.tokenizer.all_special_tokens),
            "pictures": type(getattr(template.processor, "image_processor", "")).__name__.removeprefix("str"),
        }
    difference = first_difference(template.processor, read, tokens)
    other = {} if difference else first_other_text(template.processor, map(Path, files), ChatForm(**form))
    return {
        "lengths": lengths,
        "by_size": by_size,
        "example": shown_row(template.processor, read[shortest], tokens[shortest], labels[shortest]),
        "template": difference,
        "other_text": other,
        "endless": first_endless(template.tokenizer, read, labels, stops_of(folder)),
        "tensors": compared,
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

    labels: of each row's tokens. stops: those tokens. {} if there is none; otherwise "row", and as a text the "end"
    that is trained: the last token that is not white space.
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


if __name__ == "__main__":
    main()
