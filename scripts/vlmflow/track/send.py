"""Sends a run's story to its trackers, each on its own: one that fails keeps no other from getting it."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.config.track_settings import TrackSettings
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import whole_folder
from vlmflow.core.own_environment import ask, python_of
from vlmflow.core.printable import printable
from vlmflow.track.accounts import RowTrace, Sent, Story, Tracked

log = logging.getLogger("vlmflow")

CONTENT = "content"
"""The file beside an offline run that holds the digest of its content."""


def send(story: Story, traces: Callable[[], Sequence[RowTrace]], settings: TrackSettings, store: Path) -> Tracked:
    """Send a run to every tracker of its settings, and return what they have.

    traces: gives those of the evaluated rows. store: the folder of offline runs.

    Raises VlmflowError if the environment `track` is missing, and PassingError with all that failed, after every
    tracker was tried.
    """
    python_of("track")
    told = msgspec.to_builtins(story)
    senders: dict[str, Callable[[], Sent]] = {}
    if (server := settings.mlflow) is not None:
        senders["mlflow"] = partial(_to_mlflow, server, settings.experiment, told)
    if (project := settings.wandb) is not None:
        senders["wandb"] = partial(_to_wandb, project, story, told, store)
    if (endpoint := settings.otlp) is not None:
        senders["otlp"] = lambda: _to_otlp(endpoint, traces(), story)
    sent: dict[str, Sent] = {}
    failed = []
    for name, sender in senders.items():
        try:
            one = sent[name] = sender()
            log.info(f"{name}: {one.where} {'got' if one.new else 'had'} run {story.run}, {one.figures:,} figures")
        except VlmflowError as error:
            failed.append(f"{name}: {printable(error.cause)}")
    if failed:
        got = ", ".join(sent) or "none"
        raise PassingError(
            f"run {story.run} did not reach every tracker (it reached: {got}). {'; '.join(failed)}",
            "see that the tracker runs, and that this machine has its key; then run the same command again: it sends "
            "what is missing. Nothing else depends on it",
        )
    return Tracked(story.run, story.digest, story.content, **sent)


def _to_mlflow(address: str, experiment: str, told: Any) -> Sent:
    answer = ask("track", "vlmflow.track.to_mlflow", {"to": address, "experiment": experiment, "story": told})
    return Sent(f"{address}, experiment {experiment}", answer["name"], answer["new"], answer["figures"])


def _to_wandb(project: str, story: Story, told: Any, store: Path) -> Sent:
    """Write the offline run, whole, in the place of an older one of this run."""
    place = store / "wandb" / f"{story.run}-{story.digest[:16]}"
    wanted = f"{project} {story.content}"
    mark = place / CONTENT
    figures = len(story.points) + len(story.results) + len(story.evaluated)
    if mark.is_file() and mark.read_text() == wanted:
        return Sent(str(place), story.run, False, figures)
    with whole_folder(place) as folder:
        question = {"project": project, "folder": str(folder.absolute()), "story": told}
        ask("track", "vlmflow.track.to_wandb", question, {"WANDB_DIR": str(folder.absolute())})
        _remove_links(folder)
        (folder / CONTENT).write_text(wanted)
    return Sent(str(place), story.run, True, figures)


def _remove_links(folder: Path) -> None:
    """Remove wandb's links to its logs: they name the folder as it is called until it is whole."""
    for place in folder.rglob("*"):
        if place.is_symlink():
            place.unlink()


def _to_otlp(address: str, traces: Sequence[RowTrace], story: Story) -> Sent:
    answer = ask("track", "vlmflow.track.to_otlp", {"to": address, "traces": msgspec.to_builtins(traces)})
    return Sent(address, f"{story.run}: {len(traces):,} traces", True, answer["figures"])
