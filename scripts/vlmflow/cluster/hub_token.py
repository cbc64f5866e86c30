"""The hub's token: from a file that git ignores into a Secret, over standard input, and nowhere else."""

import base64
import json
import subprocess
from pathlib import Path

from vlmflow.cluster.instance import labels, named
from vlmflow.core.errors import VlmflowError

SECRET = "hf-token"  # noqa: S105 - the name of the object
KEY = "HF_TOKEN"


def read_token(file: Path) -> str:
    """Read the line HF_TOKEN=… of a file of such lines.

    Raises VlmflowError where it is missing, empty, has a blank in it, or where git tracks the file. No message holds
    the token.
    """
    advice = f"write a line {KEY}=hf_… into {file}"
    if not file.is_file():
        raise VlmflowError(f"no file {file}", advice)
    tracked = subprocess.run(["git", "ls-files", "--error-unmatch", file.name], cwd=file.parent, capture_output=True)
    if tracked.returncode == 0:
        raise VlmflowError(f"{file} is tracked by git", f"git rm --cached {file}; then make a new token on the hub")
    for line in file.read_text().splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        value = value.strip().strip("'\"")
        if name.strip() == KEY:
            if not value or not value.isascii() or any(character.isspace() for character in value):
                raise VlmflowError(f"{file}: the value of {KEY} is empty, or has a blank in it", advice)
            return value
    raise VlmflowError(f"{file} has no line {KEY}=…", advice)


def secret(token: str) -> str:
    """Give the Secret as JSON, for kubectl's standard input."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": named(SECRET), "labels": {"app.kubernetes.io/part-of": "vlmflow", **labels()}},
            "type": "Opaque",
            "data": {KEY: base64.b64encode(token.encode()).decode()},
        }
    )
