"""What raw rows of every form have in common: texts that become turns, and no identity of their own."""

from collections.abc import Mapping, Sequence
from typing import Protocol
from zlib import crc32

from vlmflow.rows.chat import Speaker, Turn
from vlmflow.rows.rejects import Reject


class RawTurn(Protocol):
    """A turn as a raw row has it."""

    speaker: str
    text: str


def row_id(split: str, number: int, row: bytes) -> str:
    """Make a row's identity: split, row number from 0, and a checksum (CRC-32) of the raw bytes.

    It shows where a file of the same name holds another row; a SHA-256 would take a fifth of the conversion's time.
    """
    return f"{split}-{number:07}-{crc32(row):08x}"


def clean(text: str) -> str:
    """Give a text with line feeds alone as line ends, and without white space around it."""
    return (text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text).strip()


def spoken(key: str, turns: Sequence[RawTurn] | list[Turn], speakers: Mapping[str, Speaker]) -> list[Turn] | Reject:
    """Give the turns that a row has under `key`, cleaned; sound ones may be decoded as Turn already.

    speakers: who may speak, with what each is in a conversation.
    """
    if not turns:
        return Reject("unbalanced_turns", f"{key} has no turns")
    if type(turns[0]) is Turn:
        sound: list[Turn] = turns  # type: ignore[assignment]  # all of them are what the first is
        for turn in sound:
            text = turn.value.strip()
            if text is not turn.value or "\r" in text:
                turn.value = text = clean(text)
                if not text:
                    return Reject("empty_turn", f"{key}[{sound.index(turn)}] holds no text")
        return sound
    made: list[Turn] = []
    raw: Sequence[RawTurn] = turns  # type: ignore[assignment]  # as above
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
    """Give the two turns of a row that asks once. key: holds the question."""
    question, answer = clean(question), clean(answer)
    if not question or not answer:
        return Reject("empty_turn", f"the {'answer' if question else key} holds no text")
    return [Turn("human", question), Turn("gpt", answer)]
