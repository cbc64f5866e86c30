"""Copies the hub's token from a file that git ignores into a Secret, only over standard input."""

import base64
import json
import subprocess
from pathlib import Path

from vlmflow.core.errors import VlmflowError
from vlmflow.remote.cluster.instance import labels, named

SECRET = "hf-token"  # noqa: S105 - the name of the object
KEY = "HF_TOKEN"


def read_token(file: Path) -> str:
    """Return the value of the line HF_TOKEN=… in a file.

    Raises VlmflowError if it is missing, empty, not ASCII or has a blank in it, or if git tracks the file. No message
    shows the token.
    """
    advice = f"write a line {KEY}=hf_… into {file}"
    if not file.is_file():
        raise VlmflowError(f"no file {file}", advice)
    tracked = subprocess.run(["git", "ls-files", "--error-unmatch", file.name], cwd=file.parent, capture_output=True)
    if tracked.returncode == 0:
        raise VlmflowError(
            f"{file} is tracked by git", f"run git rm --cached {file}; then create a new token on the hub"
        )
    for line in file.read_text().splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        value = value.strip().strip("'\"")
        if name.strip() == KEY:
            if not value or not value.isascii() or any(character.isspace() for character in value):
                raise VlmflowError(f"{file}: the value of {KEY} is empty, not ASCII, or has a blank in it", advice)
            return value
    raise VlmflowError(f"{file} has no line {KEY}=…", advice)


def secret(token: str) -> str:
    """Return the Secret as JSON, for kubectl's standard input."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": named(SECRET), "labels": {"app.kubernetes.io/part-of": "vlmflow", **labels()}},
            "type": "Opaque",
            "data": {KEY: base64.b64encode(token.encode()).decode()},
        }
    )
