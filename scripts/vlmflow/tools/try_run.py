"""A run's base model and its tuned weights are asked the same; both answers stand side by side; then comes feedback.

Both models are in the memory of this process, on its GPUs if it has some, and scale pictures as the training did.
"""

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from vlmflow.config.model import settings_of
from vlmflow.core.errors import VlmflowError
from vlmflow.rows.chat import Turn, without_tags
from vlmflow.serving.asked import Asked, asked_by_person, asked_in_val, lines, opened, show
from vlmflow.serving.client import Answer
from vlmflow.serving.finished_run import finished_run
from vlmflow.swift.child_process import quick_imports


def main(
    name: str,
    files: list[Path],
    folder: Path,
    picture: Path | None = None,
    ask: str | None = None,
    feedback: str | None = None,
    most_tokens: int = 256,
) -> None:
    """Ask, show, and ask again after feedback.

    name: the run. files: as for snakemake's --configfile; they may say where the pictures are. folder: the working
    directory. picture, ask: what to ask; without them a row of the val split. feedback: on the first answers; without
    it the person is asked, and without a terminal the row's own is used. most_tokens: of an answer.

    Raises VlmflowError if the run has no weights, or there is nothing to ask.
    """
    run, console = finished_run(folder, name), Console(highlight=False)
    stores = settings_of(files).stores
    if picture and not ask:
        raise VlmflowError(f"{picture}: there is no question about it", "ask one by --ask")
    query = asked_by_person(ask, picture) if ask else asked_in_val(folder / "fitted" / name, folder / stores.pictures)
    pictures = [opened(file) for file in query.pictures]
    console.print(Text(lines("\n".join([query.label, *map(str, query.pictures)]))))
    console.print(Text(f"\nquestion: {lines(without_tags(query.turns[-1].value))}"))
    names = [f"base ({run.source})", f"tuned ({name})"]
    with tempfile.TemporaryDirectory(prefix="vlmflow-try-") as scratch:
        with quick_imports():  # takes seconds: only after everything that can be refused without it
            from vlmflow.serving.loaded import load_both
        models = load_both(run, Path(scratch))
        first = [model.answer(query.turns, pictures, most_tokens, query.tools) for model in models]
        show(console, names, first)
        given = feedback or _feedback(query)
        if not given:
            return
        console.print(Text(f"feedback: {lines(given)}"))
        second = [
            model.answer(_after(query, answer, given), pictures, most_tokens, query.tools)
            for model, answer in zip(models, first, strict=True)
        ]
        show(console, names, second)


def _feedback(query: Asked) -> str | None:
    """Ask the person; Enter stands for the row's own feedback. Without a terminal it is taken at once."""
    if not sys.stdin.isatty():
        return query.feedback
    own = f" [Enter: {lines(query.feedback)}]" if query.feedback else " [Enter: none]"
    try:
        return input(f"feedback{own}\n> ").strip() or query.feedback
    except EOFError:
        return None


def _after(query: Asked, answer: Answer, feedback: str) -> list[Turn]:
    return [*query.turns, Turn("gpt", answer.text), Turn("human", feedback)]
