"""Makes ids and turns from raw rows; the modules of all forms use this."""

from collections.abc import Mapping, Sequence
from typing import Protocol
from zlib import crc32

from vlmflow.rows.chat import PlainTurn, Speaker, Turn
from vlmflow.rows.rejects import Reject


class RawTurn(Protocol):
    """A turn of a raw row."""

    speaker: str
    text: str


def row_id(split: str, number: int, row: bytes) -> str:
    """Return a row's id: the split, the row's number from 0, and a checksum (CRC-32) of its raw bytes.

    The checksum differs if a file of the same name has another row there. SHA-256 would take a fifth of the time of the
    conversion.
    """
    return f"{split}-{number:07}-{crc32(row):08x}"


SINGLE_TURN = "-single"
"""The end of the id of a row that has only the question and the last good attempt of a trajectory."""


def clean(text: str) -> str:
    """Return a text with line feeds as its only line ends, and without white space at its beginning and end."""
    return (text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text).strip()


def spoken(
    key: str, turns: Sequence[RawTurn] | list[PlainTurn], speakers: Mapping[str, Speaker]
) -> list[Turn] | Reject:
    """Return the cleaned turns of a row, or why they cannot be used.

    key: the row's key of the turns, for messages. turns: raw ones, or all of them already PlainTurn; these are changed
    in place. speakers: the allowed speakers of the form, with their names in a conversation.
    """
    if not turns:
        return Reject("unbalanced_turns", f"{key} has no turns")
    if type(turns[0]) is PlainTurn:
        sound: list[Turn] = turns  # type: ignore[assignment]  # all turns have the type of the first
        for turn in sound:
            text = turn.value.strip()
            if text is not turn.value or "\r" in text:
                turn.value = text = clean(text)
                if not text:
                    return Reject("empty_turn", f"{key}[{sound.index(turn)}] holds no text")
        return sound
    made: list[Turn] = []
    raw: Sequence[RawTurn] = turns  # type: ignore[assignment]  # all turns have the type of the first
    for number, said in enumerate(raw):
        speaker = speakers.get(said.speaker)
        if speaker is None:
            return Reject("wrong_role", f"{key}[{number}]: {said.speaker[:40]!r} is none of {', '.join(speakers)}")
        text = clean(said.text)
        if not text:
            return Reject("empty_turn", f"{key}[{number}] holds no text")
        made.append(Turn(speaker, text))
    return made


def question_and_answer(key: str, question: str, answer: str) -> list[Turn] | Reject:
    """Return the two turns of a row with a single question. key: the row's key of the question, for messages."""
    question, answer = clean(question), clean(answer)
    if not question or not answer:
        return Reject("empty_turn", f"the {'answer' if question else key} holds no text")
    return [Turn("human", question), Turn("gpt", answer)]
