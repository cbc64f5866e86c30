"""The common raw forms of conversations, each read into one ShareGPT row.

    sharegpt, volcano    {"conversations": [{"from": "human", "value": …}, {"from": "gpt", …}, …]}
    alpaca               {"instruction": …, "input": …, "output": …}
    messages             {"messages": [{"role": "user", "content": …}, {"role": "assistant", …}, …]}
    prompt_completion    {"prompt": …, "completion": …}
    text                 {"text": …}

Each may hold `image` (a path) or `images` (a list of one path), and `source`. The first is LLaVA's own, which
Volcano's rows have too (https://huggingface.co/datasets/kaist-ai/volcano-train).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from vlmflow.config.data_settings import read_names
from vlmflow.config.key_meanings import meanings_of
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.choice import OF_ANOTHER_MODALITY, pictures_of, source_of
from vlmflow.raw.json_file import JsonRows
from vlmflow.raw.split import RawRows
from vlmflow.raw.table_file import TEXT
from vlmflow.rows.convert import ConvertedRow, MakeRows
from vlmflow.rows.raw_text import clean
from vlmflow.rows.rejects import Reject
from vlmflow.rows.sharegpt import FIRST_LINE, IMAGE_TAG, Turn, wrong_order
from vlmflow.rows.unread import Unread

ANY_FORM = {"image": str | None, "images": list[str] | None, "source": Any}
"""Keys that every form may have."""


class From(msgspec.Struct, gc=False):
    """A turn of the ShareGPT form."""

    speaker: str = msgspec.field(name="from")
    text: str = msgspec.field(name="value")


class Message(msgspec.Struct, gc=False):
    """A turn of the messages form."""

    speaker: str = msgspec.field(name="role")
    text: str = msgspec.field(name="content")


TURNS = {"conversations": From, "messages": Message}
"""The turns that a key holds."""

SPEAKERS = {
    "conversations": {"human": "human", "gpt": "gpt", "system": "system"},
    "messages": {"user": "human", "assistant": "gpt", "system": "system"},
}
"""Who speaks, by the key that holds the turns; a closed set."""

FORMS: dict[str, dict[str, Any]] = {
    "volcano": {"conversations": list[From]},
    "sharegpt": {"conversations": list[From]},
    "messages": {"messages": list[Message]},
    "alpaca": {"instruction": str, "output": str, "input": str | None},
    "prompt_completion": {"prompt": str, "completion": str},
    "text": {"text": str},
}
"""By kind the keys of a raw row, with what they hold; one that may be null may be missing too."""


def form_rows(
    kind: str,
    modality: str,
    columns: Mapping[str, str],
    prompt: str | None,
    system_prompt: str | None,
    ignore_keys: Sequence[str] = (),
) -> MakeRows:
    """Give the function that makes the training row of one raw row.

    kind: a key of FORMS. modality: "image" or "text"; rows of the other sort are left out.
    columns: what the form's keys are called in the file. prompt: what the human says before a text (kind text).
    system_prompt: begins a conversation that has no system turn.
    ignore_keys: keys that change what a row means, and are to be left unread (see `key_meanings`).
    """
    names = read_names(kind, columns)
    raw_type = sound_type = _raw_type(FORMS[kind], names)
    if "conversations" in FORMS[kind]:
        # Sound turns are decoded into what they become; whatever is wrong with others, the general form finds out.
        sound_type = _raw_type({"conversations": list[Turn]}, names)
    decode = msgspec.json.Decoder(raw_type).decode
    parts = {names[key]: turn for key, turn in TURNS.items() if key in FORMS[kind]}
    unread = Unread((sound_type, raw_type), parts, meanings_of(kind, names), ignore_keys)
    read_turns = _turns_of(kind, prompt)
    wants_picture = modality == "image"
    left_out = Reject(OF_ANOTHER_MODALITY[modality], "")
    system = [] if system_prompt is None else [Turn("system", system_prompt)]

    def make(identity: str, number: int, row: bytes) -> list[ConvertedRow] | Reject:
        try:
            shape = unread.shape
            try:
                raw = shape.decode(row)
            except (msgspec.ValidationError, UnicodeDecodeError):  # it cannot name a key that is no UTF-8
                shape = None
                raw = decode(row)
        except msgspec.ValidationError as error:
            return Reject("bad_shape", str(error))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return Reject("bad_json", str(error))
        images = pictures_of(raw.image, raw.images)
        if bool(images) != wants_picture:
            return left_out
        if len(images) > 1:
            return Reject("several_pictures", f"{len(images)} pictures; one is allowed")
        turns = read_turns(raw)
        if type(turns) is Reject:
            return turns
        first = 1 if turns[0].speaker == "system" else 0
        answerless = len(turns) - first > 1 and turns[-1].speaker == "human"
        if answerless:
            turns.pop()  # what nobody answers teaches nothing
        answers = (len(turns) - first) // 2
        if not answers:
            return wrong_order(turns, first)
        if images:
            question = clean(turns[first].value.replace(IMAGE_TAG, ""))
            if not question:
                return Reject("empty_turn", f"turn {first} holds no text")
            turns[first].value = FIRST_LINE + question
        if answerless:
            unread.last_turn()
        if shape is None:
            unread.count(number, row)
        else:
            shape.rows += 1
        return [
            ConvertedRow(
                identity,
                source_of(raw.source, images),
                images,
                list(range(1, 1 + answers)),
                [],
                turns if first else system + turns,
                number,
                False,
            )
        ]

    return MakeRows(make, unread)


def refuse_columns(rows: RawRows, kind: str, modality: str, columns: Mapping[str, str]) -> None:
    """Refuse a table whose columns are not what rows of a kind need, before its rows are rejected one by one.

    Raises VlmflowError with the column, what it holds, and what to do.
    """
    for file in rows.files:
        if file.columns is not None:
            _refuse_columns(file, kind, modality, read_names(kind, columns))


def _refuse_columns(rows: JsonRows, kind: str, modality: str, names: Mapping[str, str]) -> None:
    wanted = [key for key, holds in FORMS[kind].items() if holds != str | None]
    if modality == "image" and not any(names.get(key) in rows.columns for key in ("image", "images")):
        wanted.append("image" if "image" in names else "images")
    for key in wanted:
        if names[key] not in rows.columns:
            raise VlmflowError(
                f"{rows.path}: there is no column {names[key]!r}; there are {', '.join(rows.columns)}",
                f"say which of them it is (datasets.NAME.columns: {{{key}: …}}), or choose another kind or modality",
            )
    for key, holds in (FORMS[kind] | ANY_FORM).items():
        name = names.get(key)
        empty_is_fine = key not in wanted and rows.columns.get(name) == "null"
        if name in rows.columns and holds is not Any and not empty_is_fine:
            _refuse_column(rows, key, name, is_text=holds in (str, str | None))


def _refuse_column(rows: JsonRows, key: str, name: str, is_text: bool) -> None:
    """Refuse a column that holds no texts, or no lists where they are wanted."""
    holds = rows.columns[name]
    if holds == TEXT if is_text else "list" in holds.partition("<")[0]:
        return
    if is_text:
        what = "text"
        advice = "name another column, or write this one as text; pictures are files, named by their paths"
    elif key == "images":
        what = "list of paths"
        advice = f"where each is one path, say columns: {{image: {name}}}; or name another column"
    else:
        what = "list of turns"
        advice = "write the rows as JSON lines, or as parquet with lists there; or name another column"
    raise VlmflowError(
        f"{rows.path}: column {name!r} holds {holds}, which is no {what}", f"{advice} (datasets.NAME.columns)"
    )


def _raw_type(form: dict[str, Any], names: Mapping[str, str]) -> type[msgspec.Struct]:
    """Give the type of a raw row, its keys called as they are in the file; a key that is not read is None."""
    typed = [
        (key, holds, None) if key in ANY_FORM or holds == str | None else (key, holds)
        for key, holds in (form | ANY_FORM).items()
        if key in names
    ]
    absent = dict.fromkeys(ANY_FORM.keys() - names.keys())
    return msgspec.defstruct("RawRow", typed, rename=dict(names), namespace=absent, gc=False)


def _turns_of(kind: str, prompt: str | None) -> Callable[[Any], list[Turn] | Reject]:
    """Give the function that takes a raw row of a kind to its turns, cleaned; at least one."""
    match kind:
        case "volcano" | "sharegpt":
            return lambda raw: _spoken("conversations", raw.conversations)
        case "messages":
            return lambda raw: _spoken("messages", raw.messages)
        case "alpaca":  # put together as ms-swift does (AlpacaPreprocessor.concat_inst_input)
            return lambda raw: _two("instruction", "\n".join(filter(None, (raw.instruction, raw.input))), raw.output)
        case "prompt_completion":
            return lambda raw: _two("prompt", raw.prompt, raw.completion)
        case _:
            return lambda raw: _two("prompt", prompt or "", raw.text)


def _spoken(key: str, turns: list[From] | list[Message] | list[Turn]) -> list[Turn] | Reject:
    if not turns:
        return Reject("unbalanced_turns", f"{key} holds no turns")
    if type(turns[0]) is Turn:
        for turn in turns:
            text = turn.value.strip()
            if text is not turn.value or "\r" in text:
                turn.value = text = clean(text)
                if not text:
                    return Reject("empty_turn", f"{key}[{turns.index(turn)}] holds no text")
        return turns
    known = SPEAKERS[key]
    made = []
    for number, turn in enumerate(turns):
        speaker = known.get(turn.speaker)
        if speaker is None:
            return Reject("wrong_role", f"{key}[{number}]: {turn.speaker[:40]!r} is none of {', '.join(known)}")
        text = clean(turn.text)
        if not text:
            return Reject("empty_turn", f"{key}[{number}] holds no text")
        made.append(Turn(speaker, text))
    return made


def _two(what: str, question: str, answer: str) -> list[Turn] | Reject:
    question, answer = clean(question), clean(answer)
    if not question or not answer:
        return Reject("empty_turn", f"the {'answer' if question else what} holds no text")
    return [Turn("human", question), Turn("gpt", answer)]
