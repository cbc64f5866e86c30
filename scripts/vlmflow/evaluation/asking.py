"""The turns of a row that models answer, each after the row's own turns before it.

In a row with tools these are all places where its assistant speaks: an answer may be calls, and answer a response.

The models that are asked: each on a server that this stage runs, or by its name on a server that is given.

Asks a model all questions of a run; answers are kept one by one, so that a kill costs one.
"""

import hashlib
import importlib.metadata
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import Progress
from vlmflow.evaluation.choice import Case
from vlmflow.evaluation.report import KeptLines, Keyed
from vlmflow.evaluation.scoring.stated import answer_in
from vlmflow.pictures.budget import FEWEST_TOKENS, PictureBudget
from vlmflow.rows.chat import Turn, as_written, messages_of, places_answered
from vlmflow.serving.client import Answer, Client, picture_part
from vlmflow.serving.finished_run import link_served
from vlmflow.serving.server import Server, end_of, serve_with_transformers
from vlmflow.swift.child_process import gpu_products


@dataclass(frozen=True)
class Question:
    """A turn to answer. key: a digest of turns, pictures and tools. row: the row's id. rounds: answers before it.

    turns: from the first, also of system, to the one that is answered. images: names in the picture store.
    reference: the row's own answer. gold: the right one. tools: as in a row.
    """

    key: str
    row: str
    rounds: int
    turns: Sequence[Turn]
    images: Sequence[str]
    reference: str
    gold: str
    tools: str = ""


def questions_of(case: Case, rounds: int, feedback: bool, gold: str | None = None) -> list[Question]:
    """Return the questions of a row: the first, and one after each of its first `rounds` answers.

    feedback: whether the row's later human turns are feedback, so that one answer is right for all turns. gold: this
    answer, if the raw row has it; otherwise it is that of the last turn.
    """
    questions = []
    tools = [case.row.tools] if case.row.tools else []
    for number, (first, end) in enumerate(places_answered(case.row.conversations)[: rounds + 1]):
        shown = case.row.until(first)
        reference = "\n".join(as_written(case.row.conversations[first:end]))
        right = (gold or case.answer) if feedback else reference
        content = msgspec.json.encode([shown.conversations, case.pictures[: len(shown.images)], *tools])
        questions.append(
            Question(
                key=hashlib.sha256(content).hexdigest()[:32],
                row=case.row.id,
                rounds=number,
                turns=shown.conversations,
                images=shown.images,
                reference=reference,
                gold=answer_in(right) or right.strip(),
                tools=case.row.tools,
            )
        )
    return questions


PACKAGES = ("torch", "transformers")
"""Packages whose versions may change an answer of our own server."""

Ask = Callable[[list[dict[str, Any]], int, str], Answer]
"""Takes messages (`rows.chat.messages_of`), the most tokens of the answer, and tools as in a row."""

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
    def connected(self, log: Path) -> Iterator[Ask]:
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
    def connected(self, log: Path) -> Iterator[Ask]:
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
        with suppress(subprocess.TimeoutExpired):
            code = server.process.wait(ENDING)  # it has ended, or is just ending
            raise type(error)(
                f"the server of {name} ended with code {code}",
                "answers so far are kept: fix the cause and run the same command again; a server that was killed "
                f"usually ran out of memory. The end of its output, {server.log}:\n{end_of(server.log)}",
            ) from None
        raise


ASKING = 1
"""The way in which models are asked. Kept answers belong to it: raise it whenever a change of this code, of `models` or
of `vlmflow.serving` may change the answer to the same question."""


class KeptAnswer(Keyed, frozen=True):
    """A model's answer. key: that of the question. cut: whether it had not ended after the allowed tokens."""

    text: str
    cut: bool


def answers_to(
    questions: Sequence[Question], model: Model, pictures: Path, max_tokens: int, store: Path
) -> tuple[dict[str, KeptAnswer], int]:
    """Return a model's answers by the questions' keys, and how many of them were not kept before.

    pictures: the picture store of the rows. max_tokens: of an answer. store: `stores.evaluations`.

    A server is started only if an answer is missing. Its log is removed if all goes well.
    Raises VlmflowError with the row if an answer fails.
    """
    kept = KeptLines(store, "answers", {**model.meaning, "max_tokens": max_tokens, "asking": ASKING}, KeptAnswer)
    known = kept.read()
    missing = list({question.key: question for question in questions if question.key not in known}.values())
    if missing:
        file = kept.new_file()
        log = file.with_suffix(".log")
        with (
            model.connected(log) as ask,
            file.open("ab") as lines,
            Progress(f"answers of {model.name}", len(missing), "answers") as progress,
        ):
            for question in missing:
                answer = _answer(question, ask, pictures, max_tokens)
                lines.write(msgspec.json.encode(answer) + b"\n")
                lines.flush()
                known[answer.key] = answer
                progress.advance()
        log.unlink(missing_ok=True)
    return {question.key: known[question.key] for question in questions}, len(missing)


def _answer(question: Question, ask: Ask, pictures: Path, max_tokens: int) -> KeptAnswer:
    try:
        messages = messages_of(question.turns, [picture_part(pictures / name) for name in question.images])
        answer = ask(messages, max_tokens, question.tools)
    except VlmflowError as error:
        raise type(error)(
            f"row {question.row}, after {question.rounds} rounds: {error.cause}", error.next_step
        ) from None
    return KeptAnswer(question.key, answer.text, answer.cut)
