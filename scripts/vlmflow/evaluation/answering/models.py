"""The models that are asked: each on a server that this stage runs, or by its name on a server that is given."""

import importlib.metadata
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.budget import FEWEST_TOKENS, PictureBudget
from vlmflow.serving.answer import Answer
from vlmflow.serving.client import Client
from vlmflow.serving.served_folder import link_served
from vlmflow.serving.server import Server, end_of, serve_with_transformers
from vlmflow.swift.child_process import gpu_products

PACKAGES = ("torch", "transformers")
"""Packages whose versions may change an answer of our own server."""

Ask = Callable[[list[dict[str, Any]], int, str], Answer]
"""Takes messages (`rows.messages.messages_of`), the most tokens of the answer, and tools as in a row."""

ENDING = 5.0
"""Seconds for a process to end after its connection broke."""


@dataclass(frozen=True)
class OwnModel:
    """A model that this stage serves from links to its files, with the run's picture limits.

    name: for people. digest: of its files, in `folder`. image_max_tokens, dtype, device: settings of the run.
    threads: cores for the server.
    """

    name: str
    digest: str
    folder: Path
    image_max_tokens: int
    dtype: str
    device: str
    threads: int

    @property
    def meaning(self) -> Mapping[str, Any]:
        """All but the question that determines an answer."""
        limits = PictureBudget.of(self.folder, self.image_max_tokens).left_to_processor
        return {
            "model": self.digest,
            "image_tokens": [FEWEST_TOKENS, self.image_max_tokens],
            "dtype": self.dtype,
            "device": self.device,
            "gpus": gpu_products() if self.device == "cuda" else [],
            "versions": versions(),
            **({"picture_limits": limits} if limits else {}),
        }

    @contextmanager
    def asked(self, log: Path) -> Iterator[Ask]:
        """Serve the model as long as the block runs. log: a file for the server's output."""
        with tempfile.TemporaryDirectory(prefix="vlmflow-answer-") as scratch:
            folder, caches = Path(scratch) / "model", Path(scratch) / "caches"
            caches.mkdir()
            link_served(self.folder, folder, self.image_max_tokens)
            device = "auto" if self.device == "cuda" else self.device
            serving = serve_with_transformers(
                folder, caches, log, device=device, dtype=self.dtype, threads=self.threads
            )
            with serving as server, Client(server.url, server.model, server.key) as client:
                yield lambda *question: ask_own(self.name, server, client, *question)


@dataclass(frozen=True)
class ModelAtUrl:
    """A model of a server that somebody else runs. url, served_as: its address and name there. key: of the server."""

    name: str
    digest: str
    url: str
    served_as: str
    key: str | None = field(default=None, repr=False)

    @property
    def meaning(self) -> Mapping[str, Any]:
        """All but the question that determines an answer, as far as it is known."""
        return {"model": self.digest, "url": self.url, "served_as": self.served_as}

    @contextmanager
    def asked(self, log: Path) -> Iterator[Ask]:
        """Connect to the server. log: unused, its output is not here."""
        with Client(self.url, self.served_as, self.key) as client:
            yield client.answer


Model = OwnModel | ModelAtUrl


def versions() -> dict[str, str]:
    """Return the versions of packages that may change an answer."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}


def ask_own(
    name: str, server: Server, client: Client, messages: list[dict[str, Any]], most: int, tools: str = ""
) -> Answer:
    """Ask a server that this stage runs.

    Raises an error of the same class with the end of its output if it has ended.
    """
    try:
        return client.answer(messages, most, tools)
    except VlmflowError as error:
        if (code := _ended(server)) is None:
            raise
        raise type(error)(
            f"the server of {name} ended with code {code}",
            "answers so far are kept: fix the cause and run the same command again; a server that was killed usually "
            f"ran out of memory. The end of its output, {server.log}:\n{end_of(server.log)}",
        ) from None


def _ended(server: Server) -> int | None:
    """Return the exit code of a server that has ended, or is just ending."""
    try:
        return server.process.wait(ENDING)
    except subprocess.TimeoutExpired:
        return None
