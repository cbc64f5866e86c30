"""Converts raw rows of every form to ShareGPT rows.

Unless its form is `fixed`, a raw row may also have `image` or `images`, each one picture or a list, in any letter case,
and `source`.
"""

from typing import Any, get_args

import msgspec

from vlmflow.config.data_settings import DatasetSettings
from vlmflow.config.raw_forms import PREFERENCE, RawForm, form_of, picture_keys
from vlmflow.config.settings import PartOf, Take
from vlmflow.raw.choice import OF_ANOTHER_MODALITY
from vlmflow.raw.named import pictures_of, raw_type, source_of
from vlmflow.raw.rewritten import key_fault, rewriter, with_own_keys
from vlmflow.rows.chat import (
    ASSISTANT,
    FIRST_LINE,
    LEFT_OUT,
    SPEAKERS,
    THOUGHT,
    Reject,
    Turn,
    dialogue_start,
    from_system,
    tags_in,
    thought_first,
    times_answered,
    wrong_order,
)
from vlmflow.rows.convert import ConvertedRow, HowToConvert, MakeRows, RowsOf
from vlmflow.rows.raw_text import JOINED, NO_RULE, THOUGHTS, UNTRAINED_END, cleaned, untagged
from vlmflow.rows.sharegpt import wrong_number_of_tags
from vlmflow.rows.unread import Shape, Unread


def form_rows(kind: str, settings: PartOf[DatasetSettings], take: Take = None, frames: int | None = None) -> MakeRows:
    """Return the converter of raw rows of one kind.

    kind: that of the rows, if the settings leave it open. settings: see `HowToConvert`.
    take, frames: see `raw/rewritten`.
    """
    form, columns, ignore_keys = form_of(kind), settings.columns, settings.ignore_keys
    if take == "chosen":
        ignore_keys = [
            *ignore_keys,
            *(key for key, meaning in form.meanings.items() if meaning is PREFERENCE and key != "chosen"),
        ]
    names = form.names(columns, ignore_keys)
    pictures = picture_keys(names)
    held_type = fast_type = raw_type(form.all_keys, names)
    if form.fast_types:  # a row that does not fit is decoded as held_type, whose errors say what is wrong
        fast_type = raw_type({**form.all_keys, **form.fast_types}, names)
    decode = msgspec.json.Decoder(held_type).decode
    nested = {names[key]: made for key, holds in form.keys.items() if (made := _object_in(holds))}
    assistants = [speaker for speaker, role in form.speakers.items() if role == "gpt"]
    unread = Unread((fast_type, held_type), nested, form.meanings_of(columns), ignore_keys, assistants)
    how = HowToConvert(unread, settings, from_system(settings.system_prompt))
    rewritten = rewriter(form, names | columns, take, frames)
    rewrites_all = take == "chosen" or frames is not None
    turns = names[form.turns] if form.turns else ""
    rows_of: RowsOf = form.rows(how) if form.rows else _one_conversation(form, how, turns, kind in form.moves_tags)

    def make(identity: str, number: int, row: bytes) -> list[ConvertedRow] | Reject:
        try:
            shape: Shape | None
            if rewrites_all and (again := rewritten(row)) is not row:
                fault = key_fault(row, pictures)
                return Reject("duplicate_key", fault) if fault else make(identity, number, again)
            shape = unread.shape
            try:
                raw = shape.decode(row)
            # Its error names the unknown key, and a key that is not UTF-8 makes that a UnicodeDecodeError; it also
            # decodes unread values, in which a text may be no Unicode.
            except (msgspec.DecodeError, UnicodeDecodeError):
                shape = None
                if fault := key_fault(row, pictures):
                    return rejected(number, row, "duplicate_key", fault)
                if (again := rewritten(row)) is not row:
                    return make(identity, number, again)
                row = with_own_keys(row, pictures)
                raw = decode(row)
        except msgspec.ValidationError as error:
            return rejected(number, row, "bad_shape", str(error))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return rejected(number, row, "bad_json", str(error))
        made = rows_of(identity, number, raw, len(row))
        if type(made) is Reject:
            return made if made.reason in LEFT_OUT else rejected(number, row, made.reason, made.detail)
        if shape is None:
            unread.count(number, row)
        else:
            shape.rows += 1
        return made

    def rejected(number: int, row: bytes, reason: str, detail: str) -> Reject:
        unread.unusable(number, row)
        return Reject(reason, detail)

    return MakeRows(make, unread)


def _one_conversation(form: RawForm, how: HowToConvert, holder: str, moves_tag: bool) -> RowsOf:
    """Return the converter of a form with a function `read`.

    holder: the name of the turns' key in the file, if there is one. moves_tag: see `RawForm.moves_tags`.
    """
    assert form.read is not None, "a form has `rows` or `read`"
    read, system, unread = form.read, how.system, how.unread
    prompt, modality = how.settings.prompt, how.settings.modality

    def rows_of(identity: str, number: int, raw: Any, size: int) -> list[ConvertedRow] | Reject:
        try:
            images, reading = pictures_of(raw.image, raw.images), read(raw, prompt)
        except ValueError as error:
            return Reject("bad_picture", str(error))
        if form.pictures_in_turns:
            if type(reading) is Reject:
                return reading
            if images and reading.pictures:
                return Reject("bad_shape", "pictures are named in the turns and beside them")
            images = images or list(reading.pictures)
        if modality and bool(images) != (modality == "image"):
            return Reject(OF_ANOTHER_MODALITY[modality], "")
        if type(reading) is Reject:
            return reading
        turns = reading.turns
        texts, changes = cleaned([turn.value for turn in turns])
        if "" in texts:  # an empty system turn says nothing, as an empty system prompt beside the turns
            held = [number for number, turn in enumerate(turns) if texts[number] or turn.speaker != "system"]
            empty = next((number for number in held or [0] if not texts[number]), None)
            if empty is not None:
                return Reject("empty_turn", f"turn {empty} holds no text")
            turns, texts = [turns[number] for number in held], [texts[number] for number in held]
        if changes:
            for turn, text in zip(turns, texts, strict=True):
                turn.value = text
        if THOUGHT in "".join(texts):
            changes |= _thoughts_first(turns)
        first = dialogue_start(turns)
        end = len(turns)
        answers = (end - first) // 2
        if not answers or [turn.speaker for turn in turns[first:]] != SPEAKERS * answers:
            turns, joined = _joined(turns)
            changes |= joined
            end = len(turns)
            while end > first + 1 and turns[end - 1].speaker not in ASSISTANT:
                end -= 1  # nothing can be learned from a question without an answer
            answers = times_answered(turns[:end])
            if (not answers or turns[first].speaker != "human") and (fault := wrong_order(turns[:end])):
                return fault
        answered = end == len(turns)
        if isinstance(turns[0], Turn) and False in [turn.loss for turn in turns]:
            end = _mark_trained(turns, end)
            if not end:
                return Reject("nothing_trained", "loss is false in every answer")
            if answered and end < len(turns):
                changes |= UNTRAINED_END
            answers = times_answered(turns[:end])
        if images:
            placed = (_moved if moves_tag and len(images) == 1 else _in_place)(turns, first, len(images))
            if isinstance(placed, Reject):
                return placed
            if placed:
                changes |= placed
        if end < len(turns):
            images = images[: len(images) - tags_in(turns[end:])]
            del turns[end:]
        if not answered:
            unread.account.last_turns += 1
        if changes:
            unread.changed(changes)
        if reading.unread:
            unread.in_turns(number, holder, reading.unread)
        return [
            ConvertedRow(
                identity,
                source_of(reading.source or raw.source, images),
                images,
                list(range(1, 1 + answers)),
                [],
                turns if first else system + turns,
                reading.tools,
                raw_row=number,
                score_field_differs=False,
            )
        ]

    return rows_of


def _thoughts_first(turns: list[Turn]) -> frozenset[str]:
    """Write the reasoning at the beginning of answers as chat templates do; returns the rule, if it changed any."""
    rule = NO_RULE
    for turn in turns:
        if turn.speaker == "gpt" and (text := thought_first(turn.value)) != turn.value:
            turn.value, rule = text, THOUGHTS
    return rule


def _joined(turns: list[Turn]) -> tuple[list[Turn], frozenset[str]]:
    """Join turns in a row of human, and those of gpt that are trained alike; returns the rule, if there were any."""
    made: list[Turn] = []
    for turn in turns:
        before = made[-1] if made else None
        if (
            before is not None
            and turn.speaker == before.speaker
            and turn.speaker in SPEAKERS
            and turn.loss is before.loss
        ):
            before.value += f"\n{turn.value}"
        else:
            made.append(turn)
    return made, JOINED if len(made) < len(turns) else NO_RULE


def _mark_trained(turns: list[Turn], end: int) -> int:
    """Say of every answer whether it is trained, if one is not; returns where the turns after the last trained begin.

    In a causal model these turns would teach nothing. turns: of those that are not trained, `loss` is false. end: where
    the turns without an answer begin.
    """
    while end and (turns[end - 1].speaker not in ASSISTANT or turns[end - 1].loss is False):
        end -= 1
    if any(turn.loss is False for turn in turns[:end]):
        for turn in turns[:end]:
            if turn.speaker in ASSISTANT:
                turn.loss = turn.loss is not False
    return end


def _moved(turns: list[Turn], first: int, pictures: int) -> frozenset[str] | Reject:
    """Move the tag of the one picture before the first question; returns the rule that changed it."""
    question, moved = untagged(turns[first].value)
    if not question:
        return Reject("empty_turn", f"turn {first} holds no text")
    turns[first].value = FIRST_LINE + question
    return moved


def _in_place(turns: list[Turn], first: int, pictures: int) -> frozenset[str] | Reject:
    """Leave the tags where they are; without any, put them before the first question."""
    if pictures == 1 and turns[first].value.startswith(FIRST_LINE):  # nearly all rows; the check sees any other tag
        return NO_RULE
    if tags := tags_in(turns):
        return wrong_number_of_tags(tags, pictures) or NO_RULE
    turns[first].value = FIRST_LINE * pictures + turns[first].value
    return NO_RULE


def _object_in(holds: Any) -> type[msgspec.Struct] | None:
    """Return the type of the objects that a key of this type holds, one or a list of them; None if it holds none."""
    kind = get_args(holds)[0] if get_args(holds) else holds
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None
