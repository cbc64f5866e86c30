"""What a model said, from a server or from this process.

Asks an OpenAI-compatible server for one answer; pictures travel as their stored bytes.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import msgspec

from vlmflow.core.child_programs import without_keys
from vlmflow.core.errors import PassingError, VlmflowError, printable
from vlmflow.fetch.transport import limit_answers
from vlmflow.pictures.decode import open_picture
from vlmflow.rows.chat import CALLS, Turn, as_written, declarations_of, json_text
from vlmflow.serving.server import LOOPBACK


@dataclass(frozen=True)
class Answer:
    """A model's answer. cut: it had not ended after the allowed tokens."""

    text: str
    cut: bool


SHOWN_OF_ERROR = 500
"""Characters of a server's own error message that ours repeats."""


class Client:
    """A connection to one model of a server.

    url: of the API, with /v1. model: the name that the server knows. key: for servers that ask for one.
    seconds: how long the server may be silent.
    """

    def __init__(self, url: str, model: str, key: str | None = None, seconds: float = 600) -> None:
        self._url = url
        self._model = model
        own = urlsplit(url).hostname == LOOPBACK  # the environment's proxy is not for this machine
        headers = {"Authorization": f"Bearer {key or 'none'}"}
        self._http = limit_answers(httpx.Client(headers=headers, timeout=seconds, trust_env=not own))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def answer(self, messages: Sequence[dict[str, Any]], most_tokens: int, tools: str = "") -> Answer:
        """Return the model's greedy answer to a dialogue of at most `most_tokens` tokens; calls as a model writes them.

        messages: as `messages_of` makes them, with pictures of `picture_part`. tools: as in a row.

        Raises PassingError if the server does not answer or is overloaded, VlmflowError if it refuses the request, or
        answers too much (`fetch.transport`).
        """
        request = {"messages": with_ids(messages)} | ({"tools": declarations_of(tools)} if tools else {})
        body = {"model": self._model, **request, "max_tokens": most_tokens, "temperature": 0}
        try:
            reply = self._http.post(f"{self._url.rstrip('/')}/chat/completions", json=body)
        except httpx.HTTPError as error:  # a timeout, too
            raise PassingError(
                f"{self._url}: no answer: {_shown(str(error) or type(error).__name__)}",
                "see whether the server runs, and its output",
            ) from None
        if (status := reply.status_code) != 200:
            passing = status >= 500 or status in (408, 429)
            raise (PassingError if passing else VlmflowError)(
                f"{self._url}: model {self._model!r}: HTTP {status}: {_shown(_text_of(reply))}",
                "read the server's output" if passing else "ask for a model that this server has, in its limits",
            )
        try:
            choice = msgspec.convert(json.loads(reply.content), _Reply).choices[0]
        except (ValueError, IndexError, RecursionError) as error:
            raise VlmflowError(
                f"{self._url}: its reply is not a chat completion: {_shown(f'{error}: {_text_of(reply)}')}",
                "name the address of an OpenAI-compatible API, with /v1",
            ) from None
        parts = [choice.message.content or "", *map(_written, choice.message.tool_calls or [])]
        text = "\n".join(filter(None, parts)).encode(errors="replace").decode()  # half a surrogate pair is no text
        return Answer(text, choice.finish_reason == "length")


def with_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form: calls have an id, and arguments as a text; responses the id of their call."""
    made: list[dict[str, Any]] = []
    waiting: list[str] = []
    for number, message in enumerate(messages):
        changes: dict[str, Any] = {}
        if message["role"] == "tool":
            changes["tool_call_id"] = waiting.pop(0)
        elif calls := message.get("tool_calls"):
            waiting = [f"call-{number}-{index}" for index in range(len(calls))]
            changes["tool_calls"] = [
                call
                | {"id": name, "function": call["function"] | {"arguments": json_text(call["function"]["arguments"])}}
                for name, call in zip(waiting, calls, strict=True)
            ]
        made.append(message | changes)
    return made


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, frozen=True):
    function: _Function


def _written(call: _Call) -> str:
    """Return a call as a model writes it: arguments may be no JSON, and servers write white space in their own way."""
    try:
        arguments = json_text(json.loads(call.function.arguments))
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    text = f'{{"name": {json_text(call.function.name)}, "arguments": {arguments}}}'
    return as_written([Turn(CALLS, text)])[0]


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message
    finish_reason: str | None = None


class _Reply(msgspec.Struct, frozen=True):
    """The used part of a chat completion."""

    choices: list[_Choice]


def _text_of(reply: httpx.Response) -> str:
    """Return a reply as UTF-8, whatever its headers call it."""
    return reply.content.decode(errors="replace")


def _shown(text: str) -> str:
    """Return the beginning of what a server or a library said, without keys and what could steer a terminal."""
    return printable(without_keys(text)[:SHOWN_OF_ERROR])


def picture_part(file: Path) -> dict[str, Any]:
    """Return the part of a message that holds a picture; raises VlmflowError as `data_uri` does."""
    return {"type": "image_url", "image_url": {"url": data_uri(file)}}


def data_uri(file: Path) -> str:
    """Return a picture's file as a data URI, with the bytes as they are.

    Raises VlmflowError if it cannot be read, or is not a picture.
    """
    try:
        with open_picture(file) as picture:
            kind = picture.get_format_mimetype()
        return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        raise VlmflowError(
            f"{file}: cannot be read as a picture: {error}", "name a picture, such as PNG or JPEG"
        ) from None
