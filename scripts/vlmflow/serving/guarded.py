"""Serves one model with transformers to whoever has the key; pictures only as data. A program of its own.

A picture is read as those that are trained (`pictures/decode`): upright, white under alpha, levels of more than 8 bits
scaled, the first frame of an animation. The image `train` holds the library for it, for k8s/components/serve. The key
is in the environment variable VLMFLOW_ANSWER_KEY, so that no list of processes shows it.

`transformers serve` itself opens any address or file that a request names as a picture, loads any model, asks for no
key, and takes any Host, so that a web page can reach it through a name of its own (DNS rebinding). This program has its
handler of chat completions, and no other route but the list of models and the probe.
"""

import argparse
import base64
import io
import json
import os
import re
import secrets
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.middleware.trustedhost import TrustedHostMiddleware

from vlmflow.pictures.decode import AS_THEY_ARE, AT_USE, MAGIC, check_picture, plain_picture
from vlmflow.pictures.manifest import Unusable
from vlmflow.pictures.store import QUICK

KEY = "VLMFLOW_ANSWER_KEY"

KEYS = {
    *("model", "messages", "stream", "stream_options", "user", "metadata", "store", "tools"),
    *("max_tokens", "temperature", "top_p", "seed", "logit_bias"),
}
"""What a request may have: OpenAI's keys that are applied, or change no answer. Others would set the chat template, or
how the model generates."""

NEUTRAL: dict[str, Any] = {
    "n": 1,
    "stop": [],
    "response_format": {"type": "text"},
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logprobs": False,
    "top_logprobs": 0,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}
"""OpenAI's keys that transformers ignores or applies otherwise, with the value that asks for nothing, as null does."""

LARGEST_REQUEST = 64_000_000
"""Bytes of a request: some pictures in base64."""

PICTURE = re.compile(r"data:image/[\w.+-]+;base64,([A-Za-z0-9+/=]+)")

MARK = re.compile(r"<\|[^<>|\s]{1,40}\|>")
"""Special tokens of most models, in a text (`rows/sharegpt.SPECIAL_TOKEN`)."""

MOST_PIXELS = 200_000_000
"""Pixels of a request's pictures together: a small file can hold thousands of millions."""

SENT_ON = ("JPEG", "PNG")
"""Formats of pictures that go to the model as they are, if a store leaves them so: to write a photo again takes as long
as a short answer."""

OWN_NAMES = ("127.0.0.1", "localhost")

Handle = Callable[[dict[str, Any], str], Awaitable[Response]]
"""Answers a checked request; takes its body, and an id."""


def app_of(model: str, handle: Handle, key: str, names: tuple[str, ...] = ()) -> FastAPI:
    """Return the server's application.

    model: the name that requests give. key: what a request must have as its bearer token. names: of this host, besides
    localhost; a request to any other is refused.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*OWN_NAMES, *names], www_redirect=False)
    begun = int(time.time())

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    def models(request: Request) -> dict[str, Any]:
        _refuse_other_key(request, key)
        about = {"id": model, "object": "model", "created": begun, "owned_by": "vlmflow"}
        return {"object": "list", "data": [about]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        _refuse_other_key(request, key)
        body = await _body_of(request)
        await run_in_threadpool(_read_pictures, body)
        try:
            return await handle(body, str(uuid.uuid4()))
        # pydantic's own too: a value of another type than OpenAI's; and one so deep that nothing writes it. And a
        # processor's, for a text with its mark of a picture.
        except (TypeError, ValueError, RecursionError, IndexError, KeyError) as error:
            raise HTTPException(400, f"the request cannot be answered: {str(error)[:500]}") from None

    return app


def _refuse_other_key(request: Request, key: str) -> None:
    given = request.headers.get("authorization", "")
    if not secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
        raise HTTPException(401, "the request does not have this server's key: Authorization: Bearer KEY")


async def _body_of(request: Request) -> dict[str, Any]:
    content = bytearray()
    async for block in request.stream():
        content += block
        if len(content) > LARGEST_REQUEST:
            raise HTTPException(413, f"the request has more than {LARGEST_REQUEST:,} bytes")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request is no JSON") from None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise HTTPException(400, "the request is no chat: it has no list `messages`")
    if not body["messages"]:
        raise HTTPException(400, "the request is no chat: `messages` is empty")
    most = body.pop("max_completion_tokens", None)  # the present name of max_tokens
    if most is not None and body.setdefault("max_tokens", most) != most:
        raise HTTPException(400, "max_tokens and max_completion_tokens differ: leave one out")
    for key in NEUTRAL.keys() & body.keys():
        if (value := body.pop(key)) is not None and value != NEUTRAL[key]:
            raise HTTPException(400, f"this server does not apply {key}: leave it out")
    if others := sorted(body.keys() - KEYS):
        raise HTTPException(400, f"this server does not take {', '.join(others)[:200]}")
    return body


def _read_pictures(body: dict[str, Any]) -> None:
    """Put each picture of a request in the form in which it is trained: as it is if a store leaves it so, or as PNG.

    Raises HTTPException unless every part of a message is a text, or a picture that is in the request itself.
    """
    pixels = 0
    for number, message in enumerate(body["messages"], 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise HTTPException(400, f"message {number}: it has no role")
        match message:
            case {"content": list(parts)}:
                for part in parts:
                    pixels += _read_part(part, number, MOST_PIXELS - pixels)
            case {"content": str(text)}:
                _refuse_marks(text, number)
            case {"content": None} | {"tool_calls": list()}:
                pass
            case _:
                raise HTTPException(400, f"message {number}: its content is neither a text nor a list of parts")


def _refuse_marks(text: str, number: int) -> None:
    """Raise HTTPException for a text that would begin or end a turn, or stand for a picture: no trained row has it."""
    if match := MARK.search(text):
        raise HTTPException(400, f"message {number}: its text holds {match[0]}, a mark of the chat template")


def _read_part(part: Any, number: int, most: int) -> int:
    """Return the pixels of a part's picture, which then is as trainers see it; 0 for a text.

    most: pixels that it may have. Raises HTTPException for more, for a picture that cannot be read, and for other
    parts.
    """
    match part:
        case {"type": "text", "text": str(text)}:
            _refuse_marks(text, number)
            return 0
        case {"type": "image_url", "image_url": {"url": str(url)} as image} if match := PICTURE.fullmatch(url):
            try:
                content = base64.b64decode(match[1])
            except ValueError as error:
                raise HTTPException(400, f"a picture cannot be read: {error}") from None
            if not any(MAGIC[name].match(content) for name in AS_THEY_ARE):
                raise HTTPException(400, f"a picture cannot be read: it is none of {', '.join(AS_THEY_ARE)}")
            checked = check_picture(content, AT_USE)
            if isinstance(checked, Unusable):
                raise HTTPException(400, f"a picture cannot be read: {checked.reason}: {checked.detail}")
            picture, _ = checked
            if (pixels := picture.width * picture.height) > most:
                raise HTTPException(413, f"the pictures have more than {MOST_PIXELS:,} pixels")
            if picture.format not in SENT_ON or picture.rewritten or picture.first_frame:
                image["url"] = f"data:image/png;base64,{base64.b64encode(_as_png(content)).decode()}"
            return pixels
    raise HTTPException(
        400,
        f"message {number}: only texts, and pictures in the request itself: "
        '{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}',
    )


def _as_png(content: bytes) -> bytes:
    png, picture = io.BytesIO(), plain_picture(content, AT_USE)
    assert not isinstance(picture, Unusable), "check_picture has read it"
    picture.save(png, "PNG", compress_level=QUICK)
    return png.getvalue()


def with_texts(read: Callable[..., list[dict[str, Any]]]) -> Callable[..., list[dict[str, Any]]]:
    """Return transformers' reader of messages (5, `get_processor_inputs_from_messages`), which keeps all texts.

    It leaves out what a message says before its calls, so the model would read another dialogue.
    """

    def reader(messages: list[dict[str, Any]], *others: Any) -> list[dict[str, Any]]:
        texts = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        pairs = zip(read(messages, *others), read(texts, *others), strict=True)
        return [{**made, "content": text["content"]} for made, text in pairs]

    return reader


def with_unreadable(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' reader of what a model wrote (5, `parse_assistant_message`), for calls that are none, too.

    It raises an error for calls that are no JSON or lack a key, as those that `max_tokens` cut are; now they are texts.
    """

    def reader(*given: Any, cleaned_content: str = "", **others: Any) -> Any:
        try:
            return parse(*given, cleaned_content=cleaned_content, **others)
        except (ValueError, TypeError, KeyError):
            return cleaned_content, None, None

    return reader


def main() -> None:
    """Load the model, and serve it until a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="its folder, and its name in requests")
    parser.add_argument("--device", default="cpu", help="cpu, or auto for the GPUs")
    parser.add_argument("--dtype", default="auto", help="in which it computes; auto is that of the weights")
    parser.add_argument("--host", default="127.0.0.1", help="the address where it listens")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--name", action="append", default=[], help="another name of this host by which it may be asked"
    )
    given = parser.parse_args()
    key = os.environ.pop(KEY, "").strip()
    if not key:
        sys.exit(f"there is no key: set {KEY}")
    import uvicorn  # only here: they take seconds, and a wrong call should say so at once
    from transformers.cli.serving import chat_completion
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import GenerationState

    manager = ModelManager(device=given.device, dtype=given.dtype, force_model=given.model)
    chat_completion.parse_assistant_message = with_unreadable(chat_completion.parse_assistant_message)
    kind = chat_completion.ChatCompletionHandler
    kind.get_processor_inputs_from_messages = staticmethod(with_texts(kind.get_processor_inputs_from_messages))
    handler = kind(model_manager=manager, generation_state=GenerationState())
    app = app_of(given.model, handler.handle_request, key, tuple(given.name))
    uvicorn.run(app, host=given.host, port=given.port)


if __name__ == "__main__":
    main()
