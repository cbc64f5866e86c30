"""Sends a run's story to its trackers, each on its own: one that fails keeps no other from getting it."""

import errno
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.config.track_settings import TrackSettings
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import whole_folder
from vlmflow.core.keys import MLFLOW_KEYS, OTLP_KEYS, keys_of
from vlmflow.core.own_environment import ask, python_of
from vlmflow.core.printable import printable, printable_lines
from vlmflow.track.accounts import RowTrace, Sent, Story, Tracked

log = logging.getLogger("vlmflow")

CONTENT = "content"
"""The file beside an offline run that holds the digest of its content."""

NETWORK = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC"),
)
"""The variables that say how a program reaches a server, and whom it trusts."""

LONGEST = 1500.0
"""Seconds that a tracker has for a run: a server that sends a byte now and then would hold it for ever.

Two of them and the local one fit into the rule's hour.
"""

LASTING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""What a file system says that it would say again. It may have passed with any other error, such as a full disk."""


def send(story: Story, traces: Callable[[], Sequence[RowTrace]], settings: TrackSettings, store: Path) -> Tracked:
    """Send a run to every tracker of its settings, and return what they have.

    traces: gives those of the evaluated rows. store: the folder of offline runs.

    Raises VlmflowError if the environment `track` is missing, and with all that failed, after every tracker was tried:
    PassingError if one of the failures may pass.
    """
    python_of("track")
    told = msgspec.to_builtins(story)
    senders: dict[str, Callable[[], Sent]] = {}
    if (server := settings.mlflow) is not None:
        senders["mlflow"] = partial(_to_mlflow, server, settings.experiment, told)
    if (project := settings.wandb) is not None:
        senders["wandb"] = partial(_to_wandb, project, story, told, store)
    if (endpoint := settings.otlp) is not None:
        senders["otlp"] = lambda: _to_otlp(endpoint, settings.experiment, traces(), story)
    sent: dict[str, Sent] = {}
    failed: dict[str, VlmflowError] = {}
    for name, sender in senders.items():
        try:
            one = sent[name] = sender()
            log.info(f"{name}: {one.where} {'got' if one.new else 'had'} run {story.run}, {one.figures:,} figures")
        except Exception as error:  # whatever it is, the others get their turn
            failed[name] = _explained(error)
    if failed:
        raise _all_of(failed, story.run, ", ".join(sent) or "none")
    return Tracked(story.run, story.digest, story.content, **sent)


def _explained(error: Exception) -> VlmflowError:
    if isinstance(error, VlmflowError):
        return error
    if isinstance(error, OSError):
        kind = VlmflowError if error.errno in LASTING else PassingError
        return kind(str(error), "see that this folder is there and has room, and that this account may write into it")
    log.error("this is a bug:", exc_info=error)
    return VlmflowError(f"{type(error).__name__}: {error}", "this is a bug; its traceback is above; please report it")


def _all_of(failed: dict[str, VlmflowError], run: str, reached: str) -> VlmflowError:
    """Return one error for those of several trackers, with the next step of each."""
    causes = "; ".join(f"{name}: {printable(error.cause)}" for name, error in failed.items())
    steps = "".join(f"\n  {name}: {printable_lines(error.next_step)}" for name, error in failed.items())
    passes = any(isinstance(error, PassingError) for error in failed.values())
    return (PassingError if passes else VlmflowError)(
        f"run {run} did not reach every tracker (it reached: {reached}). {causes}",
        f"as below, then run the same command again: it sends what is missing. Nothing else depends on it{steps}",
    )


def _to_mlflow(address: str, experiment: str, told: Any) -> Sent:
    question = {"to": address, "experiment": experiment, "story": told}
    answer = ask("track", "vlmflow.track.to_mlflow", question, keys_of(MLFLOW_KEYS), (*NETWORK, "MLFLOW_*"), LONGEST)
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
        ask("track", "vlmflow.track.to_wandb", question, {"WANDB_DIR": str(folder.absolute())}, limit=LONGEST)
        _remove_links(folder)
        (folder / CONTENT).write_text(wanted)
    return Sent(str(place), story.run, True, figures)


def _remove_links(folder: Path) -> None:
    """Remove wandb's links to its logs: they name the folder as it is called until it is whole."""
    for place in folder.rglob("*"):
        if place.is_symlink():
            place.unlink()


def _to_otlp(address: str, project: str, traces: Sequence[RowTrace], story: Story) -> Sent:
    question = {"to": address, "project": project, "traces": msgspec.to_builtins(traces)}
    answer = ask("track", "vlmflow.track.to_otlp", question, keys_of(OTLP_KEYS), (*NETWORK, "OTEL_*"), LONGEST)
    return Sent(address, f"{story.run}: {len(traces):,} traces", True, answer["figures"])
