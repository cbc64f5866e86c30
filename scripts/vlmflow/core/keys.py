"""Keys of other servers: they come from environment variables, and appear in no message.

An HTTP library quotes a header that it cannot send. So a key is checked before anything gets it.
"""

import base64
import html
import json
import os
import re
from collections.abc import Iterator
from urllib.parse import quote, unquote

from vlmflow.core.errors import VlmflowError

MLFLOW_KEYS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
OTLP_KEYS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
ANSWER_KEY = "VLMFLOW_ANSWER_KEY"

SECRETS = (
    *("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", *OTLP_KEYS, ANSWER_KEY),
    *("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)
"""The variables whose values no message may contain."""

ENCODED = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
"""They travel in base64, so that any letter may be in them."""

ENTRY = re.compile(r"[ \t]*[!#-'*+\-.0-9A-Z^-z|~]+[ \t]*=[ \t]*[ !#-+\--:<-\[\]-~]+")
"""An entry of headers as OpenTelemetry takes it (opentelemetry/util/re.py); it drops any other with a warning."""

SHORTEST = 8
"""Characters of a header's value that may be a key: shorter ones are numbers, and occur in any text."""


def key_of(name: str) -> str | None:
    """Return the value of a variable without white space at its ends (a Secret made with `echo` has a line break).

    Returns None if it is not set or empty. Raises VlmflowError, without the value, if no header can carry it.
    """
    value = os.environ.get(name, "").strip()
    if not _fits(value, any_letter=name in ENCODED):
        raise VlmflowError(
            f"{name}: its value has a line break, another control character, or a letter that is not ASCII",
            "set it again, on one line, as the server's owner gave it to you",
        )
    if name in OTLP_KEYS:
        _check_headers(name, value)
    return value or None


def keys_of(names: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of a program, each as `key_of` gives it, "" if it is not set; raises as that does."""
    return {name: key_of(name) or "" for name in names}


def without_keys(text: str) -> str:
    """Return a text with *** in the place of every key that this process knows."""
    forms = {form for secret in _secrets() for form in _forms(secret)}
    for form in sorted(forms, key=len, reverse=True):  # one may contain another
        text = text.replace(form, "***")
    return text


def _fits(value: str, any_letter: bool = False) -> bool:
    return value.isprintable() and (any_letter or value.isascii())


def _check_headers(name: str, value: str) -> None:
    entries = [entry for entry in value.split(",") if entry.strip()]
    for number, entry in enumerate(entries, 1):
        if not ENTRY.fullmatch(entry.strip()) or not _fits(unquote(entry).strip()):
            raise VlmflowError(
                f"{name}: its entry {number} of {len(entries)} is not NAME=VALUE in printable ASCII characters",
                "write NAME=VALUE, with commas between entries, and %2C, %3B, %22 and %5C for comma, semicolon, "
                "quotation mark and backslash in a value",
            )


def _forms(secret: str) -> tuple[str, ...]:
    """Return a key as a message may have it: a library quotes it, a server repeats it in JSON, a page or an address."""
    in_address = (quote(secret, safe=safe, errors="replace") for safe in ("/", ""))
    return secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], html.escape(secret), *in_address


def _secrets() -> Iterator[str]:
    for name in SECRETS:
        if value := os.environ.get(name, "").strip():
            yield value
            for entry in value.split(",") if name in OTLP_KEYS else ():
                sent = entry.partition("=")[2].strip()
                # A scheme such as Basic stands before the key.
                forms = (sent, unquote(sent), *unquote(sent).split(" ")[-1:])
                yield from (form for form in forms if len(form) >= SHORTEST)
    user, password = (os.environ.get(name, "").strip() for name in ENCODED)
    if user and password:
        yield base64.b64encode(f"{user}:{password}".encode(errors="replace")).decode()
